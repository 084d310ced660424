"""Versions of what matters to training, from package metadata: importing torch would take seconds."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

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
    versions |= _nccl_of_torch()
    if "torch" in versions and (cuda := _torch_cuda(versions["torch"])):
        versions["torch_cuda"] = cuda
    return versions


@dataclass(frozen=True)
class Copies:
    """A library that is there more than once: `found` in the order in which they are looked for."""

    name: str
    found: tuple[str, ...]


def read_copies(places: Sequence[str]) -> tuple[Copies, ...]:
    """Packages of the training stack that several folders of `places` (sys.path) hold: the first one is imported, and
    what was installed last may be another."""
    copies: dict[str, list[str]] = {package: [] for package in PACKAGES}
    for place in dict.fromkeys(os.path.realpath(place) for place in places if place):
        try:
            names = os.listdir(place)
        except OSError:
            continue
        for name in names:
            package, _, rest = name.partition("-")
            if name.endswith((".dist-info", ".egg-info")) and package.lower() in copies:
                version = rest.removesuffix(".dist-info").removesuffix(".egg-info")
                copies[package.lower()].append(f"{version} in {place}")
    return tuple(Copies(package, tuple(found)) for package, found in copies.items() if len(found) > 1)


def read_nccl_libraries(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Files that LD_PRELOAD or LD_LIBRARY_PATH put in front of the NCCL that came with torch."""
    preloaded = [path for path in re.split(r"[ :]", environ.get("LD_PRELOAD", "")) if "libnccl" in path]
    folders = [Path(folder) for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    own = ("nvidia/nccl/lib", "torch/lib")  # what wheels bring themselves
    found = [folder / "libnccl.so.2" for folder in folders if not str(folder).endswith(own)]
    return tuple(dict.fromkeys([*preloaded, *(os.path.realpath(path) for path in found if path.exists())]))


def read_conflicts() -> tuple[str, ...]:
    """Where a package of the training stack asks for another version of another one than is installed."""
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:  # it comes with torch: without it there is nothing to compare
        return ()
    conflicts = []
    for package in PACKAGES:
        try:
            texts, own = metadata.requires(package) or [], metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        for text in texts:
            if not re.match(rf"({'|'.join(PACKAGES)})\b", text) or "extra ==" in text:
                continue
            try:
                wanted = Requirement(text)
                installed = metadata.version(wanted.name)
            except (InvalidRequirement, metadata.PackageNotFoundError):
                continue
            if (wanted.marker is None or wanted.marker.evaluate()) and not wanted.specifier.contains(
                installed, prereleases=True
            ):
                conflicts.append(f"{package} {own} wants {wanted.name}{wanted.specifier}, installed is {installed}")
    return tuple(conflicts)


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


def _nccl_of_torch() -> dict[str, str]:
    """`nccl_built`: the NCCL that the wheel of torch asks for; `nccl`: the one that is installed for it."""
    try:
        requirements = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return {}
    for requirement in requirements:
        found = re.match(r"(nvidia-nccl-cu\d+)==([\d.]+)", requirement.replace(" ", ""))
        if found:
            try:
                return {"nccl_built": found.group(2), "nccl": metadata.version(found.group(1))}
            except metadata.PackageNotFoundError:
                return {"nccl_built": found.group(2)}
    return {}


def _torch_cuda(version: str) -> str | None:
    return cuda_of_torch(version, metadata.requires("torch") or [])


def _glibc() -> str | None:
    try:
        answer = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):
        return None  # musl
    return answer.removeprefix("glibc ").strip() or None
