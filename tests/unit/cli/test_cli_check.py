"""The table of several nodes: what is wrong elsewhere stands in it with the nodes' names."""

from __future__ import annotations

from launcher.cli.check import findings_of_others
from launcher.preflight.finding import Severity

SHM, DISK = ("shm.size", "error", "64 MiB free"), ("disk.shared", "warning", "ext4 at /")


def test_what_is_wrong_on_other_nodes_is_told_once_with_their_names() -> None:
    (shm,) = findings_of_others({"n1": [SHM, DISK], "n2": [SHM, DISK], "n3": [DISK]}, own=[DISK])
    assert (shm.id, shm.severity, shm.measured) == ("shm.size", Severity.ERROR, "n1 n2: 64 MiB free")
    assert shm.message.en == "found on n1, n2"


def test_what_is_wrong_here_and_on_some_others_names_those() -> None:
    (disk,) = findings_of_others({"n1": [DISK], "n2": []}, own=[DISK])
    assert disk.measured == "n1: ext4 at /"
