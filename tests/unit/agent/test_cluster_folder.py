"""What agents of many nodes keep in the folder they share, among real processes that are killed anywhere."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.agent import cluster_folder
from launcher.agent.cluster_folder import ClusterFolder
from launcher.agent.run_lock import LockFile, RunLock
from launcher.cluster.model import Accepted, Durable, Generation, Node
from launcher.errors import LockedElsewhere, RunsHereAlready, UserError
from tests.unit.agent.crowd import Child, child, killed_at_each_change, race

pytestmark = pytest.mark.slow  # processes, killed at each of their calls

ELSEWHERE = "pid 1 on lost-pod (boot 00000000, pid:[1], started 1) 0123456789abcdef"
FAR = "fuse.ossfs at /mnt/data"


def folder_of(output_dir: Path, name: str = "n0", first_voted: int = 0, **more: Any) -> ClusterFolder:
    return ClusterFolder(output_dir, name, first_voted=lambda: first_voted, **more)


def generation(number: int, base: int = 0, *names: str) -> Generation:
    members = tuple(Node(name, f"10.0.0.{index}:29430", 1, "abc") for index, name in enumerate(names or ("n0",)))
    return Generation(number, members, base, 29500, "start")


def memory_of(folder: ClusterFolder, number: int) -> Durable:
    return Durable(folder.incarnation, number, Accepted(number, generation(number, number - 1)), generation(number - 1))


def living(output_dir: Path, name: str, **more: Any) -> Callable[[Callable[[Any], None]], None]:
    """An agent that lives until it is killed."""

    def live(tell: Callable[[Any], None]) -> None:
        with folder_of(output_dir, name, **more) as folder:
            folder.persist(memory_of(folder, 5))
            tell([folder.epoch, folder.incarnation, folder.is_new_epoch])
            time.sleep(60)

    return live


def epochs(output_dir: Path) -> list[str]:
    return sorted(path.name for path in (output_dir / "ftlaunch" / "cluster").glob("epoch-*"))


# ---- epochs ----


def test_a_new_epoch_begins_when_nobody_lives(tmp_path: Path) -> None:
    with child(living(tmp_path, "n0")) as first, child(living(tmp_path, "n1")) as second:
        assert first.hear()[0] == second.hear()[0]
        first.kill()
        with folder_of(tmp_path, "n2") as third:
            assert not third.is_new_epoch
        second.kill()
        left = tmp_path / "ftlaunch" / "cluster" / ".id.0123456789abcdef"  # by somebody killed while drawing an id
        left.touch()
        with folder_of(tmp_path, "n0", first_voted=17) as later:
            assert not left.exists()
            assert later.is_new_epoch
            assert later.epoch == third.epoch + 1
            assert later.durable == Durable(later.incarnation, voted=17)
            assert later.folder_id == third.folder_id
            assert epochs(tmp_path) == [f"epoch-{later.epoch}"]
            assert later.claim(0, generation(18)) == generation(18)


@pytest.mark.parametrize("trace", ["events", "memory", "claim"])
def test_numbers_grow_over_epochs_whatever_single_trace_of_them_is_left(tmp_path: Path, trace: str) -> None:
    """All machines were lost, and with them what the storage had not got yet."""
    with folder_of(tmp_path, "n0") as before:
        if trace == "memory":
            before.persist(Durable(before.incarnation, 17, Accepted(9, generation(8)), generation(3)))
        elif trace == "claim":
            before.claim(4, generation(17, 4))
        left = tmp_path / "ftlaunch" / "cluster" / f"epoch-{before.epoch}"
        (left / "memory" / "n7.json").write_text("{")
        (left / "claims" / "1.json").write_bytes(b"")

    def asked_in_time() -> int:
        assert left.is_dir(), "asked before the older epochs are removed"
        return 17 if trace == "events" else 0

    with ClusterFolder(tmp_path, "n1", first_voted=asked_in_time) as first:
        assert first.durable.voted == 17
        assert not left.exists()
        with folder_of(tmp_path, "n2") as second:
            assert second.epoch == first.epoch
            assert second.durable.voted == 17, "the second to come has nothing of this to read any more"


def test_an_accepted_ballot_counts_as_a_number(tmp_path: Path) -> None:
    with folder_of(tmp_path, "n0") as before:
        before.persist(Durable(before.incarnation, 1, Accepted(21, generation(20)), generation(3)))
    with folder_of(tmp_path, "n1") as later:
        assert later.durable.voted == 21


def test_a_number_that_cannot_be_read_is_said_not_guessed(tmp_path: Path) -> None:
    with folder_of(tmp_path, "n0") as lives:
        (tmp_path / "ftlaunch" / "cluster" / f"epoch-{lives.epoch}" / "numbers-begin-after").write_text("x")
        with pytest.raises(OSError, match="numbers-begin-after is no number"):
            folder_of(tmp_path, "n1").__enter__()


def test_who_comes_back_while_another_lives_has_its_memory(tmp_path: Path) -> None:
    with child(living(tmp_path, "n0")) as first, child(living(tmp_path, "n1")) as other:
        other.hear()
        epoch, incarnation, _ = first.hear()
        first.kill()
        with folder_of(tmp_path, "n0", first_voted=17) as back:
            assert (back.epoch, back.is_new_epoch) == (epoch, False)
            assert back.incarnation == incarnation
            assert back.durable == memory_of(back, 5)


def test_twenty_that_start_at_once_agree(tmp_path: Path) -> None:
    def start(number: int) -> Iterator[list[Any]]:
        with folder_of(tmp_path, f"n{number}") as folder:
            claim = folder.claim(0, generation(number + 1))
            time.sleep(0.3)  # the last may begin one more epoch: none of those who live has left it
            folder.persist(memory_of(folder, 5))
            yield [folder.epoch, folder.folder_id, folder.drawn_token(), claim.number, folder.incarnation]

    told = race(20, start)
    assert len({tuple(answer[:4]) for answer in told}) == 1
    assert len({answer[4] for answer in told}) == 20
    assert stat.S_IMODE((tmp_path / "ftlaunch" / "cluster" / "token").stat().st_mode) == 0o600
    assert list((tmp_path / "ftlaunch" / "cluster").glob(".*")) == []


def test_killed_at_any_change_of_beginning_an_epoch(tmp_path: Path) -> None:
    with child(living(tmp_path, "n0")) as earlier:
        last_epoch, *_ = earlier.hear()

    def begin(tell: Callable[[Any], None]) -> None:
        with folder_of(tmp_path, "n0") as folder:
            tell(folder.drawn_token())

    known_ids: set[str] = set()
    for _ in killed_at_each_change(begin):
        with folder_of(tmp_path, "n1", first_voted=3) as folder:
            assert folder.is_new_epoch
            assert folder.epoch > last_epoch
            last_epoch = folder.epoch
            assert epochs(tmp_path) == [f"epoch-{last_epoch}"]
            assert folder.durable == Durable(folder.incarnation, voted=5), "never below what was in a memory before"
            folder.persist(memory_of(folder, 5))
            assert folder.claim(0, generation(4)) == generation(4)
            known_ids.add(folder.folder_id + folder.drawn_token())
    assert len(known_ids) == 1


def test_killed_at_any_change_of_joining_it_disturbs_nobody(tmp_path: Path) -> None:
    with folder_of(tmp_path, "n0") as lives:
        incarnations = set()
        for told in killed_at_each_change(joining(tmp_path)):
            lives.persist(memory_of(lives, 5))
            incarnations.update(told)
        assert len(incarnations) == 1
        with folder_of(tmp_path, "n1") as joined:
            assert joined.epoch == lives.epoch
            assert joined.durable == memory_of(joined, 5)
            assert incarnations == {joined.incarnation}


def joining(output_dir: Path) -> Callable[[Callable[[Any], None]], None]:
    def join(tell: Callable[[Any], None]) -> None:
        with folder_of(output_dir, "n1") as folder:
            folder.persist(memory_of(folder, 5))
            tell(folder.incarnation)

    return join


def test_who_loses_the_lock_while_it_is_converted_joins_the_epoch_that_began_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, others = LockFile.take, []

    def take_late(lock: LockFile, how: int) -> bool:
        if how == fcntl.LOCK_SH and not others:
            monkeypatch.undo()
            lock.release()  # flock converts in two steps, and another may come between them
            others.append(Child(living(tmp_path, "n1")))
            others.append(others[0].hear())
        return take(lock, how)

    monkeypatch.setattr(LockFile, "take", take_late)
    try:
        with folder_of(tmp_path, "n0") as folder:
            assert (folder.epoch, folder.is_new_epoch) == (2, False)
            assert others[1][0] == 2
            folder.persist(memory_of(folder, 5))
    finally:
        others[0].kill()


def test_agents_that_start_together_do_not_refuse_each_other(tmp_path: Path) -> None:
    """One begins an epoch, and a moment later others live in it."""

    def live_on(tell: Callable[[Any], None]) -> None:
        with folder_of(tmp_path, "n1"):
            pass
        tell("its name is in the epoch")
        time.sleep(60)

    said: list[str] = []
    with child(live_on) as other:
        other.hear()
        with (tmp_path / "ftlaunch" / "lock").open() as begins:
            fcntl.flock(begins, fcntl.LOCK_EX)
            with pytest.raises(LockedElsewhere):
                folder_of(tmp_path, say=said.append, stopped=lambda: bool(said)).__enter__()


# ---- memory ----


def test_killed_at_any_change_of_a_write_of_the_memory(tmp_path: Path) -> None:
    with folder_of(tmp_path, "n0"):
        with folder_of(tmp_path, "n1") as folder:
            folder.persist(memory_of(folder, 5))
            incarnation = folder.incarnation

        def write(tell: Callable[[Any], None]) -> None:
            with folder_of(tmp_path, "n1") as folder:
                folder.persist(memory_of(folder, folder.durable.voted + 1))
                tell(folder.durable.voted)

        before, changed = 5, 0
        for told in killed_at_each_change(write):
            with folder_of(tmp_path, "n1") as folder:
                assert folder.incarnation == incarnation
                assert folder.durable == memory_of(folder, folder.durable.voted)
                assert folder.durable.voted in ([before + 1] if told else [before, before + 1])
                changed += folder.durable.voted != before
                before = folder.durable.voted
        assert changed > 1


def test_the_second_start_of_a_node_on_this_machine_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    with child(living(tmp_path, "n1")) as first:
        first.hear()
        with pytest.raises(
            RunsHereAlready, match=rf"n1 .* alive on this machine already \(pid {first.pid} on "
        ) as said:
            folder_of(tmp_path, "n1").__enter__()
        assert said.value.exit_code == 2
        with folder_of(tmp_path, "n0") as other:
            other.persist(memory_of(other, 5))


def test_a_node_whose_lost_machine_keeps_the_lock_comes_back_as_somebody_else(tmp_path: Path) -> None:
    said: list[str] = []
    with folder_of(tmp_path, "n0") as lives:
        seat = tmp_path / "ftlaunch" / "cluster" / f"epoch-{lives.epoch}" / "agents" / "n1"
        with seat.open("w") as lost:
            lost.write(ELSEWHERE)
            lost.flush()
            fcntl.flock(lost, fcntl.LOCK_EX)
            with child(living(tmp_path, "n1")) as second:
                _, incarnation, _ = second.hear()
                with pytest.raises(RunsHereAlready, match=f"pid {second.pid}"):  # the third, and the second lives here
                    folder_of(tmp_path, "n1", say=said.append).__enter__()
            assert "lost-pod" in said[0]
        # The file server has let go of the lock: of two seats the one with a memory is taken.
        with folder_of(tmp_path, "n1") as back:
            assert back.incarnation == incarnation
            assert back.durable.voted == 5


def test_the_memory_that_knows_more_is_taken(tmp_path: Path) -> None:
    with folder_of(tmp_path, "n0"):
        with folder_of(tmp_path, "n1") as first:
            first.persist(memory_of(first, 5))
            with folder_of(tmp_path, "n1") as second:  # the lock of n1 is held by this process: not a neighbour
                second.persist(memory_of(second, 9))
        with folder_of(tmp_path, "n1") as back:
            assert (back.incarnation, back.durable.voted) == (second.incarnation, 9)
            with folder_of(tmp_path, "n1") as another:
                assert (another.incarnation, another.durable.voted) == (first.incarnation, 5)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"incarnation": 7}', b"\xff\xfe"])
def test_a_memory_that_cannot_be_read_is_kept_and_said(tmp_path: Path, content: bytes) -> None:
    said: list[str] = []
    with folder_of(tmp_path, "n0"):
        with folder_of(tmp_path, "n1") as first:
            first.persist(memory_of(first, 5))
        path = tmp_path / "ftlaunch" / "cluster" / f"epoch-{first.epoch}" / "memory" / "n1.json"
        path.write_bytes(content)
        with folder_of(tmp_path, "n1", first_voted=3, say=said.append) as back:
            assert back.incarnation != first.incarnation
            assert back.durable == Durable(back.incarnation, voted=3)
        assert f"{path} cannot be read" in said[0]
        assert path.with_name("n1.json.unreadable").read_bytes() == content


def test_a_full_disk_is_no_vote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with folder_of(tmp_path, "n0"), folder_of(tmp_path, "n1") as folder:
        folder.persist(memory_of(folder, 5))

        def fsync(_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as full:
            full.setattr(os, "fsync", fsync)
            with pytest.raises(OSError, match="No space left"):
                folder.persist(memory_of(folder, 6))
        assert folder.durable.voted == 5
        folder.persist(memory_of(folder, 7))


# ---- claims ----


def test_a_claim_is_never_changed(tmp_path: Path) -> None:
    with folder_of(tmp_path, "n0") as first, folder_of(tmp_path, "n1") as second:
        assert first.claim(4, generation(5, 4)) == generation(5, 4)
        assert second.claim(4, generation(6, 4)) == generation(5, 4)
        assert second.claim(6, generation(7, 6)) == generation(7, 6)


def claimed_or_stuck(folder: ClusterFolder, base: int) -> tuple[Generation | None, str]:
    try:
        return folder.claim(base, generation(2000, base)), ""
    except OSError as error:
        return None, str(error)


def without_links(source: object, target: object) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
def test_killed_at_any_change_of_a_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    if not links:
        monkeypatch.setattr(os, "link", without_links)
    bases = iter(range(1000))
    with folder_of(tmp_path, "n0") as lives:

        def ask(tell: Callable[[Any], None]) -> None:
            with folder_of(tmp_path, "n1") as folder:
                tell("claimed" if folder.claim(base, generation(2001, base)).number == 2001 else "not")

        base, num_hers, num_stuck = next(bases), 0, 0
        for told in killed_at_each_change(ask):
            holder, stuck = claimed_or_stuck(lives, base)
            if holder is None:
                assert not links
                assert not told
                num_stuck += 1
                remedy = re.search(r"being written by (.*); if that node .* remove (.*)", stuck)
                assert remedy
                if remedy[1] == "somebody unknown":
                    Path(remedy[2]).unlink()
                with folder_of(tmp_path, "n1") as back:  # the one that took the name may end what it began
                    holder = back.claim(base, generation(2001, base))
                assert lives.claim(base, generation(2000, base)) == holder
            assert holder in (generation(2000, base), generation(2001, base))
            assert holder.number == 2001 or not told
            num_hers += holder.number == 2001
            base = next(bases)
        assert num_hers > 1
        assert bool(num_stuck) is not links


def test_without_hard_links_twenty_claims_at_once_agree_or_do_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", without_links)

    def start(number: int) -> Iterator[int]:
        with folder_of(tmp_path, f"n{number}", locks_stay_here=FAR) as folder:
            try:
                holder = folder.claim(0, generation(number + 1)).number
            except OSError:  # it was taken just now
                time.sleep(0.5)
                holder = folder.claim(0, generation(number + 1)).number
            yield holder

    with folder_of(tmp_path, "n99", locks_stay_here=FAR) as first:  # folder id first: a start does not ask again
        assert first.folder_id
        assert len(set(race(20, start))) == 1


def test_a_spoilt_claim_is_named(tmp_path: Path) -> None:
    with folder_of(tmp_path, "n0") as folder:
        path = tmp_path / "ftlaunch" / "cluster" / f"epoch-{folder.epoch}" / "claims" / "0.json"
        path.write_text("{}")
        with pytest.raises(OSError, match=r"0\.json is no claim"):
            folder.claim(0, generation(1))


# ---- one node and many ----


def test_a_run_on_one_node_is_refused_with_the_names_of_the_agents(tmp_path: Path) -> None:
    with child(living(tmp_path, "n0")) as first:
        first.hear()
        with (
            pytest.raises(UserError, match=rf"in use by another ftlaunch \(n0: pid {first.pid} on "),
            RunLock(tmp_path),
        ):
            pytest.fail("two runs in one folder")
    with RunLock(tmp_path):
        pass


def test_agents_are_refused_with_the_name_of_a_run_on_one_node(tmp_path: Path) -> None:
    def run_on_one_node(tell: Callable[[Any], None]) -> None:
        with RunLock(tmp_path):
            tell("held")
            time.sleep(60)

    with folder_of(tmp_path) as before:
        pass
    with child(run_on_one_node) as first:
        first.hear()
        with pytest.raises(UserError, match=rf"in use by another ftlaunch \(pid {first.pid} on "):
            folder_of(tmp_path).__enter__()
    with folder_of(tmp_path) as after:
        assert after.epoch == before.epoch + 1


def test_a_run_on_one_node_elsewhere_is_waited_for(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "ftlaunch" / "lock"
    path.parent.mkdir()
    with path.open("w") as lost:
        lost.write(ELSEWHERE)
        lost.flush()
        fcntl.flock(lost, fcntl.LOCK_EX)
        with pytest.raises(LockedElsewhere, match="still locked by pid 1 on lost-pod"):
            folder_of(tmp_path, say=said.append, stopped=lambda: bool(said)).__enter__()
    assert "waiting at most 120 s" in said[0]
    with folder_of(tmp_path, say=said.append) as folder:
        assert folder.epoch == 1


def test_a_run_that_is_leaving_does_not_look_like_a_holder(tmp_path: Path) -> None:
    """The lock was free, an agent begins an epoch; another that starts just then must not be refused for the text."""

    def leave_and_live_on(tell: Callable[[Any], None]) -> None:
        with RunLock(tmp_path):
            pass
        tell("left")
        time.sleep(60)

    with child(leave_and_live_on) as first:
        first.hear()
        with (tmp_path / "ftlaunch" / "lock").open() as begins:
            fcntl.flock(begins, fcntl.LOCK_EX)
            said: list[str] = []
            with pytest.raises(LockedElsewhere):
                folder_of(tmp_path, say=said.append, stopped=lambda: bool(said)).__enter__()


# ---- locks that were lost, or do not reach other machines ----


def test_an_agent_whose_lock_was_given_away_votes_no_more(tmp_path: Path) -> None:
    with folder_of(tmp_path, "n0") as lost, child(living(tmp_path, "n1")) as also_lost:
        also_lost.hear()
        also_lost.kill()
        lost._lock.release()  # as a file server does for a machine that it has not heard of
        with folder_of(tmp_path, "n1") as new:
            assert new.epoch == lost.epoch + 1
            with pytest.raises(OSError, match=f"belongs to epoch {new.epoch}"):
                lost.check()
            with pytest.raises(OSError, match="has been removed") as said:
                lost.persist(memory_of(lost, 5))
            assert said.value.errno == errno.ESTALE
        with RunLock(tmp_path), pytest.raises(OSError, match=f"belongs to pid {os.getpid()} on "):
            lost.check()


def test_of_two_owners_of_a_memory_the_first_is_stopped(tmp_path: Path) -> None:
    with folder_of(tmp_path, "n0", locks_stay_here=FAR) as first:
        first.persist(memory_of(first, 5))
        first._seat.file.release()  # the second is on another machine, and sees no lock
        with folder_of(tmp_path, "n0", locks_stay_here=FAR) as second:
            assert second.durable == memory_of(first, 5)
            with pytest.raises(OSError, match="another agent has taken the place of n0"):
                first.persist(memory_of(first, 6))
            second.persist(memory_of(second, 7))
            with pytest.raises(OSError, match="another agent has taken the place of n0"):
                first.persist(memory_of(first, 6))
        assert second.incarnation == first.incarnation
        with folder_of(tmp_path, "n0", locks_stay_here=FAR) as third:
            assert third.durable == memory_of(second, 7)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_who_is_replaced_while_it_writes_its_memory_does_not_vote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    replace_file, seconds = cluster_folder.replace_file, []

    def replaced(path: Path, data: bytes) -> None:
        monkeypatch.undo()
        if moment == "after":
            replace_file(path, data)
        first._seat.file.release()
        seconds.append(folder_of(tmp_path, "n0", locks_stay_here=FAR).__enter__())
        if moment == "before":
            replace_file(path, data)

    with folder_of(tmp_path, "n0", locks_stay_here=FAR) as first:
        first.persist(memory_of(first, 5))
        monkeypatch.setattr(cluster_folder, "replace_file", replaced)
        with pytest.raises(OSError, match="another agent has taken the place of n0"):
            first.persist(memory_of(first, 6))
        second = seconds[0]
        assert second.durable.voted == (6 if moment == "after" else 5)
        second.__exit__(None, None, None)


def test_of_two_owners_one_reads_the_vote_that_the_other_could_still_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the second start takes over, a vote of the first that was allowed is in what the second has read."""

    def vote(tell: Callable[[Any], None]) -> None:
        with folder_of(tmp_path, "n0", locks_stay_here=FAR) as first:
            first._seat.file.release()
            tell("here")
            number = 6
            while True:
                first.persist(memory_of(first, number))
                tell(number)
                number += 1

    monkeypatch.setattr(cluster_folder, "lives_here", lambda _: False)  # each is on another machine for the others
    for _ in range(5):
        with child(vote) as first:
            assert first.hear() == "here"
            while (voted := first.hear()) < 20:
                pass  # it votes as fast as it can
            with folder_of(tmp_path, "n0", locks_stay_here=FAR) as second:
                while (word := first.hear()) is not None:
                    voted = word
                assert first.wait() == 1
                assert second.durable.voted >= voted
                second.persist(memory_of(second, 5))


