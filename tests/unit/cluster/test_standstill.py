"""Whether all nodes stand still, as their leader hears it."""

from __future__ import annotations

from launcher.cluster.codec import message_from_json, message_to_json
from launcher.cluster.messages import Standstill
from launcher.cluster.model import Node
from launcher.cluster.standstill import RECENT_S, LeadersStandstill
from launcher.progress_record import Phase, Place, RankProgress


def said(name: str, rank: int, generation: int = 3) -> Standstill:
    progress = RankProgress(rank, name, Phase.TRAINING, Place.INSIDE, 8, 1, 0, 412, "all_reduce", 7, 3.5, "S", 0.5, 0.6)
    return Standstill(Node(name, f"{name}:1", 1, "x"), 3, generation, (progress,))


def test_nothing_is_found_before_every_node_has_said_so_lately() -> None:
    leaders = LeadersStandstill(3, ["n0", "n1"])
    assert not leaders.hear("n0", said("n0", 0), 10.0)
    assert not leaders.hear("n1", said("n1", 1, generation=2), 10.5)
    assert not leaders.hear("n2", said("n2", 2), 10.5)
    # What n0 has said is too old by now: its ranks may have gone on.
    assert not leaders.hear("n1", said("n1", 1), 10.5 + RECENT_S)
    ranks = leaders.hear("n0", said("n0", 0), 11.0 + RECENT_S)
    assert sorted(rank.rank for rank in ranks) == [0, 1]
    assert not leaders.hear("n1", said("n1", 1), 11.5 + RECENT_S), "told once; then all have to say it again"


def test_records_travel_unchanged() -> None:
    message = said("n1", 1)
    assert message_from_json(message_to_json(message)) == message


def test_of_very_many_ranks_the_ones_that_matter_are_told() -> None:
    leaders = LeadersStandstill(3, ["n0"])
    many = said("n0", 0)
    behind = many.ranks[0]
    others = [said("n0", rank).ranks[0] for rank in range(1, 2000)]
    from dataclasses import replace

    ranks = leaders.hear("n0", replace(many, ranks=(*others, replace(behind, collectives=411))), 1.0)
    assert len(ranks) < 300
    assert ranks[0].rank == 0
