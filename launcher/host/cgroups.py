"""Limits that the kernel puts on this process, from cgroups v1 and v2.

A limit may sit on any ancestor, so each reader walks from the process's own group up to the mount's root and the
tightest limit wins. Inside a container the path in `/proc/self/cgroup` may name directories of the host that are not
mounted here; then the mount's root is this container's own group.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
NO_LIMIT_FROM_BYTES = 1 << 60  # v1 says "unlimited" as a number near 2**63, rounded to a page


@dataclass(frozen=True)
class Cgroup:
    """One controller's directories, from this process's own group up to the root of the mount."""

    version: int  # 1 or 2
    directories: tuple[Path, ...]


@dataclass(frozen=True)
class MemoryLimit:
    """The tightest limit on this process's memory, and what its group holds now without reclaimable file pages."""

    limit_bytes: int | None
    used_bytes: int | None


@dataclass(frozen=True)
class _MountLine:
    root: str  # the part of the hierarchy that is mounted
    point: str
    fstype: str
    options: frozenset[str]


def find_cgroup(controller: str, root: Path = ROOT) -> Cgroup | None:
    """Where `controller` ("memory", "cpu") is found for this process; None where no such hierarchy is mounted."""
    paths = _own_paths(root)
    mounts = _cgroup_mounts(root)
    for mount in mounts:
        if mount.fstype == "cgroup" and controller in mount.options and controller in paths:
            return Cgroup(1, _directories(root, mount, paths[controller]))
    for mount in mounts:
        if mount.fstype == "cgroup2" and "" in paths:
            found = Cgroup(2, _directories(root, mount, paths[""]))
            if controller in (_read(found.directories[-1] / "cgroup.controllers") or "").split():
                return found
            if any((directory / f"{controller}.max").exists() for directory in found.directories):
                return found
    return None


def read_memory_limit(root: Path = ROOT) -> MemoryLimit:
    group = find_cgroup("memory", root)
    if group is None:
        return MemoryLimit(None, None)
    limit_name, used_name, reclaimable = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if group.version == 1
        else ("memory.max", "memory.current", "inactive_file")
    )
    limits = [(limit, where) for where in group.directories if (limit := _limit(where / limit_name)) is not None]
    limit, where = min(limits, key=lambda pair: pair[0], default=(None, group.directories[0]))
    used = _number(_read(where / used_name))
    if used is None:
        return MemoryLimit(limit, None)
    return MemoryLimit(limit, max(0, used - _stat(where / "memory.stat").get(reclaimable, 0)))


def read_memory_counters(root: Path = ROOT) -> dict[str, int]:
    """What the kernel counts of this process's group and of those above it, whose limits hold, too: times at the limit,
    kills, the highest use. Empty where nothing is counted. Names are version 2's; of version 1 what there is."""
    group = find_cgroup("memory", root)
    if group is None:
        return {}
    counters: dict[str, int] = {}
    for where in reversed(group.directories):  # the own group last: its figures count
        if group.version == 2:
            counters.update(_stat(where / "memory.events"))
            files = {"current": "memory.current", "peak": "memory.peak", "limit": "memory.max"}
        else:
            counters.update(_stat(where / "memory.oom_control"))
            files = {"max": "memory.failcnt", "current": "memory.usage_in_bytes", "peak": "memory.max_usage_in_bytes"}
            files["limit"] = "memory.limit_in_bytes"
        values = {name: _number(_read(where / file)) for name, file in files.items()}
        counters.update({n: v for n, v in values.items() if v is not None and v < NO_LIMIT_FROM_BYTES})
    return counters


def read_cpu_quota(root: Path = ROOT) -> float | None:
    """CPUs that the quota allows at any time, e.g. 3.5; None without a quota."""
    group = find_cgroup("cpu", root)
    if group is None:
        return None
    read = _quota_v1 if group.version == 1 else _quota_v2
    return min((quota for where in group.directories if (quota := read(where)) is not None), default=None)


def _own_paths(root: Path) -> dict[str, str]:
    """Controller -> path of this process's group; the v2 hierarchy under the empty name."""
    paths: dict[str, str] = {}
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def _cgroup_mounts(root: Path) -> list[_MountLine]:
    """Lines of mountinfo (proc(5)): `id parent dev ROOT POINT options [tags] - FSTYPE source SUPER-OPTIONS`."""
    mounts = []
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        before, separator, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if separator and len(left) >= 5 and right and right[0] in ("cgroup", "cgroup2"):
            mounts.append(_MountLine(left[3], left[4], right[0], frozenset(right[-1].split(","))))
    return mounts


def _directories(root: Path, mount: _MountLine, own_path: str) -> tuple[Path, ...]:
    point = root / mount.point.lstrip("/")
    below = own_path
    if mount.root != "/":
        below = own_path[len(mount.root) :] if own_path.startswith(mount.root) else "/"
    own = point / below.strip("/")
    if ".." in Path(below).parts or not own.is_dir():
        return (point,)
    depth = len(Path(below.strip("/")).parts)
    return (own, *list(own.parents)[:depth])


def _quota_v1(directory: Path) -> float | None:
    quota = _number(_read(directory / "cpu.cfs_quota_us"))
    period = _number(_read(directory / "cpu.cfs_period_us"))
    return quota / period if quota and period and quota > 0 else None


def _quota_v2(directory: Path) -> float | None:
    quota, _, period = (_read(directory / "cpu.max") or "").strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _limit(file: Path) -> int | None:
    value = _number(_read(file))
    return value if value is not None and value < NO_LIMIT_FROM_BYTES else None


def _stat(file: Path) -> dict[str, int]:
    pairs = (line.partition(" ") for line in (_read(file) or "").splitlines())
    return {key: int(value) for key, _, value in pairs if value.isdigit()}


def _number(text: str | None) -> int | None:
    try:
        return int((text or "").strip())
    except ValueError:
        return None  # "max", an empty or a missing file


def _read(file: Path) -> str | None:
    try:
        return file.read_text()
    except OSError:
        return None
