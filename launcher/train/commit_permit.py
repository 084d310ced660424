"""Before anything gets its final name, rank 0 asks its agent whether this generation is still the one that counts.

Why: a node that was cut off from the others may train on for a while, and a new generation without it may have begun
from an older checkpoint. What the cut-off ranks save must not appear under the new generation's feet.
"""

from __future__ import annotations

from launcher.link import Link

PERMIT_WAIT_S = 30.0  # the agent may have to hear from the other nodes first


class CommitRefused(RuntimeError):  # noqa: N818 - an outcome, not a defect
    """What was staged stays staged; a later generation removes it."""


def ask_to_commit(link: Link, step: int, what: str, *, wait_s: float = PERMIT_WAIT_S) -> None:
    """Returns when the agent allows `what` (a folder's name) of this step to be committed; raises CommitRefused when it
    does not, or does not answer in time."""
    link.send("may_commit", step=step, what=what)
    answer = link.wait_for("commit", wait_s)
    if answer is not None and answer["allowed"]:
        return
    if answer is not None:
        reason = str(answer["reason"]) or "the agent gave no reason"
    elif link.closed:
        reason = "the agent is gone"
    else:
        reason = f"the agent has not said within {wait_s:.0f} s whether this generation is still the current one"
    raise CommitRefused(f"{what} of step {step} was not committed: {reason}")
