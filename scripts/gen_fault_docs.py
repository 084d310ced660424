"""Write `docs/faults.md` from the catalogue of faults, so that page and code cannot drift apart.

python scripts/gen_fault_docs.py            # write the page
python scripts/gen_fault_docs.py --check    # exit 1 when the page is not up to date
"""

import argparse
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the scripts belong to this checkout, installed or not

from launcher.diagnose.catalogue import CATALOGUE, EXITED, KILLED_FROM_OUTSIDE, UNKNOWN  # noqa: E402
from launcher.diagnose.classes import environment, files, gpu, gpu_memory, network, training  # noqa: E402
from launcher.diagnose.fault import Fault  # noqa: E402

TARGET = ROOT / "docs" / "faults.md"

# In the order of the page; a class stands under the first group that names it.
GROUPS: Sequence[tuple[str, Sequence[Fault]]] = (
    ("GPU memory", gpu_memory.FAULTS),
    ("Files, host memory and limits", files.FAULTS),
    ("Training, data and checkpoints", training.FAULTS),
    ("GPUs and their software", gpu.FAULTS),
    ("Network", (*network.PIPES, *network.FAULTS)),
    ("Environment and program", (*environment.HUB, *environment.FAULTS, EXITED)),
    ("Without a line that names the cause", (KILLED_FROM_OUTSIDE, UNKNOWN)),
)

HEAD = """\
# Faults

Written by `scripts/gen_fault_docs.py` from the catalogue in `launcher/diagnose/`; do not edit this page.

After a failed attempt ftlaunch reads the logs of all ranks, their exits, the kernel log and the counters of the cgroup,
and names one cause ([how](commands/diagnose.md#how-the-cause-is-found)). Of several nodes the one whose rank failed
first does so for its own ranks. What a process prints because another one failed is set aside. The verdict is in
`ftlaunch/incidents/<utc>-<class>/` of the output folder; cause and remedy are shown in English or Chinese
(`FTLAUNCH_LANG`, else the locale).

| action | what this version does |
|---|---|
| `retry` | starts again by itself, while [progress](exit-codes.md#when-ftlaunch-gives-up) is made |
| `retry_excluding_node` | the same; leaving the node out comes later |
| `adjust:WHAT` | stops with exit code 1 and shows the remedy; changing WHAT by itself comes later |
| `stop` | stops with exit code 1: a rerun would meet the same fault |

`adjust:master_port` is retried: every attempt has a port of its own.

Several entries of one class are the same fault with different remedies. "Named only as a consequence": the class is the
verdict only when no log shows what came before. `<...>` stands for what the log says.

For `device_assert_index`, `device_assert_label` and `data_too_long` the sample is looked for without a GPU, in a
process of its own, at most 15 s: those of the step that failed first, then all others. The verdict names file, line,
position and value. Runs of a trainer of yours (`command`) and GGUF files are left out.
"""


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    written: set[str] = set()
    for title, faults in GROUPS:
        lines += [f"## {title}", ""]
        for cls in dict.fromkeys(fault.cls for fault in faults):
            if cls not in written:
                written.add(cls)
                lines += _class(cls, _entries()[cls])
    return "\n".join(lines).rstrip("\n") + "\n"


def classes() -> set[str]:
    """Every class that a verdict can have."""
    return set(_entries())


def _entries() -> Mapping[str, list[Fault]]:
    entries: dict[str, list[Fault]] = {}
    for fault in (*CATALOGUE, EXITED, KILLED_FROM_OUTSIDE, UNKNOWN):
        entries.setdefault(fault.cls, []).append(fault)
    return entries


def _class(cls: str, faults: Sequence[Fault]) -> Iterator[str]:
    yield f"### {cls}"
    yield ""
    for fault in faults:
        yield f"- **`{fault.action}`** {_cause(fault.cause.en)}{_extra(fault)}"
        yield f"  Remedy: {_filled(fault.remedy.en)}"
    yield ""


def _extra(fault: Fault) -> str:
    notes = []
    if fault.secondary:
        notes.append("named only as a consequence")
    if fault.signals:
        names = ", ".join(signal.Signals(number).name for number in fault.signals)
        when = ", before the first step where nothing counts such kills" if signal.SIGKILL in fault.signals else ""
        notes.append(f"also for a rank that ends with {names} and prints no error{when}")
    return f" ({'; '.join(notes)})" if notes else ""


def _cause(text: str) -> str:
    text = _filled(re.sub(r"^\{where\}: ", "", text)).strip()
    return text[0].upper() + text[1:]


def _filled(text: str) -> str:
    """Places of the text made readable: `{where}` is a rank, all others what the log says."""
    text = text.replace("{where}", "a rank")
    return re.sub(r"\{(\w+)\}", r"`<\1>`", text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/faults.md from the catalogue of faults.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is not up to date")
    arguments = parser.parse_args()
    if arguments.check:
        return 0 if TARGET.is_file() and TARGET.read_text("utf-8") == page() else 1
    TARGET.write_text(page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
