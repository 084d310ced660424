"""Every file in `wrong/` has one right message, kept beside it.

`pytest tests/unit/config --update-golden` writes the messages; read the difference before you commit it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.config.inputs import check_inputs
from launcher.config.load import load_job
from launcher.errors import ExitCode, UserError

WRONG = Path(__file__).parent / "wrong"
CASES = sorted(path.stem for path in WRONG.glob("*.yaml"))


@pytest.mark.parametrize("name", CASES)
def test_message(name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.chdir(WRONG)
    with pytest.raises(UserError) as caught:
        check_inputs(load_job(Path(f"{name}.yaml"), [], {}), write=False)
    message = str(caught.value).replace(f"{WRONG}/", "") + "\n"
    golden = WRONG / f"{name}.txt"
    if request.config.getoption("--update-golden", default=False):
        golden.write_text(message, "utf-8")
    assert message == golden.read_text("utf-8")
    assert caught.value.exit_code == ExitCode.WRONG_INPUT


@pytest.mark.parametrize("name", CASES)
def test_message_can_be_acted_on(name: str) -> None:
    message = (WRONG / f"{name}.txt").read_text("utf-8")
    assert f"{name}.yaml" in message, "it names the file"
    assert "not_to_be_shown" not in message
    assert "hf_secret" not in message
    assert "pydantic" not in message
    assert "Traceback" not in message


def test_no_golden_message_without_its_file() -> None:
    assert sorted(path.stem for path in WRONG.glob("*.txt")) == CASES
