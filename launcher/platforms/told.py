"""The place of a node whose agent was started from another machine: what the head has found is told, not found again.

The head writes it into `FTLAUNCH_NODE` of the agent's environment; the agent's ranks do not get it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace

from launcher.errors import UserError
from launcher.platforms.place import Place

NODE_VARIABLE = "FTLAUNCH_NODE"


def tell_place(place: Place, node_rank: int) -> str:
    """The value of `FTLAUNCH_NODE` for one node."""
    return json.dumps(asdict(replace(place, node_rank=node_rank)), separators=(",", ":"))


def told_place(environ: Mapping[str, str]) -> Place | None:
    """None where nobody has told. Raises UserError for a value that no head has written."""
    text = environ.get(NODE_VARIABLE)
    if text is None:
        return None
    try:
        fields = json.loads(text)
        nodes = fields["num_nodes"]
        place = Place(
            **{
                **fields,
                "num_nodes": (int(nodes[0]), int(nodes[1])) if isinstance(nodes, list) else int(nodes),
                "node_rank": int(fields["node_rank"]),
                "hosts": tuple(fields["hosts"]),
                "evidence": tuple((name, value) for name, value in fields["evidence"]),
            }
        )
    except (ValueError, KeyError, TypeError, IndexError):
        raise UserError(
            f"{NODE_VARIABLE} is set to something that ftlaunch has not written; it is how a head tells the agents "
            f"that it starts where they are. Unset it."
        ) from None
    return place
