"""One generation as a state machine: every order of events that matters."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Sequence

import pytest

from launcher.agent.lifecycle import (
    KILLED_WITHIN_S,
    Action,
    Bound,
    Ending,
    KillGroup,
    Lifecycle,
    RankExit,
    StopAsked,
    Tell,
    WaitsAt,
)

KILLED = RankExit(None, signal.SIGKILL, 0.0, killed_by_us=True)


def clean(at_s: float = 0.0) -> RankExit:
    return RankExit(0, None, at_s)


def failed(code: int = 1) -> RankExit:
    return RankExit(code, None, 0.0)


def struck(number: int = signal.SIGKILL) -> RankExit:
    return RankExit(None, number, 0.0)


def training(num_ranks: int = 2, step: int = 5) -> Lifecycle:
    """Every rank has finished `step`."""
    life = Lifecycle(range(num_ranks), grace_s=25.0)
    for rank in range(num_ranks):
        life.on_message(rank, {"kind": "step", "step": step, "samples": []})
    return life


def kills(actions: Sequence[Action]) -> bool:
    return any(isinstance(action, KillGroup) for action in actions)


def told(actions: Sequence[Action]) -> list[Tell]:
    return [action for action in actions if isinstance(action, Tell)]


# -- agreeing on a step ------------------------------------------------------------------------------------------------


def test_a_stop_asks_the_ranks_where_they_are_within_the_grace() -> None:
    actions = training().on_stop_request("SIGTERM")
    assert told(actions) == [Tell("prepare_save")]
    assert Bound("grace", 25.0) in actions
    assert not kills(actions)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_first_answer_k_fixes_the_save_at_k_plus_one(first: int) -> None:
    life = training(3)
    life.on_stop_request("SIGTERM")
    assert told(life.on_message(first, {"kind": "at_step", "step": 9})) == [Tell("save_at", {"step": 10})]
    assert life.save_at == 10


@pytest.mark.parametrize("late", [8, 9, 10])
def test_later_answers_change_nothing(late: int) -> None:
    life = training()
    life.on_stop_request("SIGTERM")
    life.on_message(0, {"kind": "at_step", "step": 9})
    assert life.on_message(1, {"kind": "at_step", "step": late}) == []
    assert life.save_at == 10


def test_an_answer_that_nobody_asked_for_is_ignored() -> None:
    life = training()
    assert life.on_message(0, {"kind": "at_step", "step": 9}) == []
    assert life.save_at is None


def test_every_rank_saved_at_the_agreed_step_and_left() -> None:
    life = training()
    life.on_stop_request("SIGTERM")
    life.on_message(1, {"kind": "at_step", "step": 5})
    for rank in range(2):
        life.on_message(rank, {"kind": "step", "step": 6, "samples": []})
        life.on_message(rank, {"kind": "stopped", "step": 6})
        assert not life.over
        assert life.on_exit(rank, clean()) == []
    assert life.over
    assert life.ending() is Ending.STOPPED
    assert life.reached_step == 6


def test_the_planned_end_reached_while_stopping_is_the_planned_end() -> None:
    life = training(step=9)
    life.on_stop_request("SIGTERM")
    life.on_message(0, {"kind": "at_step", "step": 9})
    for rank in range(2):
        life.on_message(rank, {"kind": "finished", "step": 10})
        life.on_exit(rank, clean())
    assert life.ending() is Ending.FINISHED


def test_the_save_is_bounded_by_the_grace() -> None:
    life = training()
    life.on_stop_request("SIGTERM")
    kill, bound = life.on_bound("grace")
    assert isinstance(kill, KillGroup)
    assert bound == Bound("killed", KILLED_WITHIN_S)
    assert "spot.grace_seconds" in kill.reason
    assert "25 s" in kill.reason
    for rank in range(2):
        life.on_exit(rank, KILLED)
    assert life.ending() is Ending.ABANDONED


def test_a_rank_that_outlives_sigkill_is_named_instead_of_waited_for() -> None:
    life = training()
    life.on_exit(0, KILLED)
    assert life.killing
    assert life.undead == ()
    assert list(life.on_bound("killed")) == []
    assert life.undead == (1,)
    assert not life.over


def test_one_rank_that_did_not_save_makes_the_stop_an_abandoned_one() -> None:
    life = training()
    life.on_stop_request("SIGTERM")
    life.on_message(0, {"kind": "at_step", "step": 5})
    life.on_message(0, {"kind": "stopped", "step": 6})
    life.on_exit(0, clean())
    life.on_bound("grace")
    life.on_exit(1, KILLED)
    assert life.ending() is Ending.ABANDONED


# -- how often was it asked --------------------------------------------------------------------------------------------

SIGTERM_TO_RANK = {"kind": "signal", "signal": int(signal.SIGTERM)}


@pytest.mark.parametrize("order", list(itertools.permutations(["agent", "rank 0", "rank 1"])))
def test_one_sigterm_to_every_process_counts_once(order: tuple[str, ...]) -> None:
    """Slurm and process groups signal agent and ranks alike, in any order."""
    life = training()
    answers = [
        life.on_stop_request("SIGTERM") if who == "agent" else life.on_message(int(who[-1]), SIGTERM_TO_RANK)
        for who in order
    ]
    assert told(answers[0]) == [Tell("prepare_save")]
    assert answers[1:] == [[], []]
    assert not life.killing


def test_a_signal_to_one_rank_alone_stops_the_run_in_order() -> None:
    life = training()
    assert told(life.on_message(1, SIGTERM_TO_RANK)) == [Tell("prepare_save")]
    assert life.stop_source == "SIGTERM to rank 1"


def test_signals_to_ranks_never_count_as_the_second_one() -> None:
    life = training()
    life.on_stop_request("SIGTERM")
    for _ in range(5):
        assert life.on_message(0, SIGTERM_TO_RANK) == []
    assert not life.killing


def test_a_second_signal_to_the_agent_ends_it_at_once() -> None:
    life = training()
    life.on_stop_request("SIGINT")
    assert kills(life.on_stop_request("SIGINT"))
    assert life.on_stop_request("SIGINT") == [], "and is carried out once"


def test_the_second_agent_signal_counts_after_one_that_came_through_a_rank() -> None:
    life = training()
    life.on_message(0, SIGTERM_TO_RANK)
    assert life.on_stop_request("SIGTERM") == []
    assert kills(life.on_stop_request("SIGTERM"))


def test_before_the_first_step_there_is_nothing_to_save() -> None:
    life = Lifecycle(range(2), grace_s=25.0)
    life.on_message(0, {"kind": "phase", "name": "loading the model"})
    actions = life.on_stop_request("SIGTERM")
    assert kills(actions)
    assert not told(actions)
    for rank in range(2):
        life.on_exit(rank, KILLED)
    assert life.ending() is Ending.ABANDONED


def test_one_rank_past_its_first_step_is_enough_to_agree() -> None:
    life = Lifecycle(range(2), grace_s=25.0)
    life.on_message(1, {"kind": "step", "step": 1, "samples": []})
    assert told(life.on_stop_request("SIGTERM")) == [Tell("prepare_save")]


def test_an_unknown_signal_number_is_told_as_a_number() -> None:
    life = training()
    life.on_message(0, {"kind": "signal", "signal": 63})
    assert life.stop_source == "signal 63 to rank 0"


# -- failures ----------------------------------------------------------------------------------------------------------


def test_after_an_exception_the_others_get_a_moment_for_their_own_words() -> None:
    life = training()
    (bound,) = life.on_exit(1, failed())
    assert isinstance(bound, Bound)
    assert (bound.name, bound.seconds > 0) == ("settled", True)
    assert not life.killing
    assert kills(life.on_bound("settled"))
    assert life.first_failure is life.ranks[1]


def test_after_a_kill_the_others_have_nothing_to_add() -> None:
    life = training()
    assert kills(life.on_exit(0, struck()))
    life.on_exit(1, KILLED)
    assert life.ending() is Ending.FAILED
    assert life.first_failure is life.ranks[0]


def test_the_first_failure_stays_the_first() -> None:
    life = training(3)
    life.on_exit(2, failed())
    life.on_exit(0, failed(2))
    assert life.first_failure is life.ranks[2]


def test_the_group_is_killed_once() -> None:
    life = training(3)
    assert kills(life.on_exit(0, struck()))
    assert life.on_exit(1, struck()) == []
    assert life.on_bound("settled") == []


def test_all_ranks_that_raise_end_without_a_kill() -> None:
    life = training()
    life.on_exit(0, failed())
    assert not kills(life.on_exit(1, failed()))
    assert life.over
    assert life.ending() is Ending.FAILED


@pytest.mark.parametrize("exit_", [failed(), struck(), clean()])
def test_a_rank_that_ends_otherwise_while_stopping_ends_the_rest(exit_: RankExit) -> None:
    """Without it no rank could reach the agreed step: waiting for the grace would be lost time."""
    life = training()
    life.on_stop_request("SIGTERM")
    life.on_message(0, {"kind": "at_step", "step": 5})
    assert kills(life.on_exit(0, exit_))
    life.on_exit(1, KILLED)
    assert life.ending() is Ending.ABANDONED


def test_a_failure_that_came_before_the_stop_is_still_a_failure() -> None:
    """The job's own fault is told even when the machine is taken away while the others settle."""
    life = training()
    life.on_exit(0, failed())
    life.on_stop_request("SIGTERM")
    life.on_bound("settled")
    life.on_exit(1, KILLED)
    assert life.ending() is Ending.FAILED


