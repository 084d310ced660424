"""GPUs without GPUs. A test folder's conftest takes the fixture: `from tests.nvml import nvml_folder`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nvml.build import build, find_compiler


@pytest.fixture(scope="session")
def nvml_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stand-in library, for `tests.nvml.build.with_cards`."""
    if find_compiler() is None:
        pytest.skip("needs a C compiler for the NVML stand-in")
    return build(tmp_path_factory.mktemp("nvml"))
