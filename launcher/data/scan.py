"""A fast pass over the records without a tokenizer: what is wrong, with file and line.

Memory does not grow with the files: faults are counted and the first ones kept, and records that repeat earlier ones
are found with a filter of fixed size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from launcher.data.records import DataError, Record, expand_files, parse_record

RECORD, ROLE, REPEATED = "record", "role", "repeated"
NUM_KEPT = 20  # faults of each kind that are shown; the others are counted
BLOCK_BYTES = 1 << 20
NUM_OF_BLOCK = 8  # records of a block that are looked at once half the time is gone
MAX_RECORD_BYTES = 64 << 20  # a longer line is no record but a file of another kind

# What chat templates know. Others are rendered as they are, or refused in the middle of the encoding.
KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython", "observation"})

# A Bloom filter: with 8 of 2^27 bits a record, a false alarm in 10^10 for a million records, in 1000 for ten million.
_FILTER_BITS, _NUM_PROBES = 1 << 27, 8


@dataclass(frozen=True)
class Fault:
    """`kind`: RECORD cannot be trained on; ROLE and REPEATED can, and are hardly meant. `text` says where it is."""

    kind: str
    source: str
    line: int
    text: str

    @property
    def where(self) -> str:
        return f"{self.source}:{self.line}"


@dataclass
class Faults:
    """Counted by kind, the first `NUM_KEPT` of each kept."""

    counts: dict[str, int] = field(default_factory=dict)
    kept: list[Fault] = field(default_factory=list)

    def add(self, fault: Fault) -> None:
        seen = self.counts.get(fault.kind, 0)
        self.counts[fault.kind] = seen + 1
        if seen < NUM_KEPT:
            self.kept.append(fault)

    def of(self, *kinds: str) -> tuple[Fault, ...]:
        return tuple(fault for fault in self.kept if fault.kind in kinds)

    def num(self, *kinds: str) -> int:
        return sum(self.counts.get(kind, 0) for kind in kinds)


@dataclass(frozen=True)
class DataScan:
    """What a pass has found. `num_looked_at` of `num_records`; the latter is None where the time ended before the
    files did. `sample`: some of the usable records, from all over what was read."""

    num_looked_at: int
    num_records: int | None
    faults: Faults
    sample: tuple[Record, ...]
    seconds: float


class Repeats:
    """Which lines have been there before, byte by byte; 16 MiB whatever comes."""

    def __init__(self) -> None:
        self._bits = bytearray(_FILTER_BITS >> 3)

    def seen(self, raw: bytes) -> bool:
        """Whether this line was given before; it counts as given now."""
        digest = xxhash.xxh3_128_intdigest(raw.strip())
        first, step = digest & 0xFFFFFFFFFFFFFFFF, (digest >> 64) | 1
        known = True
        for probe in range(_NUM_PROBES):
            place = (first + probe * step) % _FILTER_BITS
            mask = 1 << (place & 7)
            if not self._bits[place >> 3] & mask:
                known = False
                self._bits[place >> 3] |= mask
        return known


def scan_files(
    patterns: Sequence[str],
    data_format: str,
    system_prompt: str | None,
    *,
    budget_s: float | None,
    num_sampled: int = 200,
    clock: Callable[[], float] = time.monotonic,
) -> DataScan:
    """Look at every record within half of `budget_s`, then at the first few of each block of the files, and stop when
    the time is up. None: look at all of them. Raises UserError for a pattern without a file, OSError."""
    began = clock()
    faults, repeats, sample = Faults(), Repeats(), _Sample(num_sampled)
    num_looked_at = num_records = 0
    complete = True
    for path, first_line, lines in blocks_of(expand_files(patterns)):
        spent = clock() - began
        if budget_s is not None and spent > budget_s:
            complete = False
            break
        all_of_them = budget_s is None or spent < budget_s / 2
        left = len(lines) if all_of_them else NUM_OF_BLOCK
        for number, raw in enumerate(lines, start=first_line):
            if not raw.strip():
                continue
            num_records += 1
            if left <= 0:
                continue
            left -= 1
            num_looked_at += 1
            record = look_at(raw, data_format, system_prompt, str(path), number, faults)
            if record is not None:
                sample.offer(record)
            if repeats.seen(raw):
                faults.add(Fault(REPEATED, str(path), number, f"{path}:{number}: the same as an earlier record"))
    return DataScan(num_looked_at, num_records if complete else None, faults, sample.taken, clock() - began)


def look_at(
    raw: bytes, data_format: str, system_prompt: str | None, source: str, line: int, faults: Faults
) -> Record | None:
    """The record of one line, None where it cannot be used; what is wrong with it goes to `faults`."""
    try:
        record = parse_record(raw, data_format, source=source, line=line, system_prompt=system_prompt)
    except DataError as error:
        faults.add(Fault(RECORD, source, line, str(error)))
        return None
    for fault in role_faults(record):
        faults.add(fault)
    return record


def role_faults(record: Record) -> Iterator[Fault]:
    """The first odd role of a record: an unknown one, `system` after the beginning, twice the same side in a row."""
    previous = ""
    for index, turn in enumerate(record.turns):
        what = ""
        if turn.role not in KNOWN_ROLES:
            what = f"messages[{index}] has the role {turn.role!r}, which chat templates do not know"
        elif turn.role in ("system", "developer") and index:
            what = f"messages[{index}] has the role {turn.role!r}, which belongs to the beginning"
        elif turn.role == previous and turn.role in ("user", "assistant"):
            what = f"messages[{index}] follows another message of the role {turn.role!r}"
        if what:
            yield Fault(ROLE, record.source, record.line, f"{record.source}:{record.line}: {what}")
            return
        previous = turn.role


def blocks_of(files: Sequence[Path]) -> Iterator[tuple[Path, int, list[bytes]]]:
    """(file, number of the first line, whole lines) in blocks of about `BLOCK_BYTES`; at most `MAX_RECORD_BYTES` and a
    block are held at a time."""
    for path in files:
        with path.open("rb") as stream:
            line, rest = 1, b""
            while block := stream.read(BLOCK_BYTES):
                whole, newline, rest = (rest + block).rpartition(b"\n")
                if not newline and len(rest) <= MAX_RECORD_BYTES:
                    continue
                lines = whole.split(b"\n") if newline else [rest]
                if not newline:
                    rest = b""
                yield path, line, lines
                line += len(lines)
            if rest:
                yield path, line, [rest]


class _Sample:
    """`size` records, spread evenly over all that were offered: every n-th, and n doubles whenever it is full."""

    def __init__(self, size: int) -> None:
        self._size, self._every, self._offered = size, 1, 0
        self._records: list[Record] = []

    def offer(self, record: Record) -> None:
        if self._offered % self._every == 0:
            if len(self._records) >= 2 * self._size:
                self._records = self._records[::2]
                self._every *= 2
            if self._offered % self._every == 0:
                self._records.append(record)
        self._offered += 1

    @property
    def taken(self) -> tuple[Record, ...]:
        count = len(self._records)
        wanted = min(self._size, count)
        return tuple(self._records[place * count // wanted] for place in range(wanted))
