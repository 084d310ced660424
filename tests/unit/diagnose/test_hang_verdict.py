"""The verdict on ranks that stood still: who, in one sentence that holds the numbers; and what comes before it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launcher.diagnose.bundle import write_bundle
from launcher.diagnose.evidence import NodeEvidence, RankEvidence, number_lines
from launcher.diagnose.hang import against, describe
from launcher.diagnose.verdict import diagnose
from launcher.progress_record import Phase, Place, RankProgress

VICTIM = RankProgress(0, "n0", Phase.TRAINING, Place.INSIDE, 8, 2, 0, 412, "all_reduce", 49152, 5.1, "S", 0.5, 0.6)
STUCK = replace(VICTIM, rank=1, place=Place.OUTSIDE, collectives=411, state="T")
SAME = replace(STUCK, collectives=412, state="S")
ENDS = [RankEvidence(r, "n0", 70 + r, None, 9, f"rank-{r}.log", (), 8, killed_by_us=True) for r in (0, 1)]
HANG = describe([STUCK], VICTIM, [VICTIM, STUCK], {1: "spin (train.py:10)"}, is_certain=True)


@pytest.mark.parametrize(
    ("culprit", "waiting", "words"),
    [
        (
            STUCK,
            VICTIM,
            "rank 1 is after step 8, in micro-batch 2 of the next, has not entered all_reduce number 412 (49,152 "
            "elements), in which rank 0 has waited for 5.1 s; process state T (stopped)",
        ),
        (SAME, VICTIM, "is outside of collectives, while rank 0 waits in all_reduce number 412 (49,152 elements)"),
        (replace(SAME, place=Place.INSIDE), VICTIM, "is in all_reduce number 412 (49,152 elements) as well"),
        (
            replace(SAME, place=Place.INSIDE, kind="broadcast", elements=3),
            VICTIM,
            "waits in broadcast number 412 (3 elements), and rank 0 in all_reduce number 412 (49,152 elements)",
        ),
        (replace(STUCK, phase=Phase.ENCODING, work=70), None, "rank 1 is encoding data (70 records) and has not moved"),
    ],
)
def test_what_is_said_against_a_rank(culprit: RankProgress, waiting: RankProgress | None, words: str) -> None:
    assert words in against(culprit, waiting)


def test_the_rank_that_is_behind_is_the_culprit_and_the_others_are_victims() -> None:
    verdict = diagnose(ENDS, [NodeEvidence(node="n0")], HANG)
    assert (verdict.cls, verdict.action, verdict.confidence) == ("nccl_watchdog_timeout", "retry", "certain")
    assert verdict.culprit is not None
    assert (verdict.culprit.rank, verdict.culprit.node) == (1, "n0")
    texts = [line.text for line in verdict.evidence]
    assert "has not entered all_reduce number 412" in texts[0]
    assert texts[1] == "rank 1 was in spin (train.py:10)"
    assert texts[2].startswith("a victim: rank 0")
    assert "rank 1 (n0)" in verdict.cause.en
    assert "rank 1 (n0)" in verdict.cause.zh


def test_nobody_is_named_where_all_are_equally_far() -> None:
    nobody = describe([], None, [VICTIM, replace(VICTIM, rank=1)], {}, is_certain=False)
    verdict = diagnose(ENDS, [], nobody)
    assert (verdict.culprit, verdict.confidence) == (None, "probable")


def test_what_the_kernel_saw_and_a_known_error_come_before_it() -> None:
    xid = NodeEvidence(kernel_lines=("[9.0] NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",), node="n0")
    assert diagnose(ENDS, [xid], HANG).cls == "gpu_off_bus"
    full = replace(ENDS[1], tail=number_lines("OSError: [Errno 28] No space left on device: '/x'"))
    assert diagnose([ENDS[0], full], [], HANG).cls == "no_space"
    unknown = replace(ENDS[1], tail=number_lines("ZeroDivisionError: division by zero"))
    assert diagnose([ENDS[0], unknown], [], HANG).cls == "nccl_watchdog_timeout"


def test_stacks_and_dumps_are_in_the_bundle(tmp_path: Path) -> None:
    dump = tmp_path / "nccl-rank-1"
    dump.write_bytes(b"flight")
    stacks = {1: "Thread 1\n    f (a.py:3)\n"}
    bundle = write_bundle(tmp_path, "now", diagnose(ENDS, [], HANG), ENDS, [], {}, {}, stacks=stacks, dumps=[dump])
    assert "a.py:3" in (bundle / "stacks" / "rank-1.txt").read_text()
    assert (bundle / "nccl" / "nccl-rank-1").read_bytes() == b"flight"
