"""Errors that are meant for the reader of the terminal: each carries the exit code that tells the scheduler the truth.

Exit codes are a contract with schedulers; see `docs/exit-codes.md`.
"""

from __future__ import annotations

import errno
import os
from enum import IntEnum


class ExitCode(IntEnum):
    """What the process tells the scheduler. 138 is KubeDL's and DLC's "user-defined: run me again"."""

    FINISHED = 0
    FAILED = 1  # a rerun would meet the same failure
    WRONG_INPUT = 2
    REFUSED = 3  # preflight refused the node or the cluster
    STOPPED = 138  # stopped from outside; progress is saved; run again
    STOPPED_143 = 143  # the same, where `spot.exit_code: 143` asks for it


# What another node, or a little later, may not meet: full or broken storage, a server that does not answer.
_PASSING_TROUBLE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN, None}
)


def may_pass(error: OSError) -> bool:
    """Whether running again (elsewhere, later) can help; a missing permission or folder stays what it is."""
    return error.errno in _PASSING_TROUBLE


class Cancelled(Exception):  # noqa: N818 - an outcome, not a defect
    """Whoever asked for this work does not want its result any more."""


class UserError(Exception):
    """Something the user can mend. The message alone must be enough; no traceback is shown."""

    exit_code: int = ExitCode.WRONG_INPUT


class PreflightRefused(UserError):  # noqa: N818 - an outcome, not a defect
    """The node cannot run this job: exit code 3, nothing has been started."""

    exit_code: int = ExitCode.REFUSED


class Stopped(UserError):  # noqa: N818 - an outcome, not a defect
    """Nothing is wrong with the job, but it cannot go on here and now: worth another try later."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.STOPPED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class LockedElsewhere(Stopped):
    """Another machine holds the output folder, or its lock has not been released yet."""


class RunsHereAlready(UserError):  # noqa: N818 - an outcome, not a defect
    """The agent of this node of this run is alive on this machine: nothing is wrong, and nothing is to be done."""


class NotInThisVersion(UserError):  # noqa: N818 - an outcome, not a defect
    """The command or option is known but not built yet: said plainly instead of being ignored."""


def unusable_folder(
    error: OSError, stop_exit_code: ExitCode = ExitCode.STOPPED, *, worked_before: bool = False
) -> UserError:
    """What to raise where the output folder fails: exit code 2 for what stays as it is, `stop_exit_code` for what may
    pass, and for what this run could use before (`worked_before`: a volume has become read-only)."""
    if may_pass(error) or worked_before:
        return Stopped(
            f"the output folder or this machine fails: {error}; run it again, best elsewhere", stop_exit_code
        )
    remedy = ""
    if error.errno in (errno.EACCES, errno.EPERM):
        remedy = f"; user id {os.geteuid()} needs the right to read and write there (`ls -ld` shows whose it is)"
    return UserError(f"the output folder cannot be used: {error}{remedy}")
