"""Bars of the seconds between a fault, or the start, and work that goes on. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from scripts.bench_peers.table import OURS, Row, names_of, shown

_CHARTED = {("fresh2", "first_step_s"), ("fresh8", "first_step_s"), ("kill", "new_step_s"), ("node", "new_step_s")}
_LEFT, _BAR, _ROW, _WIDTH = 130, 420, 18, 640


def svg(found: Sequence[Row]) -> str:
    text: list[str] = []
    y = 10
    for row in found:
        medians = {name: row.cells[name].median for name in names_of([row])}
        values = {name: median for name, median in medians.items() if median is not None}
        if (row.line.case, row.line.figure) not in _CHARTED or not values:
            continue
        longest = max((value for value in values.values() if not math.isinf(value)), default=1.0)
        text.append(f'<text x="0" y="{y + 12}" font-weight="bold">{escape(row.line.title)}, seconds</text>')
        y += _ROW + 2
        for name, value in values.items():
            colour = "#2a7ab8" if name == OURS else "#b8b8b8"
            length = 0 if math.isinf(value) else round(value / longest * _BAR)
            text.append(f'<text x="{_LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>')
            text.append(f'<rect x="{_LEFT}" y="{y + 1}" width="{length}" height="{_ROW - 4}" fill="{colour}"/>')
            text.append(f'<text x="{_LEFT + length + 6}" y="{y + 12}">{shown(value, row.line.unit)}</text>')
            y += _ROW
        y += 10
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y}" font-family="sans-serif"'
    return "\n".join(
        [f'{head} font-size="12">', f'<rect width="{_WIDTH}" height="{y}" fill="#ffffff"/>', *text, "</svg>", ""]
    )
