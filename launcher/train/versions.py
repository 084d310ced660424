"""Versions of the training stack, for manifests and bundles."""

from __future__ import annotations

import platform
from importlib import metadata

STACK = ("torch", "deepspeed", "transformers", "peft", "accelerate", "bitsandbytes", "safetensors", "ftlaunch")


def stack_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in STACK:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