def test_where_locks_stay_on_the_machine_an_epoch_goes_on_and_the_remedy_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    with folder_of(tmp_path, "n0", locks_stay_here=FAR, say=said.append) as first:
        assert (first.epoch, first.is_new_epoch) == (1, True)
        first.persist(memory_of(first, 5))
        first.claim(0, generation(1))
    assert "goes on with what" not in said[0]
    with folder_of(tmp_path, "n0", locks_stay_here=FAR, say=said.append) as back:
        assert (back.epoch, back.is_new_epoch) == (1, False)
        assert back.durable == memory_of(first, 5)
        assert back.claim(0, generation(2)) == generation(1)
    assert FAR in said[1]
    assert "goes on with what the nodes of an earlier one have agreed on" in said[1]
    assert f"remove {tmp_path}/ftlaunch/cluster/epoch-1" in said[1]


def test_where_there_are_no_locks_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    said: list[str] = []
    with child(living(tmp_path, "n0")) as first:
        assert first.hear()[0] == 1
        with pytest.raises(RunsHereAlready, match=f"pid {first.pid}"):
            folder_of(tmp_path, "n0", say=said.append).__enter__()
        with folder_of(tmp_path, "n1", say=said.append) as other:
            other.persist(memory_of(other, 5))
    assert "No locks available" in said[0]


def test_a_spoilt_id_is_named(tmp_path: Path) -> None:
    with folder_of(tmp_path):
        pass
    (tmp_path / "ftlaunch" / "cluster" / "id").write_text("")
    with pytest.raises(UserError, match="cluster/id is not what ftlaunch has written"):
        folder_of(tmp_path).__enter__()
