"""Inside a rank of another launcher ftlaunch refuses; as the command of a platform it does not."""

from __future__ import annotations

import pytest

from launcher.errors import UserError
from launcher.platforms.detect import refuse_nesting
from tests.unit.platforms import environments as envs

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "GROUP_RANK": "0"}
ACCELERATE = {
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        (TORCHRUN, "torchrun"),
        ({**envs.DLC, **TORCHRUN}, "torchrun"),
        ({"LOCAL_RANK": "0", "CROSS_RANK": "0", "CROSS_SIZE": "1", "LOCAL_SIZE": "2"}, "deepspeed"),
        (ACCELERATE, "accelerate launch"),
        ({**ACCELERATE, **TORCHRUN}, "accelerate launch"),
        (OPEN_MPI, "mpirun"),
        ({**envs.MPI_OPERATOR, **OPEN_MPI}, "mpirun"),
        ({**envs.SAGEMAKER, **OPEN_MPI}, "mpirun"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "mpirun"),
        ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"}, "mpirun"),
        ({**envs.AZURE_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, "mpirun"),
    ],
)
def test_inside_a_rank_of_another_launcher_it_refuses(environ: dict[str, str], launcher: str) -> None:
    with pytest.raises(UserError, match=f"a rank of {launcher} .*ranks inside a rank") as caught:
        refuse_nesting(environ)
    assert "ftlaunch --config" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "environ",
    [
        *(value for name, value in vars(envs).items() if name.isupper() and isinstance(value, dict)),
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"ACCELERATE_MIXED_PRECISION": "bf16"},  # users set it by themselves
        {"OMPI_MCA_btl": "tcp,self", "LOCAL_RANK": "0"},
    ],
)
def test_as_the_command_of_a_platform_it_is_at_its_place(environ: dict[str, str]) -> None:
    refuse_nesting(environ)
