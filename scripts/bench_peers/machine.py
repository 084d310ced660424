"""What the figures were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path


def describe() -> dict[str, str]:
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text("utf-8"), re.MULTILINE)
    packages = ("torch", "deepspeed", "transformers", "peft", "accelerate")
    return {
        "processor": f"{cpu[1] if cpu else platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{int(memory[1]) / 1e6:.0f} GB" if memory else "?",
        "system": f"Linux {platform.release()}, glibc {platform.libc_ver()[1]}, Python {platform.python_version()}",
        "packages": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages),
    }
