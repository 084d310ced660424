"""Cgroups v1 and v2, processor and memory, from trees as the kernel lays them out."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.host.cgroups import find_cgroup, read_cpu_quota, read_memory_counters, read_memory_limit
from launcher.host.compute import Memory, read_cpu, read_memory

GIB = 1 << 30
V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "36 31 0:33 {root} /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
)
V2_MOUNT = "31 23 0:28 {root} /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def v2(root: Path, own: str, files: dict[str, str], mount_root: str = "/") -> Path:
    base = {"proc/self/cgroup": f"0::{own}\n", "proc/self/mountinfo": V2_MOUNT.format(root=mount_root)}
    controllers = {"sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids\n"}
    return lay_out(root, base | controllers | {f"sys/fs/cgroup/{name}": text for name, text in files.items()})


def v1(root: Path, own: str, files: dict[str, str], mount_root: str = "/") -> Path:
    base = {
        "proc/self/cgroup": f"4:memory:{own}\n2:cpu,cpuacct:{own}\n0::/\n",
        "proc/self/mountinfo": V1_MOUNTS.format(root=mount_root),
    }
    return lay_out(root, base | {f"sys/fs/cgroup/{name}": text for name, text in files.items()})


def test_v2_the_tightest_ancestor_limits(tmp_path: Path) -> None:
    root = v2(
        tmp_path,
        "/job/rank",
        {
            "job/rank/memory.max": "max\n",
            "job/rank/cpu.max": "max 100000\n",
            "job/memory.max": f"{16 * GIB}\n",
            "job/memory.current": f"{6 * GIB}\n",
            "job/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
            "job/cpu.max": "350000 100000\n",
        },
    )
    limit = read_memory_limit(root)
    assert (limit.limit_bytes, limit.used_bytes) == (16 * GIB, 4 * GIB)
    assert read_cpu_quota(root) == 3.5


def test_v2_inside_a_container_with_a_namespace(tmp_path: Path) -> None:
    root = v2(tmp_path, "/", {"memory.max": f"{GIB}\n", "memory.current": "5\n"})
    assert read_memory_limit(root).limit_bytes == GIB


def test_v1_inside_a_container_whose_path_is_the_hosts(tmp_path: Path) -> None:
    root = v1(
        tmp_path,
        "/kubepods/pod1/abc",
        {
            "memory/memory.limit_in_bytes": f"{8 * GIB}\n",
            "memory/memory.usage_in_bytes": f"{3 * GIB}\n",
            "memory/memory.stat": f"cache 9\ntotal_inactive_file {GIB}\n",
            "cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
            "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
        mount_root="/kubepods/pod1/abc",
    )
    limit = read_memory_limit(root)
    assert (limit.limit_bytes, limit.used_bytes) == (8 * GIB, 2 * GIB)
    assert read_cpu_quota(root) == 2.0


def test_v1_without_limits(tmp_path: Path) -> None:
    root = v1(
        tmp_path,
        "/a",
        {
            "memory/a/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/a/memory.usage_in_bytes": "7\n",
            "cpu,cpuacct/a/cpu.cfs_quota_us": "-1\n",
            "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
        },
    )
    assert read_memory_limit(root).limit_bytes is None
    assert read_cpu_quota(root) is None


def test_a_path_outside_the_namespace_means_the_mount_itself(tmp_path: Path) -> None:
    root = v2(tmp_path, "/../../other", {"memory.max": "4096\n", "memory.current": "1\n"})
    group = find_cgroup("memory", root)
    assert group is not None
    assert group.directories == (root / "sys/fs/cgroup",)


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    assert find_cgroup("memory", tmp_path) is None
    assert read_memory_limit(tmp_path).limit_bytes is None
    assert read_cpu_quota(tmp_path) is None


@pytest.mark.parametrize(
    ("flags", "has_bf16"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16", True),
        ("flags\t\t: fpu amx_bf16 amx_tile", True),
        ("Features\t: fp asimd i8mm bf16", True),
        ("flags\t\t: fpu avx2 avx512f", False),
    ],
)
def test_bf16_of_the_processor(tmp_path: Path, flags: str, has_bf16: bool) -> None:
    text = f"processor\t: 0\nmodel name\t: Test CPU\n{flags}\n\nprocessor\t: 1\n"
    cpu = read_cpu(lay_out(tmp_path, {"proc/cpuinfo": text}))
    assert cpu.flags_bf16 is has_bf16
    assert cpu.model == "Test CPU"


def test_a_quota_below_one_processor_still_leaves_one(tmp_path: Path) -> None:
    assert read_cpu(v2(tmp_path, "/", {"cpu.max": "20000 100000\n"})).num_usable == 1


def test_memory_is_what_the_cgroup_leaves(tmp_path: Path) -> None:
    root = v2(tmp_path, "/", {"memory.max": f"{4 * GIB}\n", "memory.current": f"{GIB}\n"})
    lay_out(root, {"proc/meminfo": f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {32 << 20} kB\n"})
    memory = read_memory(root)
    assert memory == Memory(64 * GIB, 32 * GIB, 4 * GIB, GIB)
    assert memory is not None
    assert memory.usable_bytes == 3 * GIB


def test_memory_that_cannot_be_read(tmp_path: Path) -> None:
    assert read_memory(tmp_path) is None


def test_memory_counters_of_the_own_group_in_both_versions(tmp_path: Path) -> None:
    events = {"job/memory.events": "max 9\noom_kill 2\n", "memory.events": "max 1\noom_kill 1\n"}
    second = v2(tmp_path / "2", "/job", {**events, "job/memory.max": f"{GIB}\n", "job/memory.peak": f"{GIB - 1}\n"})
    assert read_memory_counters(second) == {"max": 9, "oom_kill": 2, "limit": GIB, "peak": GIB - 1}
    control = {"memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"}
    first = v1(tmp_path / "1", "/job", {**control, "memory/job/memory.failcnt": "77\n"})
    assert read_memory_counters(first) == {"oom_kill_disable": 0, "under_oom": 0, "oom_kill": 3, "max": 77}
    assert read_memory_counters(tmp_path / "none") == {}
