"""Write `docs/checks.md` from the registry of preflight checks, so that page and code cannot drift apart.

python scripts/gen_check_docs.py            # write the page
python scripts/gen_check_docs.py --check    # exit 1 when the page is not up to date
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the scripts belong to this checkout, installed or not

from launcher.preflight.check import Check  # noqa: E402
from launcher.preflight.registry import GROUPS  # noqa: E402

TARGET = ROOT / "docs" / "checks.md"

HEAD = """\
# Checks

Written by `scripts/gen_check_docs.py` from `launcher/preflight/registry_*.py`; do not edit this page.

What preflight looks at before a run, and what `ftlaunch check` shows. "Refuses" is an error: the start ends with exit
code 3. "Warns" is shown and training starts. Each finding has the measured value, the bound and the way out for your
platform, in English or Chinese. `check.skip: [ID]` leaves a check out. More: [preflight.md](preflight.md).
"""


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    for title, checks in GROUPS:
        lines += [f"## {title}", ""]
        for check in checks:
            lines += _entry(check)
    return "\n".join(lines).rstrip("\n") + "\n"


def _entry(check: Check) -> Iterator[str]:
    yield f"### `{check.id}`"
    yield ""
    yield f"- Looks at: {check.measures}"
    if check.refuses:
        yield f"- Refuses: {check.refuses}"
    if check.warns:
        yield f"- Warns: {check.warns}"
    yield f"- Remedy: {check.remedy}"
    yield ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/checks.md from the registry of checks.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is not up to date")
    arguments = parser.parse_args()
    if arguments.check:
        return 0 if TARGET.is_file() and TARGET.read_text("utf-8") == page() else 1
    TARGET.write_text(page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
