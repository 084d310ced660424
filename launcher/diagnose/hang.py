"""A standstill in words: what the records of the ranks say against the one that is behind. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.diagnose.fault import Fault
from launcher.i18n import Text
from launcher.progress_record import Phase, Place, RankProgress

RECORDS = "progress records"  # the "file" of evidence that the agent has read from memory
_NUM_WAITING = 3  # ranks that wait, each in a line of evidence

_AT = {
    Phase.STARTING: "loading and connecting",
    Phase.ENCODING: "encoding data",
    Phase.BATCH: "waiting for its next batch",
    Phase.SNAPSHOT: "taking a snapshot",
    Phase.EVALUATING: "evaluating",
    Phase.SAVING: "saving",
    Phase.ENDING: "writing what the run ends with",
}
_STATES = {
    "T": "T (stopped)",
    "t": "t (stopped by a debugger)",
    "D": "D (in the kernel, not interruptible)",
    "R": "R (computing)",
    "S": "S (waiting)",
}

BEHIND = Fault(
    cls="nccl_watchdog_timeout",
    action="retry",
    cause=Text(
        "{where} stood still: {what}.",
        "{where} 停滞不前：{what}。",
    ),
    remedy=Text(
        "See where it stood in stacks/ of the evidence. Once: a machine or a file system that hung; nothing has to be "
        "changed. Again at the same step: the program does something else on this rank. If ranks are slow there and "
        "not stuck, set restart.hang_seconds.",
        "请在证据目录的 stacks/ 中查看它停在何处。仅出现一次：机器或文件系统卡住，无需修改。在同一步再次出现："
        "程序在该 rank 上执行了不同的代码。如果只是较慢而非卡住，请设置 restart.hang_seconds。",
    ),
)

NOBODY_BEHIND = Fault(
    cls="nccl_watchdog_timeout",
    action="retry",
    cause=Text(
        "All ranks stood still, and none of them is behind the others: {what}.",
        "所有 rank 都停滞不前，且没有任何一个落后于其他 rank：{what}。",
    ),
    remedy=Text(
        "In one collective on all ranks: the network or a card; look at the links (`nvidia-smi nvlink -e`, switch "
        "counters). Outside of collectives: what they wait for in stacks/ of the evidence, mostly a file system.",
        "若所有 rank 停在同一集合通信中：网络或显卡问题，请检查链路（`nvidia-smi nvlink -e`、交换机计数器）。"
        "若停在集合通信之外：请在证据目录的 stacks/ 中查看它们在等待什么，多为文件系统。",
    ),
)


@dataclass(frozen=True)
class HangEvidence:
    """What goes into a verdict. `lines`: (file, text), the one that shows the cause best first."""

    fault: Fault
    rank: int | None
    node: str
    is_certain: bool
    what: str
    lines: tuple[tuple[str, str], ...]


def describe(
    culprits: Sequence[RankProgress],
    waiting: RankProgress | None,
    ranks: Sequence[RankProgress],
    frames: Mapping[int, str],
    *,
    is_certain: bool,
) -> HangEvidence:
    """`culprits`: who is behind, the one to be named first. `frames`: of ranks whose stack is known, the innermost
    Python frames."""
    first = culprits[0] if culprits else None
    if first is None:
        lines = [(RECORDS, _stands(rank)) for rank in ranks[: _NUM_WAITING + 1]]
        return HangEvidence(NOBODY_BEHIND, None, "", False, lines[0][1], tuple(lines))
    what = against(first, waiting)
    named = {rank.rank for rank in culprits}
    victims = [rank for rank in ranks if rank.rank not in named]
    lines = [(RECORDS, what)]
    lines += [_frame(first, frames)] if first.rank in frames else []
    lines += [(RECORDS, f"as far as that: {_stands(rank)}") for rank in culprits[1:_NUM_WAITING]]
    lines += [(RECORDS, f"a victim: {_stands(rank)}") for rank in victims[:_NUM_WAITING]]
    return HangEvidence(BEHIND, first.rank, first.node, is_certain, what, tuple(lines))


def against(culprit: RankProgress, waiting: RankProgress | None) -> str:
    """In one sentence."""
    waits = waiting is not None and waiting.place != Place.OUTSIDE and waiting.rank != culprit.rank
    text = f"rank {culprit.rank} is {_at(culprit)}"
    if waiting is not None and waits:
        name = _collective(waiting)
        waited = f"in which rank {waiting.rank} has waited for {waiting.still_s:.1f} s"
        if waiting.collectives > culprit.collectives:
            text += f", has not entered {name}, {waited}"
        elif culprit.place == Place.INSIDE and (culprit.kind, culprit.elements) != (waiting.kind, waiting.elements):
            text += f", waits in {_collective(culprit)}, and rank {waiting.rank} in {name}"
        elif culprit.place == Place.OUTSIDE:
            text += f", is outside of collectives, while rank {waiting.rank} waits in {name}"
        else:
            text += f", is in {name} as well, {waited}"
    else:
        text += f" and has not moved for {culprit.still_s:.1f} s"
    return f"{text}; process state {_STATES.get(culprit.state, culprit.state or 'unknown')}"


def _stands(rank: RankProgress) -> str:
    place = "outside of collectives"
    if rank.place == Place.WAITING:
        place = f"waiting for one that it has begun, the last was {_collective(rank)}"
    elif rank.place != Place.OUTSIDE:
        place = f"in {_collective(rank)}"
    state = _STATES.get(rank.state, rank.state or "unknown")
    return f"rank {rank.rank} is {_at(rank)}, {place}, for {rank.still_s:.1f} s; process state {state}"


def _at(rank: RankProgress) -> str:
    phase = Phase(rank.phase)
    if phase in (Phase.STARTING, Phase.ENCODING):
        return _AT[phase] + (f" ({rank.work} records)" if rank.work else "")
    micro_batch = f", in micro-batch {rank.micro_batch} of the next" if rank.micro_batch else ""
    doing = f", {_AT[phase]}" if phase in _AT else ""
    return f"after step {rank.step}{micro_batch}{doing}"


def _collective(rank: RankProgress) -> str:
    return f"{rank.kind} number {rank.collectives}" + (f" ({rank.elements:,} elements)" if rank.elements else "")


def _frame(culprit: RankProgress, frames: Mapping[int, str]) -> tuple[str, str]:
    return f"stacks/rank-{culprit.rank}.txt", f"rank {culprit.rank} was in {frames[culprit.rank]}"
