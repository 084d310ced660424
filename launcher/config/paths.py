"""Paths in job.yaml: `~` and variables expanded, relative ones taken from the folder of job.yaml.

Variables are expanded in paths only; everywhere else `$` is a character like any other.
"""

import glob
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launcher.config.mistakes import KeyPath, Mistake

PACKAGE_PREFIX = "package:"
_PATH_KEYS: tuple[KeyPath, ...] = (
    ("output_dir",),
    ("model", "path"),
    ("data", "train"),
    ("data", "eval"),
    ("deepspeed",),
    ("deepspeed", "config"),
    ("cluster", "hostfile"),
)
_VARIABLE = re.compile(r"\$(?:(?P<bare>[A-Za-z_]\w*)|\{(?P<braced>[^}]*)\})")
_NAME = re.compile(r"[A-Za-z_]\w*")


class _VariableError(ValueError):
    """A variable of a path that cannot be expanded; the message continues the sentence "<key> ..."."""


def looks_like_path(text: str) -> bool:
    """Whether `model.path` means a folder here (`/`, `./`, `../`, `~`), not a hub id or `package:NAME`."""
    return text.startswith(("/", "./", "../", "~")) or text in (".", "..")


def resolve_paths(
    data: Mapping[str, Any], folder: Path, environ: Mapping[str, str]
) -> tuple[dict[str, Any], list[Mistake]]:
    """A copy of the given settings in which every path is absolute, and what is wrong with its variables.

    Hub ids and `package:NAME` stay as they are; values that are not text are left for the type checks.
    """
    resolved: dict[str, Any] = dict(data)
    mistakes: list[Mistake] = []

    def resolve(text: str, key: KeyPath) -> str:
        try:
            expanded = _expand(text, environ)
        except _VariableError as error:
            remedy = "set the variable where ftlaunch starts, or write the path in full"
            mistakes.append(Mistake(key, str(error), found=text, remedy=remedy))
            return text
        if not expanded.strip() or (key == ("model", "path") and not looks_like_path(expanded)):
            return expanded
        return _absolute(expanded, folder)

    for key in _PATH_KEYS:
        _replace(resolved, key, resolve)
    return resolved, mistakes


def _replace(data: dict[str, Any], key: KeyPath, resolve: Callable[[str, KeyPath], str]) -> None:
    for part in key[:-1]:
        below = data.get(str(part))
        if not isinstance(below, dict):
            return
        data[str(part)] = data = dict(below)
    name = str(key[-1])
    value = data.get(name)
    if isinstance(value, str):
        data[name] = resolve(value, key)
    elif isinstance(value, list):
        data[name] = [resolve(v, (*key, i)) if isinstance(v, str) else v for i, v in enumerate(value)]


def _absolute(text: str, folder: Path) -> str:
    if os.path.isabs(text):
        return os.path.normpath(text)
    base = glob.escape(str(folder)) if glob.has_magic(text) else str(folder)
    return os.path.normpath(os.path.join(base, text))


def _expand(text: str, environ: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match["bare"] or match["braced"] or ""
        if not _NAME.fullmatch(name):
            raise _VariableError(f"has {match.group()}, but only a plain ${{NAME}} is expanded")
        if name not in environ:
            raise _VariableError(f"uses the environment variable {name}, which is not set")
        if not environ[name]:
            raise _VariableError(f"uses the environment variable {name}, which is empty")
        return environ[name]

    text = _VARIABLE.sub(value, text)
    if text == "~" or text.startswith("~/"):
        return environ.get("HOME", os.path.expanduser("~")) + text[1:]
    return os.path.expanduser(text) if text.startswith("~") else text
