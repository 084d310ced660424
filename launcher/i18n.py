"""Texts for people in English and Chinese; the reader's language is FTLAUNCH_LANG, else the locale's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple


def language(environ: Mapping[str, str] | None = None) -> str:
    """`"zh"` or `"en"`, from FTLAUNCH_LANG, else LC_ALL, LC_MESSAGES, LANG (the order of POSIX locales)."""
    env = os.environ if environ is None else environ
    for name in ("FTLAUNCH_LANG", "LC_ALL", "LC_MESSAGES", "LANG"):
        value = env.get(name, "")
        if value:
            return "zh" if value.lower().startswith("zh") else "en"
    return "en"


class Text(NamedTuple):
    """One sentence in both languages. Formatting fills both, so that the choice can be made at the very end."""

    en: str
    zh: str

    def format(self, **values: object) -> Text:
        return Text(self.en.format(**values), self.zh.format(**values))

    def pick(self, environ: Mapping[str, str] | None = None) -> str:
        return self.zh if language(environ) == "zh" else self.en
