from __future__ import annotations

import pytest

from launcher.errors import UserError
from launcher.platforms.detect import detect_place, refuse_nesting

DLC = {
    "HOSTNAME": "dlc18isgeayd1234-master-0",
    "KUBERNETES_CONTAINER_RESOURCE_GPU": "8",
    "NPROC_PER_NODE": "8",
    "WORLD_SIZE": "2",
    "RANK": "0",
    "MASTER_ADDR": "dlc18isgeayd1234-master-0",
    "PYTHONUNBUFFERED": "0",
    "KUBERNETES_SERVICE_HOST": "10.192.0.1",
}
KUBEDL = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "PYTHONUNBUFFERED": "0", "WORLD_SIZE": "4", "RANK": "3"}
KUBEFLOW = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "8"}
SLURM = {"SLURM_JOB_ID": "42", "SLURM_NNODES": "3", "SLURM_NODEID": "2"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("one machine", 1, 0)),
        ({"HOSTNAME": "laptop", "PATH": "/bin"}, ("one machine", 1, 0)),
        (DLC, ("PAI-DLC", 2, 0)),
        ({**DLC, "HOSTNAME": "train9x-worker-0", "RANK": "1"}, ("PAI-DLC", 2, 1)),
        ({**DLC, "WORLD_SIZE": "1"}, ("PAI-DLC", 1, 0)),
        ({k: v for k, v in DLC.items() if k != "KUBERNETES_CONTAINER_RESOURCE_GPU"}, ("PAI-DLC", 2, 0)),
        (KUBEDL, ("KubeDL PyTorchJob", 4, 3)),
        (KUBEFLOW, ("Kubeflow (PET_*)", 2, 1)),
        ({**KUBEFLOW, "PET_NNODES": "1:4"}, ("Kubeflow (PET_*)", 4, 1)),
        (SLURM, ("Slurm", 3, 2)),
        ({"SLURM_JOB_ID": "42"}, ("one machine", 1, 0)),
        ({"WORLD_SIZE": "1", "RANK": "0"}, ("one machine", 1, 0)),
    ],
)
def test_place(environ: dict[str, str], expected: tuple[str, int, int]) -> None:
    place = detect_place(environ)
    assert (place.platform, place.num_nodes, place.node_rank) == expected


def test_world_size_of_kubeflow_counts_processes_and_is_not_believed() -> None:
    place = detect_place({**KUBEFLOW, "KUBERNETES_SERVICE_HOST": "10.0.0.1", "WORLD_SIZE": "16", "RANK": "1"})
    assert place.num_nodes == 2


def test_a_world_that_no_known_platform_explains_is_not_guessed_at() -> None:
    """Every node would start a run of its own in the same folder."""
    with pytest.raises(UserError, match=r"WORLD_SIZE=8 is set, but no platform.* unset WORLD_SIZE"):
        detect_place({"WORLD_SIZE": "8", "RANK": "3"})


def test_evidence_is_what_was_seen() -> None:
    evidence = dict(detect_place(DLC).evidence)
    assert evidence["WORLD_SIZE"] == "2"
    assert all(DLC[name] == value for name, value in evidence.items())
    assert detect_place({}).evidence == ()


@pytest.mark.parametrize("value", ["", "two", "-1", "1.5"])
def test_a_number_that_is_none_is_told_with_its_variable(value: str) -> None:
    with pytest.raises(UserError, match=r"SLURM_NNODES is .* a number is expected"):
        detect_place({**SLURM, "SLURM_NNODES": value})


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2"}, "torchrun"),
        ({"LOCAL_RANK": "0", "CROSS_RANK": "0", "CROSS_SIZE": "1", "LOCAL_SIZE": "2"}, "deepspeed"),
    ],
)
def test_inside_a_rank_of_another_launcher_it_refuses(environ: dict[str, str], launcher: str) -> None:
    with pytest.raises(UserError, match=f"rank of {launcher}") as caught:
        refuse_nesting(environ)
    assert "ftlaunch --config" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("environ", [{}, DLC, KUBEDL, KUBEFLOW, SLURM, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_as_the_command_of_a_platform_it_is_at_its_place(environ: dict[str, str]) -> None:
    refuse_nesting(environ)
