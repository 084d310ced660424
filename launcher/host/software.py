"""Versions of what matters to training, from package metadata: importing torch would take seconds."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata

PACKAGES = ("ftlaunch", "torch", "deepspeed", "transformers", "peft", "accelerate", "bitsandbytes")


def read_versions() -> dict[str, str]:
    """Name -> version. A package that is not installed has no entry.

    `torch_cuda` is the CUDA version torch was built for, e.g. `13.0`; absent for builds without CUDA.
    """
    versions = {"python": platform.python_version(), "kernel": os.uname().release}
    if glibc := _glibc():
        versions["glibc"] = glibc
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if "torch" in versions and (cuda := _torch_cuda(versions["torch"])):
        versions["torch_cuda"] = cuda
    return versions


def cuda_of_torch(version: str, requirements: list[str]) -> str | None:
    """CUDA version of a torch build, from its local version (`2.9.0+cu128`) or what its wheel requires.

    Wheels on PyPI pin `nvidia-cuda-runtime-cu12==12.8.90` up to CUDA 12, `nvidia-cuda-runtime==13.0.96` or
    `cuda-toolkit[...]==13.0.2` from 13 on.
    """
    _, plus, local = version.partition("+")
    if plus:
        match = re.search(r"cu(\d{2})(\d)$", local)
        return f"{match.group(1)}.{match.group(2)}" if match else None
    for requirement in requirements:
        match = re.match(r"(?:nvidia-cuda-runtime(?:-cu\d+)?|cuda-toolkit)(?:\[[^\]]*\])?\s*==(\d+\.\d+)", requirement)
        if match:
            return match.group(1)
    return None


def _torch_cuda(version: str) -> str | None:
    return cuda_of_torch(version, metadata.requires("torch") or [])


def _glibc() -> str | None:
    try:
        answer = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):
        return None  # musl
    return answer.removeprefix("glibc ").strip() or None
