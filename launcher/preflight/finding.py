"""What a check says: the measured value, the bound it was held against, and the way out for this reader's platform."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from launcher.i18n import Text

NOTHING_TO_DO = Text("", "")


class Severity(Enum):
    """An error refuses the node (exit code 3); a warning is told and training starts."""

    ERROR = "error"
    WARNING = "warning"
    OK = "ok"

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return list(Severity).index(self)


@dataclass(frozen=True)
class Finding:
    id: str  # what `check.skip` names, e.g. "shm.size"
    severity: Severity
    measured: str
    bound: str
    message: Text
    remedy: Text = NOTHING_TO_DO

    def to_json(self, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """Texts in the reader's language, as `ftlaunch check --json` prints them."""
        return {
            "id": self.id,
            "severity": self.severity.value,
            "measured": self.measured,
            "bound": self.bound,
            "message": self.message.pick(environ),
            "remedy": self.remedy.pick(environ),
        }


def worst(findings: Iterable[Finding]) -> Severity:
    """The severity that decides; OK where there is no finding."""
    return min((finding.severity for finding in findings), key=lambda s: s.rank, default=Severity.OK)


def count_by_severity(findings: Iterable[Finding]) -> dict[str, int]:
    """`{"error": 1, "warning": 0, "ok": 9}`, as the event `preflight` carries it."""
    counts = {severity.value: 0 for severity in Severity}
    for finding in findings:
        counts[finding.severity.value] += 1
    return counts


def show_bytes(num_bytes: int) -> str:
    """`64 MiB`, `1.5 GiB`: binary units, as `/dev/shm` and memory limits are set."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f}".removesuffix(".0") + f" {unit}"
        size /= 1024
    return f"{size:.1f}".removesuffix(".0") + " TiB"
