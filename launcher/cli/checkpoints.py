"""`ftlaunch checkpoints OUTPUT_DIR`: what is there, what is whole, what a start would resume from and why. Changes
nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.agent.completion import read_final
from launcher.checkpoint.in_place import is_rejected
from launcher.checkpoint.verify import Verification, folders_by_step, list_checkpoints, verify_checkpoint
from launcher.errors import UserError, unusable_folder
from launcher.preflight.finding import show_bytes


@dataclass(frozen=True)
class Row:
    """One checkpoint; `resumes` for the one that a start of the same job would take."""

    verification: Verification
    resumes: bool

    def to_json(self) -> dict[str, Any]:
        manifest = self.verification.manifest
        return {
            "step": self.verification.step,
            "path": str(self.verification.path),
            "whole": self.verification.whole,
            "reason": self.verification.reason,
            "resumes": self.resumes,
            "bytes": manifest.total_bytes if manifest else None,
            "created": manifest.created if manifest else None,
            "world_size": manifest.world_size if manifest else None,
            "samples_seen": manifest.samples_seen if manifest else None,
        }


def main(options: argparse.Namespace) -> int:
    folders = options.paths
    if len(folders) != 1 or not folders[0].is_dir():
        raise UserError("checkpoints: give one output folder that exists: ftlaunch checkpoints OUTPUT_DIR [--verify]")
    try:
        rows = look(folders[0], hashes=options.verify)
    except OSError as error:
        raise unusable_folder(error) from error
    final = read_final(folders[0], hashes=options.verify)
    aside = sorted(path.name for path in folders[0].glob("checkpoint-*.rejected*"))
    aside += sorted(path.name for _, path in folders_by_step(folders[0]) if is_rejected(path))
    if options.json:
        document = {
            "v": 1,
            "verified": "contents" if options.verify else "sizes",
            "checkpoints": [row.to_json() for row in rows],
            "final_step": final.step if final else None,
            "set_aside": aside,
        }
        print(json.dumps(document, ensure_ascii=False, indent=2))
    else:
        compared = "contents compared" if options.verify else "sizes compared; --verify compares the contents"
        final_line = f"final/ is of step {final.step}" if final else "final/ is not there"
        print(
            "\n".join(
                [*render(rows), *(f"  {name}: set aside by an earlier start" for name in aside), final_line, compared]
            )
        )
    return 0


def look(output_dir: Path, *, hashes: bool) -> list[Row]:
    """Newest first."""
    rows: list[Row] = []
    for step, path in list_checkpoints(output_dir):
        verification = verify_checkpoint(path, step, hashes=hashes)
        rows.append(Row(verification, resumes=verification.whole and not any(row.resumes for row in rows)))
    return rows


def render(rows: list[Row]) -> Iterator[str]:
    if not rows:
        yield "no checkpoints"
    for row in rows:
        manifest = row.verification.manifest
        if manifest is None:
            yield f"  step {row.verification.step}: refused: {row.verification.reason}"
            continue
        mark = "  <- a start resumes here" if row.resumes else ""
        size = show_bytes(manifest.total_bytes)
        ranks = f"{manifest.world_size} rank{'s' if manifest.world_size > 1 else ''}"
        seen = f"{manifest.samples_seen} samples"
        yield f"  step {manifest.step}: whole, {size}, {ranks}, {seen}, {manifest.created}{mark}"
