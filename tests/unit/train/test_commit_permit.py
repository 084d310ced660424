"""Nothing is committed without the agent's word, and no wait for it is endless."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from launcher import link as channel
from launcher.link import Link
from launcher.train.commit_permit import CommitRefused, ask_to_commit


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    """Agent's end and rank's end."""
    agent, rank = (Link(end) for end in channel.pair())
    yield agent, rank
    agent.close()
    rank.close()


def test_allowed_after_the_question_was_asked(ends: tuple[Link, Link]) -> None:
    agent, rank = ends
    agent.send("prepare_save")
    agent.send("commit", allowed=True, reason="")
    ask_to_commit(rank, 20, "checkpoint-20")
    assert agent.poll() == [{"kind": "may_commit", "step": 20, "what": "checkpoint-20"}]
    assert [message["kind"] for message in rank.poll()] == ["prepare_save"], "other messages are kept"


def test_refused_with_the_agents_reason(ends: tuple[Link, Link]) -> None:
    agent, rank = ends
    agent.send("commit", allowed=False, reason="generation 7 has begun without this node")
    with pytest.raises(CommitRefused, match="checkpoint-20 of step 20 was not committed: generation 7 has begun"):
        ask_to_commit(rank, 20, "checkpoint-20")


def test_no_answer_is_a_refusal(ends: tuple[Link, Link]) -> None:
    with pytest.raises(CommitRefused, match=r"has not said within 0 s"):
        ask_to_commit(ends[1], 20, "final/", wait_s=0.01)


def test_a_dead_agent_is_a_refusal_at_once(ends: tuple[Link, Link]) -> None:
    agent, rank = ends
    agent.close()
    with pytest.raises(CommitRefused, match="the agent is gone"):
        ask_to_commit(rank, 20, "final/", wait_s=60)
