"""Messages and descriptors between agent and courier, over real socket pairs."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

from launcher.courier.wire import MAX_PACKET_BYTES, Parcel, Wire, close_all
from launcher.link import pair


@pytest.fixture
def ends() -> Iterator[tuple[Wire, Wire]]:
    near, far = (Wire(end) for end in pair())
    yield near, far
    near.close()
    far.close()


def memory(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


def receive_all(wire: Wire) -> list[Parcel]:
    parcels: list[Parcel] = []
    while found := wire.receive():
        parcels += found
    return parcels


def test_descriptors_arrive_with_their_message_in_order_and_are_closed_on_exec(ends: tuple[Wire, Wire]) -> None:
    near, far = ends
    fds = [memory(b"first"), memory(b"second")]
    near.send("write", fds, id=1)
    close_all(fds)
    (parcel,) = far.receive()
    assert parcel.message["kind"] == "write"
    assert [os.pread(fd, 10, 0) for fd in parcel.fds] == [b"first", b"second"]
    assert not any(os.get_inheritable(fd) for fd in parcel.fds)
    close_all(parcel.fds)


@pytest.mark.parametrize("num_chars", [MAX_PACKET_BYTES, 5_000_000])
def test_a_message_that_is_too_large_for_a_packet_arrives_whole(ends: tuple[Wire, Wire], num_chars: int) -> None:
    near, far = ends
    num_open = len(os.listdir("/proc/self/fd"))
    fd = memory(b"slot")
    near.send("publish", [fd], id=1, manifest="保" * num_chars)
    near.post("publish", id=2, manifest="x" * num_chars)
    os.close(fd)
    first, second = receive_all(far)
    assert first.message["manifest"] == "保" * num_chars
    assert [os.pread(one, 10, 0) for one in first.fds] == [b"slot"]
    assert (second.message["id"], len(second.message["manifest"]), second.fds) == (2, num_chars, ())
    close_all(first.fds)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_what_finds_no_room_waits_in_order_and_nothing_blocks(ends: tuple[Wire, Wire]) -> None:
    near, far = ends
    fd = memory(b"slot")
    for number in range(2000):
        near.post("write", [fd], id=number, filling="x" * 1000)
    os.close(fd)
    assert near.has_unsent
    numbers = []
    while len(numbers) < 2000:
        near.flush()
        for parcel in receive_all(far):
            numbers.append(parcel.message["id"])
            assert os.pread(parcel.fds[0], 10, 0) == b"slot", "though the sender has closed its own meanwhile"
            close_all(parcel.fds)
    assert numbers == list(range(2000))


@pytest.mark.parametrize("large", [False, True])
def test_descriptors_beyond_the_limit_of_open_files_are_said_to_be_lost(ends: tuple[Wire, Wire], large: bool) -> None:
    near, far = ends
    fds = [memory(b"slot") for _ in range(5)]
    near.send("write", fds, id=7, filling="x" * (2 * MAX_PACKET_BYTES if large else 1))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    held = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 3, before[1]))
        while True:  # fill the gaps
            try:
                held.append(os.dup(fds[0]))
            except OSError:
                break
        os.close(held.pop())
        (parcel,) = far.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        close_all([*fds, *held])
    assert parcel.fds_lost
    assert parcel.fds == ()
    assert parcel.message["id"] == 7, "the request can be answered"


def test_the_end_of_the_other_side_comes_after_its_last_words(ends: tuple[Wire, Wire]) -> None:
    near, far = ends
    far.post("never read", id=1)
    near.send("done", id=1)
    near.close()
    assert [parcel.message["kind"] for parcel in receive_all(far)] == ["done"]
    assert far.closed
    far.post("write", id=2)
    assert not far.has_unsent, "nothing is kept for nobody"
