"""Every record of the files encoded and checked once, by several processes, with memory that does not grow with them.

Invariant: what comes out, in order, is what `encode_dataset` makes of the same files.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from launcher.data.encode import encode_batch
from launcher.data.records import IGNORED_LABEL, DataError, Record
from launcher.data.scan import RECORD, REPEATED, Fault, Faults, Repeats, blocks_of, look_at

if TYPE_CHECKING:
    from numpy.typing import NDArray

TOKEN, NOTHING_LEFT = "token", "nothing_left"
UNUSABLE = (RECORD, TOKEN)  # training would end there
_BLOCKS_AHEAD = 2  # of each process


@dataclass(frozen=True)
class Wanted:
    """How records are encoded. `vocab_size`: rows of the model's embedding; None where they are not known."""

    data_format: str
    system_prompt: str | None
    max_length: int
    train_on_prompt: bool
    vocab_size: int | None = None


@dataclass
class Statistics:
    """Lengths are in tokens, before anything is cut."""

    num_records: int = 0
    num_cut: int = 0
    num_tokens: int = 0
    num_tokens_cut: int = 0
    longest: int = 0
    longest_at: str = ""
    num_learned: int = 0  # labels that count
    largest_id: int = -1

    def add(self, other: Statistics) -> None:
        if other.longest > self.longest:
            self.longest, self.longest_at = other.longest, other.longest_at
        self.largest_id = max(self.largest_id, other.largest_id)
        for name in ("num_records", "num_cut", "num_tokens", "num_tokens_cut", "num_learned"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class EncodedBlock:
    """Some records in a row: `lengths[i]` tokens of the flat arrays belong to the i-th usable one."""

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    lengths: list[int]
    statistics: Statistics = field(default_factory=Statistics)
    faults: Faults = field(default_factory=Faults)


def encode_files(
    files: Sequence[Path],
    tokenizer: Any,
    wanted: Wanted,
    *,
    num_processes: int,
    faults: Faults,
    told: Callable[[int], None] = lambda num_records: None,
) -> Iterator[EncodedBlock]:
    """Blocks in the order of the files; all that is wrong goes to `faults`, in that order, too. `told` hears how many
    records are done. The tokenizer must not have been used by several threads before (the processes are forked)."""
    repeats = Repeats()
    num_records = 0
    for block, repeated in _in_order(files, tokenizer, wanted, num_processes, repeats):
        for fault in sorted([*block.faults.kept, *repeated.kept], key=lambda fault: fault.line):
            faults.add(fault)
        for kind, count in [*block.faults.counts.items(), *repeated.counts.items()]:
            shown = sum(fault.kind == kind for fault in [*block.faults.kept, *repeated.kept])
            faults.counts[kind] = faults.counts.get(kind, 0) + count - shown
        num_records += block.statistics.num_records
        told(num_records)
        yield block


def encode_block(path: str, first_line: int, lines: Sequence[bytes], tokenizer: Any, wanted: Wanted) -> EncodedBlock:
    """What can be used of the lines, encoded, cut and checked."""
    faults, statistics = Faults(), Statistics()
    records: list[Record] = []
    for number, raw in enumerate(lines, start=first_line):
        if raw.strip():
            statistics.num_records += 1
            record = look_at(raw, wanted.data_format, wanted.system_prompt, path, number, faults)
            if record is not None:
                records.append(record)
    ids_parts: list[NDArray[np.int32]] = []
    label_parts: list[NDArray[np.int32]] = []
    encoded = encode_batch(records, tokenizer, train_on_prompt=wanted.train_on_prompt)
    for record, result in zip(records, encoded, strict=True):
        if isinstance(result, DataError):
            faults.add(Fault(RECORD, record.source, record.line, str(result)))
            continue
        ids, labels = (np.asarray(part, dtype=np.int32) for part in result)
        for fault in _judge(record, ids, labels, wanted, statistics):
            faults.add(fault)
        ids_parts.append(ids[: wanted.max_length])
        label_parts.append(labels[: wanted.max_length])
    nothing = np.zeros(0, dtype=np.int32)
    return EncodedBlock(
        np.concatenate([nothing, *ids_parts]),
        np.concatenate([nothing, *label_parts]),
        [len(part) for part in ids_parts],
        statistics,
        faults,
    )


def _judge(
    record: Record, ids: NDArray[np.int32], labels: NDArray[np.int32], wanted: Wanted, statistics: Statistics
) -> Iterator[Fault]:
    where, length = f"{record.source}:{record.line}", len(ids)
    largest = int(ids.max()) if length else -1
    statistics.largest_id = max(statistics.largest_id, largest)
    statistics.num_tokens += length
    if length > statistics.longest:
        statistics.longest, statistics.longest_at = length, where
    if length > wanted.max_length:
        statistics.num_cut += 1
        statistics.num_tokens_cut += length - wanted.max_length
    num_learned = int((labels[: wanted.max_length] != IGNORED_LABEL).sum())
    statistics.num_learned += num_learned
    if wanted.vocab_size is not None and largest >= wanted.vocab_size:
        text = f"{where}: token id {largest} is beyond the model's vocabulary of {wanted.vocab_size}"
        yield Fault(TOKEN, record.source, record.line, text)
    if num_learned == 0:
        why = (
            f"its {length} tokens are cut to {wanted.max_length}" if length > wanted.max_length else "it is all prompt"
        )
        text = f"{where}: nothing of this record is learned: {why}"
        yield Fault(NOTHING_LEFT, record.source, record.line, text)


def _in_order(
    files: Sequence[Path], tokenizer: Any, wanted: Wanted, num_processes: int, repeats: Repeats
) -> Iterator[tuple[EncodedBlock, Faults]]:
    if num_processes <= 1:
        for path, first_line, lines in blocks_of(files):
            yield (
                encode_block(str(path), first_line, lines, tokenizer, wanted),
                _repeated(path, first_line, lines, repeats),
            )
        return
    context = multiprocessing.get_context("fork")  # the tokenizer is there already: loading it takes seconds
    waiting: deque[tuple[Future[EncodedBlock], Faults]] = deque()
    with ProcessPoolExecutor(num_processes, context, _keep, (tokenizer, wanted)) as pool:
        for path, first_line, lines in blocks_of(files):
            answer = pool.submit(_encode_here, str(path), first_line, lines)
            waiting.append((answer, _repeated(path, first_line, lines, repeats)))
            if len(waiting) > _BLOCKS_AHEAD * num_processes:
                first, repeated = waiting.popleft()
                yield first.result(), repeated
        while waiting:
            first, repeated = waiting.popleft()
            yield first.result(), repeated


_kept: list[tuple[Any, Wanted]] = []  # of a process of the pool


def _keep(tokenizer: Any, wanted: Wanted) -> None:
    gc.disable()  # blocks make no cycles, and looking for some among millions of numbers takes a tenth of the time
    _kept[:] = [(tokenizer, wanted)]


def _encode_here(path: str, first_line: int, lines: Sequence[bytes]) -> EncodedBlock:
    return encode_block(path, first_line, lines, *_kept[0])


def _repeated(path: Path, first_line: int, lines: Sequence[bytes], repeats: Repeats) -> Faults:
    faults = Faults()
    for number, raw in enumerate(lines, start=first_line):
        if raw.strip() and repeats.seen(raw):
            faults.add(Fault(REPEATED, str(path), number, f"{path}:{number}: the same as an earlier record"))
    return faults
