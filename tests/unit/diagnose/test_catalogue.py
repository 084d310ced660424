"""Every entry of the catalogue is met by its own log, speaks both languages, and has a known action."""

from __future__ import annotations

from string import Formatter

import pytest
from fault_examples import EXAMPLES, Example

from launcher.diagnose.catalogue import CATALOGUE, EXITED, KILLED_FROM_OUTSIDE, UNKNOWN
from launcher.diagnose.evidence import RankEvidence, number_lines
from launcher.diagnose.fault import Fault, compile_pattern
from launcher.diagnose.match import find_matches
from launcher.diagnose.verdict import diagnose

ADJUSTMENTS = {
    "host_memory",
    "shm_size",
    "batch_size",
    "seq_length",
    "optimizer_memory",
    "model_memory",
    "precision",
    "nproc_per_node",
    "data_prep",
    "checkpoint",
    "disk_space",
    "cache_dir",
    "ulimit_nofile",
    "hub_offline",
    "ddp_settings",
    "master_addr",
    "master_port",
    "rdzv_endpoint",
    "rdzv_id",
    "firewall",
    "ib_gdr",
    "NCCL_SOCKET_IFNAME",
    "NCCL_CROSS_NIC",
    "NCCL_IB_HCA",
    "NCCL_IB_GID_INDEX",
    "NCCL_P2P_DISABLE",
    "GLOO_SOCKET_IFNAME",
}
TAXONOMY = {
    "cuda_oom_load",
    "cuda_oom_forward",
    "cuda_oom_optimizer",
    "cuda_oom_nccl",
    "host_oom",
    "shm_exhausted",
    "fd_limit",
    "no_space",
    "disk_quota",
    "permission",
    "nccl_watchdog_timeout",
    "nccl_remote_exited",
    "nccl_network_reset",
    "nccl_system_error",
    "nccl_connection_refused",
    "nccl_wrong_interface",
    "nccl_ib_failure",
    "nccl_init_store_timeout",
    "nccl_version_mismatch",
    "gloo_connection",
    "rdzv_timeout",
    "rdzv_connection_lost",
    "host_unresolved",
    "port_in_use",
    "gpu_ecc",
    "gpu_off_bus",
    "nvlink_error",
    "gpu_unhealthy",
    "cuda_illegal_memory",
    "cuda_launch_failure",
    "cublas_cudnn",
    "device_assert_index",
    "device_assert_label",
    "device_assert_prob",
    "no_kernel_image",
    "bf16_unsupported",
    "driver_mismatch",
    "gpu_count",
    "segfault",
    "ds_config",
    "ds_launcher_host",
    "ds_launcher_ssh",
    "fp16_scale_min",
    "loss_nan",
    "ckpt_corrupt",
    "ckpt_missing_latest",
    "ckpt_world_size",
    "ckpt_weights_only",
    "peft_key_mismatch",
    "tokenizer_mismatch",
    "data_bad_record",
    "data_empty",
    "data_too_long",
    "hub_unreachable",
    "hub_transient",
    "hub_auth",
    "import_abi",
    "user_code",
    "preempted",
    "unknown",
}
ALL = (*CATALOGUE, UNKNOWN, EXITED, KILLED_FROM_OUTSIDE)
names = [f"{fault.cls}-{fault.action}-{i}" for i, fault in enumerate(ALL)]


def evidence(log: str, rank: int = 3, exit_code: int | None = 1) -> RankEvidence:
    return RankEvidence(rank, "n1", 4242, exit_code, None, f"rank-{rank}.log", number_lines(log), None)


@pytest.mark.parametrize("example", EXAMPLES, ids=[f"{e.cls}-{e.action}-{i}" for i, e in enumerate(EXAMPLES)])
def test_a_fault_is_named_with_its_line_and_its_action(example: Example) -> None:
    verdict = diagnose([evidence(example.log)])
    assert (verdict.cls, verdict.action) == (example.cls, example.action)
    assert verdict.evidence[0].line == example.proof
    assert "?" not in verdict.cause.en, "a value of the text was not found in the line"


def test_every_entry_has_an_example() -> None:
    met = {id(match.fault) for example in EXAMPLES for match in find_matches(number_lines(example.log))}
    assert [fault.cls for fault in CATALOGUE if id(fault) not in met] == []


@pytest.mark.parametrize("fault", ALL, ids=names)
def test_an_entry_is_complete(fault: Fault) -> None:
    kind, _, what = fault.action.partition(":")
    assert kind in {"retry", "retry_excluding_node", "adjust", "stop"}
    assert not what or what in ADJUSTMENTS
    assert fault.retryable == kind.startswith("retry")
    groups = {"where", "exit"}.union(*(compile_pattern(p).groupindex for _, p in fault.patterns()))
    for text in (fault.cause, fault.remedy):
        assert any(ord(char) > 0x2E80 for char in text.zh), "no Chinese"
        assert all(ord(char) < 0x2E80 for char in text.en), "Chinese in the English text"
        fields = [{name for _, name, _, _ in Formatter().parse(part) if name} for part in text]
        assert fields[0] == fields[1], "the languages say different things"
        assert fields[0] <= groups, "a place that no pattern fills"


def test_the_classes_are_those_of_the_taxonomy() -> None:
    assert {fault.cls for fault in ALL} == TAXONOMY | {"commit_refused"}  # of our own making, not of the trade
