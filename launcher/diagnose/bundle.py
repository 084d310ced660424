"""Incident bundles, and the one screen that ends a failed attempt. Everything written here is redacted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from launcher.diagnose.catalogue import UNKNOWN
from launcher.diagnose.evidence import NodeEvidence, RankEvidence, name_exit
from launcher.diagnose.redact import hide_values, redact_document, redact_environ, redact_text, secret_values
from launcher.diagnose.verdict import EvidenceLine, Verdict
from launcher.i18n import Text

MAX_BUNDLE_BYTES = 50 * 2**20
_RESERVED_BYTES = 2 * 2**20  # verdict, summary, environment, host: never cut
_MAX_LOG_BYTES = 2**20  # of one log; taking secrets out of more would take too long
_MAX_DUMP_BYTES = 20 * 2**20
_MAX_OTHER_RANKS = 8
_MAX_SHOWN_CHARS = 300

_CONFIDENCE = {
    "certain": Text("certain", "确定"),
    "probable": Text("probable", "可能"),
    "unknown": Text("unknown", "未知"),
}
_HEADING = Text("Why it failed: {cls} ({confidence})", "失败原因：{cls}（{confidence}）")
_NOT_KNOWN = Text("Why it failed: not known for certain", "失败原因：尚不能确定")
_CAUSE = Text("Cause", "原因")
_PROOF = Text("Proof", "证据")
_REMEDY = Text("What to do", "处理")
_DONE = Text("ftlaunch", "ftlaunch")
_FOLLOWED = Text("Consequences, not causes", "后果（非原因）")
_RANKS = Text("How the ranks ended", "各 rank 的退出情况")
_MORE = Text("... and {num} more", "……另有 {num} 个")


def screen(verdict: Verdict, decision: str) -> str:
    """What a person needs, on one screen: cause, the line that proves it, what to do, what ftlaunch did."""
    heading = _HEADING.format(cls=verdict.cls, confidence=_CONFIDENCE[verdict.confidence].pick()).pick()
    if verdict.cls == UNKNOWN.cls:
        heading = _NOT_KNOWN.pick()
    rows = [(_CAUSE, verdict.cause.pick())]
    rows += [(_PROOF, _shown(line)) for line in verdict.evidence[:2]]
    rows.append((_REMEDY, verdict.remedy.pick()))
    if verdict.also:
        rows.append((_FOLLOWED, ", ".join(verdict.also)))
    if decision:
        rows.append((_DONE, decision))
    return redact_text("\n".join([heading, *(f"  {label.pick()}: {text}" for label, text in rows)])) + "\n"


def _shown(line: EvidenceLine) -> str:
    text = line.text.strip()
    text = text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + " ..."
    who = "" if line.rank is None or line.rank < 0 else f"rank {line.rank}, "
    return f"{text}\n    ({who}{line.file}{f':{line.line}' if line.line else ''})"


def write_bundle(
    root: Path,
    utc: str,
    verdict: Verdict,
    ranks: Sequence[RankEvidence],
    nodes: Sequence[NodeEvidence],
    environ: Mapping[str, str],
    host_facts: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
    *,
    stacks: Mapping[int, str] | None = None,
    dumps: Sequence[Path] = (),
) -> Path:
    """`stacks`: of ranks that hung. `dumps`: files that are copied as they are, as far as there is room.

    Writes `root/<utc>-<class>/` and returns it. `utc` may hold characters that a file name may not.

    At most MAX_BUNDLE_BYTES: logs share what is left, and each that is too long loses its middle. A bundle of the same
    second and class gets a number, so that nothing is overwritten. Raises OSError when the folder cannot be written.
    """
    folder = _new_folder(root, f"{utc.replace(':', '').replace('/', '-')}-{verdict.cls}")
    write = partial(_write, folder, secret_values(environ))
    write("verdict.json", _json(verdict.to_json()))
    write("summary.md", summary(verdict, ranks, str((extra or {}).get("decision", "")), (extra or {}).get("about")))
    write("environment.json", _json(redact_environ(environ)))
    counted = [{k: value for k, value in vars(n).items() if k not in ("kernel_lines", "facts")} for n in nodes]
    write("host.json", _json({"facts": dict(host_facts), "nodes": counted, **(extra or {})}))
    if any(node.facts for node in nodes):
        write("node.json", _json([{"node": node.node, **node.facts} for node in nodes]))
    budget = min(_MAX_LOG_BYTES, (MAX_BUNDLE_BYTES - _RESERVED_BYTES) // max(1, len(ranks) + 1))
    for rank in ranks:
        name = f"rank-{rank.rank}.log" if rank.rank >= 0 else f"log-{Path(rank.log_path).name or 'unnamed'}"
        write(name, _ends([text for _, text in (*rank.head, *rank.tail)], budget))
    for number, stack in (stacks or {}).items():
        (folder / "stacks").mkdir(exist_ok=True)
        write(f"stacks/rank-{number}.txt", _ends(stack.splitlines(), budget))
    for dump in dumps:
        if dump.stat().st_size <= _MAX_DUMP_BYTES // len(dumps):
            (folder / "nccl").mkdir(exist_ok=True)
            shutil.copyfile(dump, folder / "nccl" / dump.name)
    kernel = [line for node in nodes for line in node.kernel_lines]
    if kernel:
        write("kernel.log", _ends(kernel, budget))
    return folder


def summary(
    verdict: Verdict, ranks: Sequence[RankEvidence], decision: str, about: Mapping[str, str] | None = None
) -> str:
    """The screen, how each rank ended, and what the run was (`about`), as Markdown for a ticket."""
    ends = [f"- rank {r.rank}{f' ({r.node})' if r.node else ''}: {_end(r)}" for r in _culprit_first(ranks, verdict)]
    if len(ends) > _MAX_OTHER_RANKS:
        ends = [*ends[:_MAX_OTHER_RANKS], "- " + _MORE.format(num=len(ends) - _MAX_OTHER_RANKS).pick()]
    lines = ["```", screen(verdict, decision).rstrip("\n"), "```", "", f"**{_RANKS.pick()}**", "", *ends]
    if about:
        lines += ["", *(f"- {name}: {value}" for name, value in about.items())]
    return redact_text("\n".join(lines)) + "\n"


def _culprit_first(ranks: Sequence[RankEvidence], verdict: Verdict) -> list[RankEvidence]:
    culprit = verdict.culprit.rank if verdict.culprit else None
    return sorted(ranks, key=lambda rank: (rank.rank != culprit, rank.killed_by_us, rank.rank))


def _end(rank: RankEvidence) -> str:
    by_us = Text(" (stopped by ftlaunch)", "（由 ftlaunch 停止）").pick() if rank.killed_by_us else ""
    step = "" if rank.last_step is None else f", step {rank.last_step}"
    return f"{name_exit(rank.exit_code, rank.signal)}{by_us}{step}"


def _new_folder(root: Path, name: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = root / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def _ends(lines: Sequence[str], budget: int) -> str:
    """All lines, or of too many the first and the last: how it began, and mostly how it ended."""
    text = redact_text("\n".join(lines)) + "\n"
    data = text.encode("utf-8", errors="replace")
    if len(data) <= budget:
        return text
    head = data[: budget // 4].decode("utf-8", errors="ignore").rpartition("\n")[0]
    tail = data[len(head.encode()) + 200 - budget :].decode("utf-8", errors="ignore").partition("\n")[2]
    left_out = len(data) - len(head.encode()) - len(tail.encode())
    return f"{head}\n... {left_out} bytes are left out here ...\n{tail}"


def _json(value: Any) -> str:
    return json.dumps(redact_document(value), ensure_ascii=False, indent=2, default=str) + "\n"


def _write(folder: Path, secrets: Sequence[str], name: str, text: str) -> None:
    (folder / name).write_text(hide_values(text, secrets), encoding="utf-8", errors="replace")
