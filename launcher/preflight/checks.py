"""The list of checks. Adding one is one function, one line here, and a test that it fires once and is silent once."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from launcher.i18n import Text
from launcher.preflight import check_gpu_memory, check_gpus, check_host, check_mount, check_network, check_storage
from launcher.preflight.finding import Finding, Severity
from launcher.preflight.inputs import PreflightInputs

Check = Callable[[PreflightInputs], tuple[Finding, ...]]

CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "versions.stack": check_host.check_stack,
        "gpu.visible": check_gpus.check_visible,
        "gpu.lost": check_gpus.check_lost,
        "gpu.driver": check_gpus.check_driver,
        "gpu.capability": check_gpus.check_capability,
        "gpu.memory_used": check_gpus.check_memory_used,
        "gpu.mixed": check_gpus.check_mixed,
        "gpu.memory": check_gpu_memory.check_gpu_memory,
        "shm.size": check_storage.check_shm,
        "memory.host": check_host.check_memory,
        "memory.tier": check_host.check_memory_tier,
        "limits.nofile": check_host.check_nofile,
        "disk.writable": check_storage.check_disk_writable,
        "disk.kind": check_mount.check_disk_kind,
        "disk.free": check_storage.check_disk_free,
        "disk.scratch": check_mount.check_disk_scratch,
        "disk.durable": check_storage.check_disk_durable,
        "disk.shared": check_storage.check_disk_shared,
        "net.interface": check_network.check_interface,
        "net.ifname_env": check_network.check_ifname_env,
        "net.port": check_network.check_port,
        "net.agent_port": check_network.check_agent_port,
    }
)


def run_checks(inputs: PreflightInputs) -> tuple[Finding, ...]:
    """Every check that is not skipped, worst findings first, otherwise in the order of `CHECKS`.

    A check without anything to look at says nothing. A name in `skip` that is no check is a warning: a typo there
    would leave the check in force that the user wanted gone.
    """
    findings = [finding for name, check in CHECKS.items() if name not in inputs.skip for finding in check(inputs)]
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
