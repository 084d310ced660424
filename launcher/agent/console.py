"""What a person sees: short lines, rank 0's own output, a progress line. Colour and prefixes only on a terminal.

Invariant (promise 10): progress lines come from steps that ranks have finished, never from a timer, so silence means
standstill and a watchdog above may rely on it. While steps of less than a minute are made, no minute is without a line.
A terminal or pipe that is stuck holds up nobody: what it does not take waits, and the oldest lines are left out.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import IO, TextIO

from launcher.agent.patient_output import PatientOutput
from launcher.diagnose.redact import redact_text

_PROGRESS_EVERY_S = 10.0
_NEVER_SILENT_FOR_S = 60.0
_SILENT_S, _SILENT_AS_ECHO_S = 15.0, 35.0  # after so long, long work is shown
_REDRAW_EVERY_S = 0.1
_BAR_CELLS = 16
_MIRROR_BYTES = 1 << 20  # of a rank's log, at most, each time
_LONGEST_LINE = 1 << 16  # an unfinished line beyond this is shown in pieces
_LAST_WORDS_S = 2.0  # at the end, for a terminal that is stopped or a reader that pauses
_OWN_INFO = " ftlaunch.rank INFO "  # what the agent shows itself, from the same rank's messages
# Not shown, but in the rank's log. TORCH_CPP_LOG_LEVEL would hide such lines at their source, and with them the only
# line that names a host without an address ("... cannot be retrieved (gai error: ...)"), which diagnose/ reads.
_NOISE = (_OWN_INFO, "[c10d] The hostname of the client socket cannot be retrieved. err=")
_TRACEBACK = b"Traceback (most recent call last):"
_ENDS_WITHIN_S = 10.0  # a rank that ends of an error has ended so long after its traceback


class Console:
    def __init__(self, stream: TextIO | None = None) -> None:
        """Where `stream` (standard error) has a descriptor, nothing here ever waits for it but `close`."""
        self._stream = stream or sys.stderr
        self._output = _patient(self._stream)
        self.tty = self._stream.isatty()
        self._gone = False
        self._closed = False
        self._last_written_s = time.monotonic()
        self._bar_shown = False
        self._last_progress_s = 0.0
        self._last_step_s = 0.0
        self.is_echo = False  # another node shows the progress of all: here no more is said than a watchdog needs
        self._mirrored: dict[Path, IO[bytes]] = {}
        self._held: dict[Path, tuple[float, str]] = {}  # logs that are not read on for a traceback: since when, prefix

    def say(self, text: str) -> None:
        """One or several lines of ftlaunch itself; with the time (local) where they may be read later."""
        self._clear_bar()
        prefix = self._paint("36", "ftlaunch ") if self.tty else f"ftlaunch: {time.strftime('%H:%M:%S')} "
        for line in redact_text(text).splitlines() or [""]:
            self._write(f"{prefix}{line}\n")

    def block(self, text: str) -> None:
        """A screen that stands for itself, without prefixes."""
        self._clear_bar()
        self._write(redact_text(text) + "\n")

    def progress(self, step: int, max_steps: int | None, loss: float | None, seconds_per_step: float | None) -> None:
        """Called when a step was finished: a redrawn bar on a terminal, a line now and then elsewhere."""
        now = time.monotonic()
        step_s, self._last_step_s = now - self._last_step_s, now
        if step != max_steps and not self._is_progress_due(now, step_s):
            return
        self._last_progress_s = now
        parts = [f"step {step}" + (f"/{max_steps}" if max_steps else "")]
        if loss is not None:
            parts.append(f"loss {loss:.4f}")
        if seconds_per_step is not None:
            parts.append(f"{seconds_per_step:.2f} s/step")
            if max_steps:
                parts.append(f"{_duration((max_steps - step) * seconds_per_step)} left")
        text = ", ".join(parts)
        if not self.tty:
            self.say(text)
            return
        if self._output is not None and self._output.is_behind:
            return  # a stopped terminal does not need every state of the bar afterwards
        filled = int(_BAR_CELLS * step / max_steps) if max_steps else 0
        bar = f"[{'#' * filled}{'.' * (_BAR_CELLS - filled)}]"
        room = shutil.get_terminal_size().columns - len("ftlaunch  ") - len(bar) - 1
        text = text[: max(0, room)]  # a wrapped bar would scroll instead of being redrawn
        self._write(f"\r\x1b[2K{self._paint('36', 'ftlaunch')} {bar} {text}")
        self._bar_shown = True

    def _is_progress_due(self, now: float, step_s: float) -> bool:
        if self.tty:
            return now - self._last_progress_s >= _REDRAW_EVERY_S
        if self.is_echo:  # the step after this one may come too late
            return self.silent_for_s() + step_s > _NEVER_SILENT_FOR_S
        return now - self._last_progress_s >= _PROGRESS_EVERY_S

    def long_work(self, text: str) -> None:
        """Something goes forward (encoding, evaluation, a long step): said where neither steps nor lines have shown
        it for a while. To be called often enough: every 20 s."""
        limit_s = _SILENT_AS_ECHO_S if self.is_echo else _SILENT_S
        if min(self.silent_for_s(), time.monotonic() - self._last_step_s) > limit_s:
            self.say(text)

    def mirror(self, path: Path, prefix: str, *, ended: bool = False) -> None:
        """Show what has been added to a rank's log since the last call.

        A traceback, and all that follows, waits until the rank has outlived it: a rank's last one is not shown where
        its turn is over elsewhere, or where the screen of an incident names the log. `ended`: the rank has ended.
        """
        since_s, _ = self._held.get(path, (None, ""))
        if since_s is not None and (ended or time.monotonic() - since_s < _ENDS_WITHIN_S):
            return
        self._held.pop(path, None)
        self._show_log(path, prefix, hold=since_s is None)

    def _show_log(self, path: Path, prefix: str, *, hold: bool) -> None:
        stream = self._mirrored.get(path)
        if stream is None:
            if not path.is_file():
                return
            stream = self._mirrored[path] = path.open("rb")
        start = stream.tell()
        for line in stream.readlines(_MIRROR_BYTES):
            if not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
                stream.seek(-len(line), 1)
                return
            if hold and _TRACEBACK in line:
                self._held[path] = (time.monotonic(), prefix)
                stream.seek(start)
                return
            start += len(line)
            text = line.decode("utf-8", "replace").rstrip("\r\n").rpartition("\r")[2]
            if any(part in text for part in _NOISE):
                continue
            self._clear_bar()
            self._write((self._paint("2", f"[{prefix}] ") + text if self.tty else text) + "\n")

    def forget_mirrors(self, *, drop_held: bool = False) -> None:
        """At the end of an attempt. `drop_held`: the rank has failed, or was killed; its log has what was held."""
        for path, (_, prefix) in self._held.items() if not drop_held else ():
            self._show_log(path, prefix, hold=False)
        for stream in self._mirrored.values():
            stream.close()
        self._mirrored.clear()
        self._held.clear()

    def flush(self) -> None:
        """Called often: show what could not be shown before."""
        if self._output is not None:
            self._output.flush()

    def close(self) -> None:
        """Show what is left, as far as somebody reads it within a short time; nothing is shown afterwards."""
        self.forget_mirrors()
        if self._output is not None and not self._closed:
            self._output.finish(_LAST_WORDS_S)
        self._closed = True

    def silent_for_s(self) -> float:
        """Seconds since anything was written."""
        return time.monotonic() - self._last_written_s

    def _write(self, text: str) -> None:
        """A console that has gone (closed terminal, ended reader of a pipe) is no reason to stop a training."""
        self._last_written_s = time.monotonic()
        if self._output is not None:
            self._output.write(text)
            return
        if self._gone:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._gone = True

    def _clear_bar(self) -> None:
        if self._bar_shown:
            self._write("\r\x1b[2K")
            self._bar_shown = False

    def _paint(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.tty and not os.environ.get("NO_COLOR") else text


def _patient(stream: TextIO) -> PatientOutput | None:
    """None where there is no descriptor (memory), or where it is closed."""
    try:
        stream.flush()
        return PatientOutput(stream.fileno(), encoding=stream.encoding)
    except (OSError, ValueError):
        return None


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else (f"{minutes} min {rest} s" if minutes else f"{rest} s")
