"""When a line was printed, where it says so: for which of several errors came first. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
_CLOCK = r"(?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d(?:[.,]\d+)?)"
_FORMS = (
    ("date", re.compile(rf"\b\d{{4}}[-/](?P<month>\d\d)[-/](?P<day>\d\d)[T ]{_CLOCK}")),
    ("date", re.compile(rf"\[?[EWIF](?P<month>\d\d)(?P<day>\d\d) {_CLOCK}")),  # glog, as torch prints it
    ("date", re.compile(rf"\b(?P<name>{'|'.join(_MONTHS)}) +(?P<day>\d{{1,2}}) {_CLOCK}")),  # syslog, dmesg -T
    ("uptime", re.compile(r"^(?:<\d+>)?\[\s*(?P<s>\d+\.\d+)\]")),
)


class Stamp(NamedTuple):
    """`seconds` can be compared between stamps of the same `kind`. A date is without its year, as glog's is."""

    kind: str
    seconds: float


def stamp_of(line: str) -> Stamp | None:
    for kind, form in _FORMS:
        if found := form.search(line):
            return Stamp(kind, _seconds(found.groupdict()))
    return None


def _seconds(parts: dict[str, str]) -> float:
    seconds = float(parts["s"].replace(",", "."))
    if "h" not in parts:
        return seconds
    month = _MONTHS.index(parts["name"]) + 1 if parts.get("name") else int(parts["month"])
    days = month * 31 + int(parts["day"])
    return ((days * 24 + int(parts["h"])) * 60 + int(parts["m"])) * 60 + seconds
