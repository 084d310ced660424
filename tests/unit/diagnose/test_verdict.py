"""The cause across ranks and nodes: who is a victim, what the kernel overrules, what a bare exit proves."""

from __future__ import annotations

import json
import signal
from dataclasses import replace

import pytest

from launcher.diagnose.evidence import NodeEvidence, RankEvidence, number_lines
from launcher.diagnose.verdict import Verdict, diagnose

GLOO = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.0.0.1]:4021"
)
WATCHDOG = (
    "[rank{r}]:[E101 10:00:00.1 ProcessGroupNCCL.cpp:632] [Rank {r}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600001 milliseconds"
)
ERROR = (
    'Traceback (most recent call last):\n  File "/opt/app/train.py", line 8, in step\n    x = rows[key]\n'
    "KeyError: 'answer'"
)
LIBRARY_ERROR = (
    'Traceback (most recent call last):\n  File "/opt/app/train.py", line 8, in step\n    super().step()\n'
    "  File \"/opt/env/lib/python3.11/site-packages/lib.py\", line 90, in step\n    raise KeyError\nKeyError: 'answer'"
)
STEPS = "\n".join(f"{{'loss': 1.{i}, 'grad_norm': 0.5, 'epoch': 0.{i}}}" for i in range(1, 5))


def rank(number: int, log: str = "", exit_code: int | None = 1, node: str = "n0", **more: object) -> RankEvidence:
    blank = RankEvidence(
        number, node, 4000 + number, exit_code, None, f"logs/rank-{number}.log", number_lines(log), None
    )
    return replace(blank, **more)  # type: ignore[arg-type]


def named(verdict: Verdict) -> tuple[str, str, int | None]:
    return verdict.cls, verdict.action, verdict.culprit.rank if verdict.culprit else None


def test_the_victims_of_a_python_error_are_set_aside() -> None:
    verdict = diagnose([rank(0, GLOO), rank(1, WATCHDOG.format(r=1), -6), rank(2, ERROR)])
    assert named(verdict) == ("user_code", "stop", 2)
    assert verdict.confidence == "certain"
    assert verdict.also == ("gloo_connection", "nccl_watchdog_timeout")
    assert [line.text for line in verdict.evidence] == [
        "KeyError: 'answer'",
        '  File "/opt/app/train.py", line 8, in step',
    ]


def test_the_frame_shown_is_the_users_own() -> None:
    assert diagnose([rank(0, LIBRARY_ERROR)]).evidence[1].line == 2


def test_a_rank_killed_from_outside_is_the_cause_and_its_peers_are_victims() -> None:
    ranks = [rank(0, GLOO), rank(1, STEPS, -9, last_step=40), rank(2, "", -15, killed_by_us=True)]
    verdict = diagnose(ranks, [NodeEvidence(cgroup_oom_kills=0)])
    assert named(verdict) == ("unknown", "retry", 1)
    assert (verdict.retryable, verdict.confidence) == (True, "probable")
    assert "killed from outside" in verdict.cause.en
    assert verdict.also == ("gloo_connection",)


def test_a_kill_that_the_cgroup_counted_is_certainly_memory() -> None:
    verdict = diagnose([rank(0, GLOO), rank(1, "", 137)], [NodeEvidence(cgroup_oom_kills=1, node="n0")])
    assert named(verdict) == ("host_oom", "adjust:host_memory", 1)
    assert verdict.confidence == "certain"
    assert verdict.evidence[1].text == "the kernel killed 1 process of this job or pod for memory"


def test_a_counted_kill_on_another_node_does_not_explain_this_one() -> None:
    nodes = [NodeEvidence(cgroup_oom_kills=1, node="n1"), NodeEvidence(cgroup_oom_kills=0, node="n0")]
    assert diagnose([rank(0, "", -9)], nodes).cls == "unknown"


@pytest.mark.parametrize(("last_step", "expected"), [(None, "host_oom"), (12, "unknown")])
def test_without_a_counter_a_kill_is_memory_only_before_the_first_step(last_step: int | None, expected: str) -> None:
    verdict = diagnose([rank(0, "", -9, last_step=last_step)])
    assert (verdict.cls, verdict.confidence) == (expected, "probable")


