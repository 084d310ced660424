"""Versions of the training stack, for manifests and bundles."""

from __future__ import annotations

import platform
from functools import cache
from importlib import metadata

STACK = ("torch", "deepspeed", "transformers", "peft", "accelerate", "bitsandbytes", "safetensors", "ftlaunch")


def stack_versions() -> dict[str, str]:
    return dict(_installed())


@cache
def _installed() -> tuple[tuple[str, str], ...]:
    versions = [("python", platform.python_version())]
    for name in STACK:
        try:
            versions.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(versions)
