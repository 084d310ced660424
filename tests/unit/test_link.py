"""The channel between agent and rank, over real socket pairs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from launcher.link import MAX_MESSAGE_BYTES, Link, Message, decode, encode, pair


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    agent, rank = (Link(end) for end in pair())
    yield agent, rank
    agent.close()
    rank.close()


def kinds(messages: list[Message]) -> list[str]:
    return [message["kind"] for message in messages]


def test_messages_arrive_whole_and_in_order(ends: tuple[Link, Link]) -> None:
    agent, rank = ends
    assert rank.send("step", step=7, samples=[3, 1], note="保险")
    assert rank.send("finished", step=8)
    assert agent.poll() == [
        {"kind": "step", "step": 7, "samples": [3, 1], "note": "保险"},
        {"kind": "finished", "step": 8},
    ]
    assert agent.poll() == []
    assert not agent.closed


def test_values_that_are_not_json_become_their_text() -> None:
    assert decode(encode("saved", {"path": os.path}))["path"] == str(os.path)


def test_what_a_rank_said_before_it_died_is_still_there(ends: tuple[Link, Link]) -> None:
    agent, rank = ends
    rank.send("stopped", step=3)
    rank.close()
    assert kinds(agent.poll()) == ["stopped"]
    assert agent.closed


def test_last_words_are_there_though_the_rank_died_with_unread_mail(ends: tuple[Link, Link]) -> None:
    """The kernel then answers ECONNRESET once before it hands out what is queued."""
    agent, rank = ends
    agent.send("prepare_save")
    rank.send("step", step=3, samples=[1, 2])
    rank.send("user_error", message="no such file")
    rank.close()
    assert kinds(agent.poll()) == ["step", "user_error"]
    assert agent.poll() == []
    assert agent.closed


def test_last_words_are_there_though_a_message_to_the_dead_rank_failed(ends: tuple[Link, Link]) -> None:
    agent, rank = ends
    rank.send("stopped", step=3)
    rank.close()
    assert agent.send("save_at", step=4) is False
    assert kinds(agent.poll()) == ["stopped"]


def test_sending_to_a_rank_that_is_gone_is_no_error(ends: tuple[Link, Link]) -> None:
    agent, rank = ends
    rank.close()
    assert agent.send("save_at", step=4) is False
    assert agent.poll() == []
    assert agent.closed


def test_wait_for_takes_one_kind_and_keeps_the_others(ends: tuple[Link, Link]) -> None:
    agent, rank = ends
    for kind in ("prepare_save", "save_at", "other"):
        agent.send(kind, step=5)
    assert rank.wait_for("save_at", 1.0) == {"kind": "save_at", "step": 5}
    assert kinds(rank.poll()) == ["prepare_save", "other"]


def test_wait_for_returns_as_soon_as_the_message_comes(ends: tuple[Link, Link]) -> None:
    agent, rank = ends
    timer = threading.Timer(0.05, lambda: agent.send("save_at", step=5))
    timer.start()
    began = time.monotonic()
    assert rank.wait_for("save_at", 20.0) is not None
    assert time.monotonic() - began < 10.0
    timer.join()


def test_wait_for_is_bounded(ends: tuple[Link, Link]) -> None:
    _, rank = ends
    began = time.monotonic()
    assert rank.wait_for("save_at", 0.05) is None
    assert 0.04 <= time.monotonic() - began < 5.0


def test_wait_for_ends_at_once_when_the_agent_is_gone(ends: tuple[Link, Link]) -> None:
    agent, rank = ends
    agent.close()
    began = time.monotonic()
    assert rank.wait_for("save_at", 20.0) is None
    assert time.monotonic() - began < 10.0
    assert rank.closed


def test_a_signal_to_a_rank_reaches_the_agent_through_the_same_socket() -> None:
    ours, theirs = pair()
    agent, rank = Link(ours), Link(theirs)
    handler = signal.signal(signal.SIGHUP, lambda *_: None)
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    try:
        rank.send("step", step=1, samples=[])
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        messages = agent.poll()
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGHUP, handler)
        agent.close()
        rank.close()
    assert messages[0]["kind"] == "step"
    assert messages[1:] == [{"kind": "signal", "signal": int(signal.SIGHUP)}] * 2


def test_signals_that_ask_for_nothing_do_not_reach_the_agent(ends: tuple[Link, Link]) -> None:
    """Seen as a run that stopped at each epoch's end: set_wakeup_fd also reports SIGCHLD, which DataLoader handles."""
    agent, rank = ends
    os.write(rank.fileno(), bytes([signal.SIGCHLD]))
    os.write(rank.fileno(), bytes([signal.SIGTERM]))
    assert agent.poll() == [{"kind": "signal", "signal": int(signal.SIGTERM)}]


def test_a_burst_waits_for_room_and_nothing_is_lost(ends: tuple[Link, Link]) -> None:
    agent, rank = ends
    num_messages = 3000
    sender = threading.Thread(
        target=lambda: [rank.send("step", step=i, samples=list(range(200))) for i in range(num_messages)]
    )
    sender.start()
    got: list[int] = []
    deadline = time.monotonic() + 30
    while len(got) < num_messages and time.monotonic() < deadline:
        got += [message["step"] for message in agent.poll()]
    sender.join()
    assert got == list(range(num_messages))


def test_a_message_of_the_largest_size_arrives(ends: tuple[Link, Link]) -> None:
    agent, rank = ends
    text = "x" * (MAX_MESSAGE_BYTES - len(encode("answer", {"text": ""})))
    assert rank.send("answer", text=text)
    assert agent.poll() == [{"kind": "answer", "text": text}]


def test_a_message_beyond_the_largest_size_is_never_torn(ends: tuple[Link, Link]) -> None:
    """Its text is cut at the sender: a torn packet would end the reader, which is the agent."""
    agent, rank = ends
    text = "x" * (5 * MAX_MESSAGE_BYTES)
    rank.send("user_error", message=text)
    (message,) = agent.poll()
    assert message["kind"] == "user_error"
    assert message["message"].startswith("xxx")
    assert message["message"].endswith("x ...")
