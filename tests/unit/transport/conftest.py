from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.transport.agents import Agents


@pytest.fixture
def agents() -> Iterator[Agents]:
    agents = Agents()
    yield agents
    agents.close()