def test_without_a_counter_of_kills_a_cgroup_at_its_limit_makes_memory_likely() -> None:
    full = NodeEvidence(facts={"memory_grown": {"max": 12}}, node="n0")
    verdict = diagnose([rank(0, STEPS, -9, last_step=12)], [full])
    assert (verdict.cls, verdict.confidence) == ("host_oom", "probable")
    counted = replace(full, cgroup_oom_kills=0)
    assert diagnose([rank(0, STEPS, -9, last_step=12)], [counted]).cls == "unknown"


def test_a_bus_error_is_shared_memory_and_shows_its_size() -> None:
    node = NodeEvidence(shm_free_bytes=0, shm_size_bytes=64 * 2**20)
    verdict = diagnose([rank(0, "", -7)], [node])
    assert named(verdict) == ("shm_exhausted", "adjust:shm_size", 0)
    assert verdict.evidence[1].text == "/dev/shm has 64 MiB, 0 MiB are free"


def test_a_bus_error_with_a_counted_kill_is_host_memory() -> None:
    assert diagnose([rank(0, "", -7)], [NodeEvidence(cgroup_oom_kills=2)]).cls == "host_oom"


def test_sigterm_from_outside_is_preemption_and_ours_is_not() -> None:
    ranks = [rank(0, "", -15), rank(1, "", 143)]
    assert named(diagnose(ranks)) == ("preempted", "retry", 0)
    assert diagnose([replace(r, killed_by_us=True) for r in ranks]).cls == "unknown"


def test_the_kernel_overrules_python() -> None:
    xid = "[ 55.1] NVRM: Xid (PCI:0000:3b:00): 79, pid=4001, GPU has fallen off the bus."
    verdict = diagnose([rank(0, ERROR)], [NodeEvidence(kernel_lines=("[ 1.0] booted", xid), node="n0")])
    assert (verdict.cls, verdict.culprit and verdict.culprit.node) == ("gpu_off_bus", "n0")
    assert (verdict.evidence[0].file, verdict.evidence[0].line) == ("kernel log of n0", 2)


def test_somebody_elses_memory_kill_on_the_machine_explains_no_exception_of_ours() -> None:
    kill = "[ 55.1] Out of memory: Killed process 99 (postgres) total-vm:1kB"
    assert diagnose([rank(0, ERROR)], [NodeEvidence(kernel_lines=(kill,))]).cls == "user_code"
    assert diagnose([rank(0, "", -9)], [NodeEvidence(kernel_lines=(kill,))]).cls == "host_oom"
    ours = kill.replace(" 99 ", " 4000 ")
    assert diagnose([rank(0, ERROR)], [NodeEvidence(kernel_lines=(ours,))]).cls == "host_oom"


def test_of_two_errors_the_rank_that_ended_first_is_the_cause() -> None:
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 9 GiB"
    bad = "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"
    verdict = diagnose([rank(0, oom, exited_at_s=200.0), rank(1, bad, exited_at_s=100.0)])
    assert named(verdict) == ("data_bad_record", "stop", 1)


def test_a_message_that_a_console_wrapped_is_still_known() -> None:
    log = "│ OSError: [Errno 28] No space\n│ left on device: 'a'"
    assert diagnose([rank(0, log)]).cls == "no_space"


def test_an_error_that_the_program_survived_is_not_the_cause() -> None:
    survived = f"HfHubHTTPError: 503 Server Error: Service Unavailable for url: https://hub/x\n{STEPS}\n"
    assert diagnose([rank(0, survived + ERROR)]).cls == "user_code"


def test_an_unknown_exception_after_a_known_fault_is_its_echo() -> None:
    assert diagnose([rank(0, f"{GLOO}\n\nDuring handling of the above exception:\n\n{ERROR}")]).cls == "gloo_connection"


def test_the_schedulers_word_wins_over_the_cleanup_after_it_but_not_over_an_error_before_it() -> None:
    word = "slurmstepd: error: *** JOB 7 ON n0 CANCELLED AT 2026-01-02T03:04:05 DUE TO TIME LIMIT ***"
    assert diagnose([rank(0, f"{word}\n{ERROR}")]).cls == "preempted"
    assert diagnose([rank(0, f"{ERROR}\n{word}")]).cls == "user_code"
    assert diagnose([rank(0, f"{WATCHDOG.format(r=0)}\n{word}", -15)]).cls == "nccl_watchdog_timeout"


def test_a_shared_console_gives_the_rank_that_the_line_names() -> None:
    log = f"{WATCHDOG.format(r=0)}\n[rank3]: Traceback (most recent call last):\n[rank3]: ValueError: bad row\n"
    assert named(diagnose([rank(-1, log.replace(WATCHDOG.format(r=0), ""), node="")])) == ("user_code", "stop", 3)


