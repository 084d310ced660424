"""job.yaml, `FTLAUNCH_SET` and `--set` become one configuration in which every value has an origin.

Invariant: either the whole configuration is right, or one UserError names everything that is wrong with it.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from launcher.config.contradictions import find_contradictions
from launcher.config.document import read_document
from launcher.config.explain import explain
from launcher.config.mistakes import KeyPath, Mistake, dotted, render
from launcher.config.models import JobConfig
from launcher.config.overrides import Given, Origin, apply_overrides
from launcher.config.paths import resolve_paths
from launcher.errors import UserError

__all__ = ["LoadedJob", "Origin", "load_job"]


@dataclass(frozen=True)
class LoadedJob:
    """A configuration with its provenance.

    `path` is absolute; `origin` has an entry for every key of the resolved configuration (`lora.r`); `text` is the file
    as it was read; `sha` identifies the resolved configuration (16 hex digits).
    """

    config: JobConfig
    path: Path
    origin: dict[str, Origin]
    text: str
    sha: str

    def place(self, key: str) -> str:
        """Where a dotted key was given, for messages: `/x/job.yaml:4`, `--set` or `FTLAUNCH_SET`; else the file."""
        return _place(self.origin.get(key, Origin("default")), self.path)


def load_job(path: Path | None, overrides: Sequence[str], environ: Mapping[str, str]) -> LoadedJob:
    """Read and check a job. Raises UserError with every mistake at once: its place, what is accepted, the way out."""
    if path is None:
        raise UserError(_no_path_message())
    document = read_document(path)
    given = _numbers_in_env_as_written(apply_overrides(document, overrides, environ))
    resolved, path_mistakes = resolve_paths(given.data, path.absolute().parent, environ)
    config, value_mistakes = _validate(resolved, given.data)
    mistakes = [*given.mistakes, *path_mistakes, *value_mistakes]
    if config is None or mistakes:
        mistakes.sort(key=lambda mistake: given.origin(mistake.key).line or 0)
        raise UserError(render(mistakes, lambda key: _place(given.origin(key), path)))
    settings = config.model_dump(mode="json")
    return LoadedJob(config, path.absolute(), _origins(settings, given), document.text, _sha(settings))


def _validate(resolved: dict[str, Any], given: Mapping[str, Any]) -> tuple[JobConfig | None, list[Mistake]]:
    try:
        return JobConfig.model_validate(resolved), []
    except ValidationError as error:
        mistakes = explain(error, given)
    known = {mistake.key for mistake in mistakes}
    contradictions = (mistake for mistake in find_contradictions(given) if mistake.key not in known)
    return None, [*mistakes, *contradictions]


def _numbers_in_env_as_written(given: Given) -> Given:
    """`env: {VERSION: 1.10}` means the text 1.10, not the number 1.1."""
    env = given.data.get("env")
    if not isinstance(env, dict):
        return given
    texts = {name: given.number_texts[("env", name)] for name in env if ("env", name) in given.number_texts}
    return Given({**given.data, "env": {**env, **texts}}, given.origins, given.number_texts, given.mistakes)


def _place(origin: Origin, path: Path) -> str:
    if origin.kind in ("--set", "FTLAUNCH_SET"):
        return origin.kind
    return f"{path}:{origin.line}" if origin.line is not None else str(path)


def _origins(settings: Mapping[str, Any], given: Given) -> dict[str, Origin]:
    default = Origin("default")
    return {dotted(key): given.origin(key) if _is_given(key, given.data) else default for key in _leaves(settings, ())}


def _leaves(settings: Mapping[str, Any], above: KeyPath) -> Iterator[KeyPath]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name)


def _is_given(key: KeyPath, data: object) -> bool:
    for part in key:
        if not isinstance(data, Mapping):
            return True  # a short form: the value above stands for the whole section
        if part not in data:
            return False
        data = data[part]
    return True


def _sha(settings: Mapping[str, Any]) -> str:
    canonical = json.dumps(settings, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _no_path_message() -> str:
    here = sorted(entry.name for entry in Path().glob("*.y*ml"))
    found = f" In this folder: {', '.join(here[:5])}." if here else ""
    return f"No job file was given. Write: ftlaunch --config {here[0] if len(here) == 1 else 'job.yaml'}{found}"
