"""What the user or the platform has set is never overridden, and every value has its origin."""

from __future__ import annotations

import pytest

from launcher.plan.environment import Network, Variable, base_environ, proposals, resolve_environment

NETWORK = Network("eth0", "10.1.0.5", "10.1.0.5", "one node")


def wanted(device: str = "cuda", *, ranks: int = 4, cpus: int = 16, rdma: bool = False) -> list[Variable]:
    return proposals(device, ranks, cpus, NETWORK, rdma)


def resolve(job: dict[str, str], environ: dict[str, str], device: str = "cuda") -> dict[str, Variable]:
    return {variable.name: variable for variable in resolve_environment(wanted(device), job, environ)}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_proposal_ever_overrides_the_platform_or_the_user(device: str) -> None:
    for proposal in wanted(device):
        platform = resolve({}, {proposal.name: "platform's"}, device)[proposal.name]
        assert (platform.value, platform.origin) == ("platform's", "environment")
        user = resolve({proposal.name: "user's"}, {proposal.name: "platform's"}, device)[proposal.name]
        assert (user.value, user.origin) == ("user's", "job.yaml")
        empty = resolve({}, {proposal.name: ""}, device)[proposal.name]
        assert (empty.value, empty.origin) == ("", "environment"), "set to nothing is set"


def test_what_nobody_set_is_ftlaunchs_with_a_reason() -> None:
    resolved = resolve({}, {"HOME": "/root"})
    assert {variable.origin for variable in resolved.values()} == {"ftlaunch"}
    assert all(variable.reason for variable in resolved.values())
    assert resolved["NCCL_SOCKET_IFNAME"].value == "eth0"
    assert "HOME" not in resolved


@pytest.mark.parametrize("name", ["NCCL_IB_HCA", "NCCL_TOPO_FILE", "GLOO_X", "DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"])
def test_variables_that_matter_are_listed_with_their_origin(name: str) -> None:
    assert resolve({}, {name: "x"})[name] == Variable(name, "x", "environment")


def test_anything_in_job_yaml_is_listed() -> None:
    assert resolve({"MY_SETTING": "1"}, {})["MY_SETTING"] == Variable("MY_SETTING", "1", "job.yaml")


def test_the_list_is_sorted_by_name() -> None:
    names = list(resolve({"A": "1", "Z": "1"}, {"NCCL_IB_HCA": "mlx5"}))
    assert names == sorted(names)


@pytest.mark.parametrize(("ranks", "cpus", "threads"), [(4, 16, "4"), (3, 16, "5"), (8, 2, "1"), (1, 1, "1")])
def test_threads_share_the_cpus(ranks: int, cpus: int, threads: str) -> None:
    values = {variable.name: variable.value for variable in wanted("cpu", ranks=ranks, cpus=cpus)}
    assert values["OMP_NUM_THREADS"] == threads


def test_infiniband_is_left_alone_where_there_is_some() -> None:
    assert "NCCL_IB_DISABLE" in {variable.name for variable in wanted(rdma=False)}
    assert "NCCL_IB_DISABLE" not in {variable.name for variable in wanted(rdma=True)}


def test_without_gpus_nothing_of_nccl_is_set() -> None:
    assert not [variable.name for variable in wanted("cpu") if "NCCL" in variable.name]


def test_the_ranks_get_the_whole_environment_with_the_resolved_on_top() -> None:
    environ = {"HOME": "/root", "NCCL_DEBUG": "INFO", "LANG": "zh_CN.UTF-8"}
    resolved = resolve_environment(wanted(), {"LANG": "C"}, environ)
    base = base_environ(resolved, environ)
    assert (base["HOME"], base["NCCL_DEBUG"], base["LANG"]) == ("/root", "INFO", "C")
    assert base["GLOO_SOCKET_IFNAME"] == "eth0"


@pytest.mark.parametrize(
    "name",
    [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_SIZE",
        "CROSS_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "ACCELERATE_USE_CPU",
    ],
)
def test_an_outer_launchers_group_is_never_passed_on(name: str) -> None:
    assert name not in base_environ((), {name: "7", "HOME": "/root"})
