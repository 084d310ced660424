"""A loaded configuration on its way to another machine.

Invariant: every node runs what the head has loaded, value for value: overrides, and variables and relative paths in
paths, are resolved once, on the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.config.load import LoadedJob, Origin
from launcher.config.models import JobConfig


def pack_job(job: LoadedJob) -> dict[str, Any]:
    return {
        "settings": job.config.model_dump(mode="json", exclude_unset=True),
        "path": str(job.path),
        "origin": {key: [origin.kind, origin.line] for key, origin in job.origin.items()},
        "text": job.text,
        "sha": job.sha,
    }


def unpack_job(packed: Mapping[str, Any]) -> LoadedJob:
    return LoadedJob(
        config=JobConfig.model_validate(packed["settings"]),
        path=Path(packed["path"]),
        origin={key: Origin(kind, line) for key, (kind, line) in packed["origin"].items()},
        text=packed["text"],
        sha=packed["sha"],
    )
