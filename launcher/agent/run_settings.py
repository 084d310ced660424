"""What one start of the run is set to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.agent.work_folder import WorkFolder
from launcher.errors import ExitCode
from launcher.host.local_folder import Scratch
from launcher.plan.spec import Drill, RankSpec
from launcher.policy.hang import HangSeconds


@dataclass(frozen=True)
class RunSettings:
    """Everything that stays the same over the generations of this start.

    `fork`: ranks come from a fork server. `template`: name of the spec whose inputs it prepares for all ranks; None
    where each rank makes its own.
    """

    output_dir: Path
    work_folder: WorkFolder
    spec: RankSpec
    environ: Mapping[str, str]
    max_without_progress: int
    backoff_s: float
    grace_s: float
    stop_exit_code: ExitCode
    token: str
    scratch: Scratch
    drills: tuple[Drill, ...] = ()
    fork: bool = True
    template: str | None = None
    every_steps: int = 500
    keep: int = 3
    hang_seconds: HangSeconds = "auto"

    @property
    def fork_server_log(self) -> Path:
        return self.work_folder.logs / "fork-server.log"
