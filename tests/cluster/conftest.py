"""Real nodes from network namespaces. Skipped, with the reason, where there is no root or a tool is missing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import TestCluster, why_no_cluster
from tests.fault import tiny_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    reason = why_no_cluster() if ours else None
    missing = [name for name in ("torch", "deepspeed", "transformers", "peft") if not importlib.util.find_spec(name)]
    for item in ours:
        item.add_marker(pytest.mark.root)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif "tiny" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
            if missing:
                item.add_marker(pytest.mark.skip(reason=f"the training stack is not installed: {', '.join(missing)}"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `model/`, `train.jsonl` and `eval.jsonl`."""
    folder = tmp_path_factory.mktemp("tiny")
    subprocess.run([sys.executable, str(tiny_model.__file__), str(folder)], check=True, timeout=180)
    return folder


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