# -- the end -----------------------------------------------------------------------------------------------------------


def test_finished_needs_every_ranks_word_and_exit() -> None:
    life = training()
    for rank in range(2):
        life.on_message(rank, {"kind": "finished", "step": 10})
    assert not life.over
    life.on_exit(0, clean())
    assert not life.over
    life.on_exit(1, clean())
    assert life.over
    assert life.ending() is Ending.FINISHED


def test_status_0_without_the_trainers_word_is_a_failure() -> None:
    """`sys.exit(0)` somewhere in a library must not look like success."""
    life = training(1)
    life.on_exit(0, clean())
    assert life.over
    assert life.ending() is Ending.FAILED


def test_one_silent_clean_exit_among_finished_ranks_is_a_failure() -> None:
    life = training()
    life.on_message(0, {"kind": "finished", "step": 10})
    assert life.on_exit(0, clean()) == []
    assert life.on_exit(1, clean()) != []
    assert life.ending() is Ending.FAILED


@pytest.mark.parametrize("exit_", [failed(), struck(signal.SIGSEGV)])
def test_a_crash_after_the_last_word_is_no_success(exit_: RankExit) -> None:
    life = training(1)
    life.on_message(0, {"kind": "finished", "step": 10})
    life.on_exit(0, exit_)
    assert life.ending() is Ending.FAILED


