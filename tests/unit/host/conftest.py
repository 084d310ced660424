"""Real conditions where this machine allows: own mounts and interfaces in a namespace, cards from the stand-in."""

from __future__ import annotations

from tests.nvml import nvml_folder
from tests.unit.host.namespaces import in_namespace

__all__ = ["in_namespace", "nvml_folder"]
