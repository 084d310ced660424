"""Real nodes from network namespaces. Skipped, with the reason, where there is no root or a tool is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import TestCluster, why_no_cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    reason = why_no_cluster() if ours else None
    for item in ours:
        item.add_marker(pytest.mark.root)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def two_nodes() -> Iterator[TestCluster]:
    with TestCluster(2) as cluster:
        yield cluster


@pytest.fixture
def four_nodes() -> Iterator[TestCluster]:
    with TestCluster(4, ssh=False) as cluster:
        yield cluster


@pytest.fixture
def two() -> Iterator[TestCluster]:
    """Two nodes without ssh."""
    with TestCluster(2, ssh=False) as cluster:
        yield cluster


@pytest.fixture
def three() -> Iterator[TestCluster]:
    with TestCluster(3, ssh=False) as cluster:
        yield cluster
