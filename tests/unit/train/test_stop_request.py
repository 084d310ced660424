"""A rank's side of agreed saves, over a real channel."""

from __future__ import annotations

import threading
import time

from launcher import link as channel
from launcher.link import Link
from launcher.train.stop_request import StopRequest


def both_ends() -> tuple[Link, Link]:
    ours, theirs = channel.pair()
    return Link(ours), Link(theirs)


def test_without_a_request_nothing_is_due() -> None:
    agent, rank = both_ends()
    assert not StopRequest(rank).check(5)
    assert agent.poll() == []


def test_the_first_to_answer_waits_for_the_step() -> None:
    agent, rank = both_ends()
    agent.send("prepare_save")

    def decide() -> None:
        answer = agent.wait_for("at_step", 5)
        assert answer is not None
        agent.send("save_at", step=answer["step"] + 1)

    thread = threading.Thread(target=decide)
    thread.start()
    request = StopRequest(rank)
    assert not request.check(7)
    thread.join()
    assert request.check(8)


def test_request_and_decision_that_arrive_together_are_not_waited_for() -> None:
    """Seen as a save that hung until its bound: another rank had answered first, and this one waited for a message it
    held."""
    agent, rank = both_ends()
    agent.send("prepare_save")
    agent.send("save_at", step=9)
    started = time.monotonic()
    request = StopRequest(rank)
    assert not request.check(8, decision_wait_s=5)
    assert time.monotonic() - started < 2
    assert request.check(9)


def test_an_agent_that_does_not_decide_does_not_stop_the_training() -> None:
    agent, rank = both_ends()
    agent.send("prepare_save")
    assert not StopRequest(rank).check(3, decision_wait_s=0.05)
    assert [m["kind"] for m in agent.poll()] == ["at_step"]


def test_an_agent_that_is_gone_is_not_waited_for() -> None:
    agent, rank = both_ends()
    agent.send("prepare_save")
    agent.close()
    started = time.monotonic()
    assert not StopRequest(rank).check(3, decision_wait_s=5)
    assert time.monotonic() - started < 2
