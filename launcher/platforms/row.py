"""One row of the table, and how a row is read: names of variables for each thing that is wanted.

Most platforms need nothing but names (`read_names`). The others have a reader in `readers.py` that may refuse what it
cannot tell with certainty.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from launcher.errors import UserError
from launcher.platforms.place import Nodes, Place, Sight, show_environ


class Certainty(Enum):
    """How sure the meaning of the variables is. None of it was tried on the platform itself."""

    SOURCE = "source"  # read in the platform's source or its own documents
    USE = "use"  # seen in public scripts or dumps that use it
    HEARSAY = "hearsay"  # general knowledge, in no document seen


@dataclass(frozen=True)
class Sign:
    """A variable that must be there; with `value`, a regular expression that its whole value must match."""

    name: str
    value: str | None = None

    def is_in(self, environ: Mapping[str, str]) -> bool:
        text = environ.get(self.name)
        return text is not None and (self.value is None or re.fullmatch(self.value, text) is not None)


@dataclass(frozen=True)
class Platform:
    """A platform is recognised by all of `all_of`, one of `any_of` (where given) and none of `unless`.

    `num_nodes` to `master_port` name the variables to read, the first that is set wins. `also`: further variables that
    the reader looks at. `counts`, `source`, `certainty` and `note` are for people: docs/platforms.md is made of them.
    """

    name: str
    source: str
    certainty: Certainty
    all_of: tuple[Sign, ...] = ()
    any_of: tuple[Sign, ...] = ()
    unless: tuple[str, ...] = ()
    num_nodes: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    num_ranks: tuple[str, ...] = ()
    master_addr: tuple[str, ...] = ()
    master_port: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    read: Callable[[Platform, Sight], Place] | None = None
    note: str = ""

    def is_here(self, environ: Mapping[str, str]) -> bool:
        return (
            all(sign.is_in(environ) for sign in self.all_of)
            and (not self.any_of or any(sign.is_in(environ) for sign in self.any_of))
            and not any(name in environ for name in self.unless)
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Every variable that this row looks at, signs first."""
        signs = tuple(sign.name for sign in (*self.all_of, *self.any_of))
        values = (*self.num_nodes, *self.node_rank, *self.num_ranks, *self.master_addr, *self.master_port, *self.hosts)
        return tuple(dict.fromkeys((*signs, *values, *self.also)))

    def evidence(self, environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
        return tuple((name, environ[name]) for name in self.names if name in environ)

    def place(self, sight: Sight) -> Place:
        return (self.read or read_names)(self, sight)


def read_names(row: Platform, sight: Sight) -> Place:
    """All from the variables that the row names. Raises UserError where the node's index is needed and missing."""
    environ = sight.environ
    num_nodes = nodes_in(environ, row.num_nodes) or 1
    return Place(
        platform=row.name,
        num_nodes=num_nodes,
        node_rank=rank_in(environ, row, num_nodes),
        num_ranks_per_node=ranks_in(environ, row.num_ranks),
        master_addr=first_in(environ, row.master_addr),
        master_port=number_in(environ, row.master_port),
        evidence=row.evidence(environ),
    )


def first_in(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)


def number_in(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """The first of these variables that is set, as a number. Raises UserError with its name where it is none."""
    name = next((name for name in names if name in environ), None)
    if name is None:
        return None
    return _number(name, environ[name], environ[name])


def nodes_in(environ: Mapping[str, str], names: tuple[str, ...]) -> Nodes | None:
    """The same for a number of nodes, which may be `MIN:MAX`."""
    name = next((name for name in names if name in environ), None)
    if name is None:
        return None
    text = environ[name]
    fewest, colon, most = text.partition(":")
    if not colon:
        num_nodes = _number(name, text, text)
        if num_nodes < 1:
            raise UserError(f"the platform's variable {name} is {text!r}; at least one node is expected")
        return num_nodes
    low, high = _number(name, text, fewest), _number(name, text, most)
    if not 1 <= low <= high:
        raise UserError(f"the platform's variable {name} is {text!r}; MIN:MAX with 1 <= MIN <= MAX is expected")
    return low if low == high else (low, high)


def rank_in(environ: Mapping[str, str], row: Platform, num_nodes: Nodes) -> int:
    """This node's index; 0 where it is the only one and nobody says."""
    rank = number_in(environ, row.node_rank)
    if rank is not None:
        return rank
    if num_nodes == 1:
        return 0
    raise UserError(
        f"{row.name} ({show_environ(environ, *row.names)}): there are several nodes, but "
        f"{' or '.join(row.node_rank)}, which says which of them this is, is not set"
    )


def ranks_in(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """Ranks of a node. None for 0 (a node without GPUs) and for words like `auto`: then they are counted here."""
    text = first_in(environ, names)
    return int(text) if text and text.isascii() and text.isdigit() and int(text) > 0 else None


def _number(name: str, whole: str, part: str) -> int:
    if not (part.isascii() and part.isdigit()):
        raise UserError(f"the platform's variable {name} is {whole!r}; a number is expected")
    return int(part)
