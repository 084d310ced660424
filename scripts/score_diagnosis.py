"""Score `ftlaunch diagnose` against a collection of labelled logs.

    python scripts/score_diagnosis.py FOLDER|FILE.jsonl ... [--without-exits] [--wrong]

One JSON object a line: `log`, `root_cause`, `root_cause_line`, `right_action`, and optionally `also_ok`, `also_action`,
`exit_code`, `signal` (`SIGKILL`), `evidence` (`partial` counts half), `settled` (false counts half), `is_secondary`.

- class: `root_cause` or one of `also_ok`
- evidence: the first evidence line is `root_cause_line`; "near" allows two lines more or less
- a retry of what `stop` is right for wastes GPU time; a stop of what a retry is right for loses the run
"""

import argparse
import json
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launcher.diagnose.evidence import RankEvidence, clean_line, number_lines
from launcher.diagnose.redact import redact_text
from launcher.diagnose.verdict import Verdict, diagnose

HALF = 0.5
NEAR_LINES = 2
# An adjustment is a stop with a remedy unless the launcher owns the setting: neither right nor wrong beside these.
RETRIES = ("retry", "retry_excluding_node")


@dataclass(frozen=True)
class Score:
    case: Mapping[str, Any]
    verdict: Verdict
    weight: float
    class_right: bool
    line_right: bool
    line_near: bool
    action_right: bool
    wrong_retry: bool
    wrong_stop: bool


def main() -> int:
    parser = argparse.ArgumentParser(description="score `ftlaunch diagnose` against labelled logs")
    parser.add_argument("paths", nargs="+", type=Path, help="*.jsonl, or folders that hold some")
    parser.add_argument("--without-exits", action="store_true", help="do not feed exit codes and signals")
    parser.add_argument("--wrong", action="store_true", help="show every miss")
    options = parser.parse_args()
    files = list(_files(options.paths))
    if not files:
        print(f"no *.jsonl in {', '.join(map(str, options.paths))}: nothing to score")
        return 0
    cases = [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines() if line.strip()]
    scores = [score(case, with_exit=not options.without_exits) for case in cases]
    _print_table(scores)
    if options.wrong:
        _print_wrong(scores)
    return 0


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        yield from sorted(path.glob("*.jsonl")) if path.is_dir() else [path] if path.is_file() else []


def score(case: Mapping[str, Any], *, with_exit: bool = True) -> Score:
    by_name = str(case.get("signal") or "")
    rank = RankEvidence(
        rank=-1,
        node="",
        pid=None,
        exit_code=case.get("exit_code") if with_exit else None,
        signal=int(signal.Signals[by_name]) if with_exit and by_name in signal.Signals.__members__ else None,
        log_path="log",
        tail=number_lines(case["log"]),
        last_step=None,
    )
    verdict = diagnose([rank])
    actions = [case["right_action"], *case.get("also_action", ())]
    near, exact = _line(case, rank, verdict)
    kinds = {_kind(action) for action in actions}
    return Score(
        case,
        verdict,
        weight=HALF if case.get("settled") is False or case.get("evidence") == "partial" else 1.0,
        class_right=verdict.cls in (case["root_cause"], *case.get("also_ok", ())),
        line_right=exact,
        line_near=near,
        action_right=verdict.action in actions,
        wrong_retry=kinds == {"stop"} and verdict.retryable,
        wrong_stop=kinds <= set(RETRIES) and verdict.action == "stop",
    )


def _kind(action: str) -> str:
    return action.partition(":")[0]


def _line(case: Mapping[str, Any], rank: RankEvidence, verdict: Verdict) -> tuple[bool, bool]:
    """(within NEAR_LINES, the very line)."""
    if not verdict.evidence:
        return False, False
    wanted = clean_line(case["root_cause_line"].split("\n")[0]).strip()
    shown = verdict.evidence[0].text.strip()
    if wanted and (wanted == shown or redact_text(wanted)[: len(shown)] == shown):
        return True, True
    at = [number for number, text in rank.tail if text.strip() == wanted or (wanted and wanted in text)]
    line = verdict.evidence[0].line
    return any(abs(number - line) <= NEAR_LINES for number in at), line in at


def _share(scores: Sequence[Score], right: Iterable[bool]) -> str:
    total = sum(s.weight for s in scores)
    won = sum(s.weight for s, ok in zip(scores, right, strict=True) if ok)
    return f"{won:6.1f} of {total:6.1f}  {100 * won / total if total else 0:5.1f} %"


def _print_table(scores: Sequence[Score]) -> None:
    print(f"{len(scores)} logs; partial and unsettled ones count half")
    for title, chosen in (
        ("all", scores),
        ("settled and whole", [s for s in scores if s.weight == 1.0]),
        ("secondary", [s for s in scores if s.case.get("is_secondary")]),
    ):
        if not chosen:
            continue
        print(f"\n{title}")
        print(f"  class            {_share(chosen, [s.class_right for s in chosen])}")
        print(f"  evidence line    {_share(chosen, [s.line_right for s in chosen])}")
        print(f"  ... within {NEAR_LINES}     {_share(chosen, [s.line_near for s in chosen])}")
        print(f"  action           {_share(chosen, [s.action_right for s in chosen])}")
    print(f"\nuser errors retried    {sum(s.wrong_retry for s in scores)}")
    print(f"outside faults stopped {sum(s.wrong_stop for s in scores)}")
    print("\nclass                        logs  missed (said instead)")
    logs = Counter(s.case["root_cause"] for s in scores)
    for cls in sorted(logs):
        missed = Counter(s.verdict.cls for s in scores if s.case["root_cause"] == cls and not s.class_right)
        said = ", ".join(f"{name} x{num}" for name, num in missed.most_common())
        if missed:
            print(f"{cls:28} {logs[cls]:4}  {missed.total()} ({said})")


def _print_wrong(scores: Sequence[Score]) -> None:
    for s in scores:
        marks = [
            name
            for name, wrong in (
                ("class", not s.class_right),
                ("line", not s.line_right),
                ("action", not s.action_right),
                ("WRONG RETRY", s.wrong_retry),
                ("WRONG STOP", s.wrong_stop),
            )
            if wrong
        ]
        if marks:
            shown = s.verdict.evidence[0].text[:180] if s.verdict.evidence else ""
            print(f"\n{s.case.get('id', '?')}: {', '.join(marks)} (weight {s.weight:g})")
            print(f"  wanted {s.case['root_cause']} {s.case['right_action']}: {s.case['root_cause_line'][:180]}")
            print(f"  said   {s.verdict.cls} {s.verdict.action}: {shown}")


if __name__ == "__main__":
    sys.exit(main())
