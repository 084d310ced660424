"""Runs the checks of the registry, and judges what `check.skip` names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from launcher.i18n import Text
from launcher.preflight.check import Check
from launcher.preflight.finding import Finding, Severity
from launcher.preflight.inputs import PreflightInputs
from launcher.preflight.registry import GROUPS

CHECKS: Mapping[str, Check] = MappingProxyType({check.id: check for _, checks in GROUPS for check in checks})


def run_checks(inputs: PreflightInputs) -> tuple[Finding, ...]:
    """Every check that is not skipped, worst findings first, otherwise in the order of `CHECKS`.

    A check without anything to look at says nothing. A name in `skip` that is no check is a warning: a typo there
    would leave the check in force that the user wanted gone.
    """
    findings = [finding for name, check in CHECKS.items() if name not in inputs.skip for finding in check.run(inputs)]
    findings += [_unknown_skip(name) for name in inputs.skip if name not in CHECKS]
    return tuple(sorted(findings, key=lambda finding: finding.severity.rank))


def _unknown_skip(name: str) -> Finding:
    nearest = difflib.get_close_matches(name, CHECKS, n=1)
    known = ", ".join(CHECKS)
    return Finding(
        "check.skip",
        Severity.WARNING,
        name,
        "the id of a check",
        Text(f"check.skip names {name}, which is no check", f"check.skip 中的 {name} 不是任何检查项"),
        Text(
            f"did you mean {nearest[0]}?" if nearest else f"the checks are: {known}",
            f"是否想写 {nearest[0]}？" if nearest else f"检查项有：{known}",
        ),
    )