def test_reached_step_is_the_highest_of_any_rank() -> None:
    life = training(2, step=5)
    life.on_message(1, {"kind": "step", "step": 6, "samples": []})
    assert life.reached_step == 6


# -- with other nodes --------------------------------------------------------------------------------------------------


def among_others() -> Lifecycle:
    life = Lifecycle(range(2, 4), grace_s=25.0, alone=False)
    for rank in (2, 3):
        life.on_message(rank, {"kind": "step", "step": 5, "samples": []})
    return life


def test_what_all_nodes_have_to_agree_on_is_passed_on() -> None:
    life = among_others()
    assert life.on_message(3, {"kind": "signal", "signal": signal.SIGTERM}) == [StopAsked("SIGTERM to rank 3")]
    assert life.on_message(2, {"kind": "at_step", "step": 6}) == []  # nobody has asked
    assert life.prepare_save("n1 has to go") == [Tell("prepare_save")]
    assert life.prepare_save("n1 has to go") == []
    assert life.on_message(2, {"kind": "at_step", "step": 6}) == [WaitsAt(6)]
    assert life.agree_on_save(7) == [Tell("save_at", {"step": 7})]
    assert life.agree_on_save(7) == []


def test_ranks_that_saved_for_others_have_stopped_as_asked() -> None:
    life = among_others()
    life.prepare_save("n1 has to go")
    life.agree_on_save(7)
    for rank in (2, 3):
        life.on_message(rank, {"kind": "stopped", "step": 7})
        life.on_exit(rank, clean())
    assert life.ending() is Ending.STOPPED


def test_a_rank_that_fails_in_a_save_with_others_has_failed() -> None:
    life = among_others()
    life.prepare_save("n1 wants to join")
    assert kills(life.on_exit(2, failed()))
    life.on_exit(3, KILLED)
    assert life.ending() is Ending.FAILED


def test_ranks_that_are_withdrawn_have_not_failed() -> None:
    life = among_others()
    assert kills(life.withdraw("lost n0"))
    for rank in (2, 3):
        life.on_exit(rank, KILLED)
    assert life.ending() is Ending.WITHDRAWN


# -- hangs -------------------------------------------------------------------------------------------------------------


def test_ranks_that_hang_are_ended_and_the_one_that_is_behind_has_failed() -> None:
    life = training()
    assert kills(life.on_hang(1))
    for rank in (0, 1):
        life.on_exit(rank, KILLED)
    assert life.first_failure is life.ranks[1]
    assert life.ending() is Ending.FAILED
    assert life.on_hang(0) == []


def test_a_hang_that_comes_after_a_failure_changes_nothing() -> None:
    life = training()
    life.on_exit(0, failed())
    assert life.on_hang(1) == []
    assert life.first_failure is life.ranks[0]
