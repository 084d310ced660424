"""Where each parameter's optimizer state lies in DeepSpeed's shards, for any number of ranks: arithmetic, no tensors.

DeepSpeed keeps fp32 weights and optimizer state of a group of parameters as one flat vector on each rank. How it is cut
depends on the ZeRO stage (`stage_1_and_2.py`, `stage3.py` of DeepSpeed 0.19):

- 1 and 2: the parameters of a group stand one after the other, the whole is padded to a multiple of `alignment x ranks`
  and cut into as many equal parts. A part may begin and end within a parameter.
- 3: every parameter by itself is padded to a multiple of the ranks and cut; a rank's vector holds its parts of all.

`transfers` says which stretches of old shards make up one new shard, by parameter name, so that neither the order nor
the grouping of parameters has to be the same on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Groups = Sequence[Mapping[str, int]]  # of each group: parameter name -> number of elements, in order


@dataclass(frozen=True)
class Piece:
    """`numel` elements of a parameter, from its element `param_start` on, lie in group `group` of shard `rank`, from
    element `start` on."""

    rank: int
    group: int
    start: int
    param_start: int
    numel: int


@dataclass(frozen=True)
class Transfer:
    """Copy `numel` elements: from shard `source.rank`, group `source.group`, `source.start` on; to `group`, `start`."""

    source: Piece
    group: int
    start: int


class ShardLayout(Protocol):
    """One way of cutting parameters into shards."""

    @property
    def groups(self) -> Groups: ...

    @property
    def world_size(self) -> int: ...

    def partition_numel(self, group: int) -> int:
        """Elements of one rank's vector of this group, padding included."""

    def pieces(self, group: int, name: str, start: int, stop: int) -> Iterator[Piece]:
        """Where elements `start` to `stop` of a parameter lie, in order."""

    def held_by(self, rank: int) -> Iterator[tuple[str, Piece]]:
        """(parameter, piece) of everything that is no padding in shard `rank`."""


@dataclass(frozen=True)
class FlatLayout:
    """ZeRO 1 and 2. `paddings`: elements left free after each parameter of each group (all 0 without
    `zero_optimization.parameter_alignment`)."""

    groups: Groups
    world_size: int
    alignment: int
    paddings: Sequence[Sequence[int]]
    _offsets: Sequence[Mapping[str, int]] = field(init=False, repr=False)
    _partitions: Sequence[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        offsets: list[dict[str, int]] = []
        partitions: list[int] = []
        for group, paddings in zip(self.groups, self.paddings, strict=True):
            offset, found = 0, {}
            for (name, numel), padding in zip(group.items(), paddings, strict=True):
                found[name] = offset
                offset += numel + padding
            offsets.append(found)
            multiple = self.alignment * self.world_size
            partitions.append(-(-offset // multiple) * multiple // self.world_size)
        object.__setattr__(self, "_offsets", offsets)
        object.__setattr__(self, "_partitions", partitions)

    def partition_numel(self, group: int) -> int:
        return self._partitions[group]

    def pieces(self, group: int, name: str, start: int, stop: int) -> Iterator[Piece]:
        partition, offset = self._partitions[group], self._offsets[group][name]
        while start < stop:
            rank, within = divmod(offset + start, partition)
            numel = min(stop - start, partition - within)
            yield Piece(rank, group, within, start, numel)
            start += numel

    def held_by(self, rank: int) -> Iterator[tuple[str, Piece]]:
        for group, parameters in enumerate(self.groups):
            first = rank * self._partitions[group]
            for name, numel in parameters.items():
                offset = self._offsets[group][name]
                start, stop = max(0, first - offset), min(numel, first + self._partitions[group] - offset)
                if start < stop:
                    yield name, Piece(rank, group, offset + start - first, start, stop - start)


@dataclass(frozen=True)
class PartitionedLayout:
    """ZeRO 3; `groups` are its sub-groups."""

    groups: Groups
    world_size: int
    _offsets: Sequence[Mapping[str, int]] = field(init=False, repr=False)
    _partitions: Sequence[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        offsets: list[dict[str, int]] = []
        partitions: list[int] = []
        for group in self.groups:
            offset, found = 0, {}
            for name, numel in group.items():
                found[name] = offset
                offset += self._share(numel)
            offsets.append(found)
            partitions.append(offset)
        object.__setattr__(self, "_offsets", offsets)
        object.__setattr__(self, "_partitions", partitions)

    def _share(self, numel: int) -> int:
        return -(-numel // self.world_size)

    def partition_numel(self, group: int) -> int:
        return self._partitions[group]

    def pieces(self, group: int, name: str, start: int, stop: int) -> Iterator[Piece]:
        share, offset = self._share(self.groups[group][name]), self._offsets[group][name]
        while start < stop:
            rank, within = divmod(start, share)
            numel = min(stop - start, share - within)
            yield Piece(rank, group, offset + within, start, numel)
            start += numel

    def held_by(self, rank: int) -> Iterator[tuple[str, Piece]]:
        for group, parameters in enumerate(self.groups):
            for name, numel in parameters.items():
                share = self._share(numel)
                start, stop = rank * share, min((rank + 1) * share, numel)
                if start < stop:
                    yield name, Piece(rank, group, self._offsets[group][name], start, stop - start)


class LayoutMismatch(ValueError):  # noqa: N818 - says what does not match
    """The two layouts are not of the same parameters."""


def transfers(old: ShardLayout, new: ShardLayout, rank: int) -> list[Transfer]:
    """What makes up shard `rank` of `new`, in order. Raises LayoutMismatch where the parameters are not the same."""
    where = {name: (group, numel) for group, parameters in enumerate(old.groups) for name, numel in parameters.items()}
    wanted = {name: numel for parameters in new.groups for name, numel in parameters.items()}
    differing = sorted(name for name in {*where, *wanted} if where.get(name, (0, None))[1] != wanted.get(name))
    if differing:
        name = differing[0]
        there = where[name][1] if name in where else "no"
        raise LayoutMismatch(
            f"{len(differing)} parameters are not those of the checkpoint, among them {name}: {there} elements there, "
            f"{wanted.get(name, 'no')} in the model"
        )
    return [
        Transfer(source, mine.group, mine.start + source.param_start - mine.param_start)
        for name, mine in new.held_by(rank)
        for source in old.pieces(where[name][0], name, mine.param_start, mine.param_start + mine.numel)
    ]
