"""Builds the stand-in for `libnvidia-ml.so.1` and gives the environment in which a process sees its cards.

A process must be started with that environment: the loader reads LD_LIBRARY_PATH once, at the start.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).with_name("stand_in.c")
LIBRARY = "libnvidia-ml.so.1"


def find_compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def build(folder: Path) -> Path:
    """Compile into `folder`, which is returned: it belongs in front of LD_LIBRARY_PATH."""
    compiler = find_compiler()
    if compiler is None:
        raise FileNotFoundError("no C compiler (cc, gcc or clang) for the NVML stand-in")
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}"]
    subprocess.run([compiler, *flags, "-o", str(folder / LIBRARY), str(SOURCE)], check=True)
    return folder


def with_cards(folder: Path, cards: str, base: Mapping[str, str] | None = None, **options: str) -> dict[str, str]:
    """`base` (default: this process's environment) plus cards such as `4xA100+4xV100`.

    Options are those of stand_in.c without their prefix: `with_cards(folder, "8xA100", LOST="3", USED_MIB="20480")`.
    """
    environ = dict(os.environ if base is None else base)
    inherited = environ.get("LD_LIBRARY_PATH")
    environ["LD_LIBRARY_PATH"] = f"{folder}:{inherited}" if inherited else str(folder)
    environ["FAKE_NVML"] = cards
    return environ | {f"FAKE_NVML_{name}": value for name, value in options.items()}
