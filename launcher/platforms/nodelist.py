"""Lists of hosts as Slurm (`gpu[01-03,7]`) and MPI or DeepSpeed (hostfile) write them."""

from __future__ import annotations

import re

from launcher.errors import UserError

MAX_HOSTS = 100_000  # a list that claims more is a mistake; it must not fill the memory
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_SLOTS = re.compile(
    r"(?P<host>[^\s:]+)"
    r"(?::(?P<colon>\d+)|\s+slots\s*=\s*(?P<slots>\d+))?"  # host:8 or host slots=8
    r"(?:\s+max[_-]slots\s*=\s*\d+)?"
)


def expand_nodelist(text: str) -> tuple[str, ...]:
    """The hosts of a Slurm node list, in its order. Raises ValueError for what it does not understand.

    Names with several brackets (`rack[1-2]n[01-04]`) count as in Slurm: the last bracket runs fastest. Numbers keep
    their leading zeros.
    """
    hosts: list[str] = []
    for part in _split_outside_brackets(text):
        hosts += _expand_one(part, MAX_HOSTS - len(hosts))
    if not hosts:
        raise ValueError("the list is empty")
    return tuple(hosts)


def _split_outside_brackets(text: str) -> list[str]:
    parts, depth = [""], 0
    for character in text.strip():
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            raise ValueError("brackets do not match")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    if depth:
        raise ValueError("brackets do not match")
    if any(not part.strip() for part in parts):
        raise ValueError("a name is empty")
    return [part.strip() for part in parts]


def _expand_one(part: str, room: int) -> list[str]:
    bracket = _BRACKETS.search(part)
    if bracket is None:
        if room < 1:
            raise ValueError(f"more than {MAX_HOSTS} hosts")
        if re.fullmatch(r"[\w.\-]+", part, re.ASCII) is None:
            raise ValueError(f"{part!r} is no host name")
        return [part]
    hosts: list[str] = []
    for number in _numbers(bracket.group(1), room):
        hosts += _expand_one(f"{part[: bracket.start()]}{number}{part[bracket.end() :]}", room - len(hosts))
    return hosts


def _numbers(text: str, room: int) -> list[str]:
    numbers: list[str] = []
    for item in text.split(","):
        found = _RANGE.fullmatch(item.strip())
        if found is None:
            raise ValueError(f"[{text}] holds {item!r}, which is no number and no range")
        first, last = found.group(1), found.group(2) or found.group(1)
        if int(last) < int(first):
            raise ValueError(f"[{text}] runs backwards")
        if int(last) - int(first) >= room - len(numbers):
            raise ValueError(f"more than {MAX_HOSTS} hosts")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def read_hostfile(text: str, path: str) -> tuple[tuple[str, int | None], ...]:
    """(host, slots) of each line: `host slots=8` (Open MPI, DeepSpeed), `host:8` (Intel MPI, MPICH) or `host`.

    Raises UserError with the line for anything else, for a host that stands there twice, and for a file without hosts.
    """
    hosts: dict[str, int | None] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.split("#", 1)[0].strip()
        if not content:
            continue
        found = _SLOTS.fullmatch(content)
        if found is None:
            raise UserError(f"{path}:{number}: {line.strip()!r} is no line of a hostfile; write: HOST slots=8")
        host = found["host"]
        if host in hosts:
            raise UserError(f"{path}:{number}: {host} is there a second time; name each host once")
        slots = found["slots"] or found["colon"]
        hosts[host] = int(slots) if slots else None
    if not hosts:
        raise UserError(f"{path} names no host; write a line for each: HOST slots=8")
    return tuple(hosts.items())
