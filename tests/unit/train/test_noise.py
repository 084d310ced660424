"""What libraries say that is as ftlaunch wants it is kept out of the ranks' logs; all else stays."""

from __future__ import annotations

import subprocess
import sys

_TALK = """
import logging
from launcher.train.main import _configure_logging
_configure_logging(0)
accelerate = logging.getLogger("accelerate.accelerator")  # its adapter puts the rank before the text
accelerate.warning("[RANK 0] Gradient accumulation steps mismatch: the plugin has 1, DeepSpeed config has 2.")
accelerate.warning("[RANK 0] Gradient clipping is off")
"""


def test_accelerates_words_on_accumulation_are_not_in_the_log() -> None:
    done = subprocess.run([sys.executable, "-c", _TALK], capture_output=True, text=True, timeout=60, check=True)
    assert "mismatch" not in done.stderr
    assert "Gradient clipping is off" in done.stderr
