"""What killed programs left in /dev/shm, and packages that are there twice."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from launcher.host.disk_speed import BLOCK_BYTES, measure_disk
from launcher.host.shm_segments import YOUNG_S, find_stale
from launcher.host.software import read_copies, read_nccl_libraries


def segment(folder: Path, name: str, num_bytes: int = 8192, age_s: float = 2 * YOUNG_S) -> Path:
    path = folder / name
    path.write_bytes(bytes(num_bytes))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_only_old_segments_of_known_libraries_that_nobody_holds(tmp_path: Path) -> None:
    segment(tmp_path, "nccl-AbCdEf", 4096)
    segment(tmp_path, "torch_77_123_0", 16384)
    segment(tmp_path, "somebody-elses")
    segment(tmp_path, "psm_young", age_s=0)
    with segment(tmp_path, "psm_mapped").open("r+b") as stream:
        mapped = mmap.mmap(stream.fileno(), 0)
    with segment(tmp_path, "psm_open").open("rb"):
        assert [(s.name, s.size_bytes) for s in find_stale(tmp_path)] == [
            ("torch_77_123_0", 16384),
            ("nccl-AbCdEf", 4096),
        ]
    mapped.close()
    assert {s.name for s in find_stale(tmp_path)} == {"torch_77_123_0", "nccl-AbCdEf", "psm_mapped", "psm_open"}


def test_the_speed_of_a_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    speed = measure_disk(tmp_path / "run", budget_s=0.02)
    assert speed is not None
    assert speed.written_bytes >= BLOCK_BYTES
    assert speed.write_bytes_per_s > 1e6
    assert list(tmp_path.iterdir()) == []
    assert measure_disk(Path("/proc/run"), budget_s=0.02) is None


def test_a_package_that_is_installed_twice(tmp_path: Path) -> None:
    for place, name in (("a", "deepspeed-0.19.8"), ("b", "deepspeed-0.16.0"), ("b", "torch-2.13.0")):
        (tmp_path / place / f"{name}.dist-info").mkdir(parents=True)
    (copies,) = read_copies(["", str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "gone"), str(tmp_path / "a")])
    assert copies.name == "deepspeed"
    assert copies.found == (f"0.19.8 in {tmp_path}/a", f"0.16.0 in {tmp_path}/b")


def test_another_nccl_in_front_of_the_one_of_torch(tmp_path: Path) -> None:
    for folder in ("opt", "site/nvidia/nccl/lib"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "libnccl.so.2").touch()
    path = f"{tmp_path}/opt:{tmp_path}/gone::{tmp_path}/site/nvidia/nccl/lib"
    assert read_nccl_libraries({"LD_LIBRARY_PATH": path}) == (f"{tmp_path}/opt/libnccl.so.2",)
    assert read_nccl_libraries({"LD_PRELOAD": "/x/libnccl.so /x/libfoo.so"}) == ("/x/libnccl.so",)
    assert read_nccl_libraries({}) == ()
