"""Commands whose names are settled but which are not built yet: said plainly, with exit code 2."""

from __future__ import annotations

import argparse

from launcher.errors import NotInThisVersion


def main(options: argparse.Namespace) -> int:
    raise NotInThisVersion(f"`ftlaunch {options.command}` is not in this version")