@pytest.mark.parametrize(
    ("line", "cls"),
    [
        ("E0101 api.py:1003] failed (exitcode: -9) local_rank: 1 (pid: 77) of binary: /usr/bin/python3", "host_oom"),
        ("[INFO] [launch.py:259] train.py exits with return code = -7", "shm_exhausted"),
        ("  traceback : Signal 11 (SIGSEGV) received by PID 77", "segfault"),
        ("      Exit Code:    137", "host_oom"),
        ("worker-3 exited with status 139", "segfault"),
        ("container train terminated with exit code 135", "shm_exhausted"),
    ],
)
def test_a_launchers_summary_counts_where_no_exit_is_known(line: str, cls: str) -> None:
    verdict = diagnose([rank(-1, f"starting\n{line}", None)])
    assert (verdict.cls, verdict.evidence[0].line) == (cls, 2)


def test_a_kill_in_a_shared_summary_explains_the_victims_above_it() -> None:
    log = f"{GLOO}\nE0101 api.py:1003] failed (exitcode: -9) local_rank: 1 (pid: 77) of binary: python3"
    assert diagnose([rank(-1, log, None)]).cls == "host_oom"


def test_who_was_killed_by_the_launcher_because_it_did_not_leave_was_not_killed_for_memory() -> None:
    killed = "api.py:1048] Unable to shutdown process 77 via Signals.SIGTERM, forcefully exiting via Signals.SIGKILL"
    log = f"{GLOO}\n{killed}\n  exitcode  : -9 (pid: 77)\n  traceback : Signal 9 (SIGKILL) received by PID 77"
    assert diagnose([rank(-1, log, None)]).cls == "gloo_connection"
    assert diagnose([rank(-1, log.replace("PID 77", "PID 78"), None)]).cls == "host_oom"


def test_a_crash_in_a_summary_explains_victims_and_no_error() -> None:
    summary = "  exitcode  : -11 (pid: 77)"
    assert diagnose([rank(-1, f"{GLOO}\n{summary}", None)]).cls == "segfault"
    assert diagnose([rank(-1, f"{ERROR}\n{summary}", None)]).cls == "user_code"


def test_an_exit_code_without_a_word_is_the_programs_own() -> None:
    verdict = diagnose([rank(0, "done\n", 3)])
    assert (verdict.cls, verdict.action, verdict.confidence) == ("user_code", "stop", "probable")
    assert "exit code 3" in verdict.cause.en


def test_abort_without_a_word_and_nothing_at_all_are_unknown() -> None:
    assert (diagnose([rank(0, "", -6)]).cls, diagnose([rank(0, "", -6)]).confidence) == ("unknown", "unknown")
    assert diagnose([]).to_json()["class"] == "unknown"


def test_a_foreign_process_on_the_card_is_told_from_a_model_that_is_too_large() -> None:
    line = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of "
        "40.00 GiB of which "
        "0.50 GiB is free. Including non-PyTorch memory, this process has {own} GiB memory in use. Of the "
        "allocated memory {alloc} "
        "GiB is allocated by PyTorch, and 0.10 GiB is reserved"
    )
    assert diagnose([rank(0, line.format(own="5.00", alloc="4.00"))]).action == "adjust:nproc_per_node"
    assert diagnose([rank(0, line.format(own="39.00", alloc="38.00"))]).action == "adjust:batch_size"
    assert diagnose([rank(0, line.format(own="0.00", alloc="38.00"))]).action == "adjust:batch_size", "NVML saw nothing"


def test_json_has_the_documented_keys_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTLAUNCH_LANG", "zh")
    document = diagnose([rank(0, "ValueError: token hf_abcdefghijklmnop refused")]).to_json()
    keys = ["v", "class", "action", "retryable", "confidence", "culprit", "evidence", "cause", "remedy", "also"]
    assert list(document) == keys
    assert "hf_abc" not in json.dumps(document)
    assert "抛出异常" in document["cause"]
    assert document["evidence"][0] == {
        "file": "logs/rank-0.log",
        "line": 1,
        "text": "ValueError: token [redacted] refused",
    }


def test_signals_are_those_of_this_system() -> None:
    assert diagnose([rank(0, "", None, signal=int(signal.SIGBUS))]).cls == "shm_exhausted"
