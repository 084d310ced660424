"""Takes secrets out of texts and environments before they reach a log, an event or a bundle.

Errs on the side of hiding: a name that sounds like a secret hides its value whatever the value is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "[redacted]"

_SECRET_WORDS = (
    r"TOKENS?|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|PASS|PWD|CREDENTIALS?|AUTH|AUTHORIZATION|COOKIE|SIGNATURE|"
    r"(?:API|ACCESS|PRIVATE|SECRET|ENCRYPTION|SSH|ACCOUNT|STORAGE|SERVICE|SIGNING)?_?KEY(?:_?ID)?|"
    r"ACCESS_?KEY(?:_?(?:ID|SECRET))?|DSN|CONNECTION_?STRING|WEBHOOK"
)
_SECRET_NAME = re.compile(rf"(?:^|[_.\-])(?:{_SECRET_WORDS})(?:$|[_.\-])|APIKEY|ACCESSKEY|SECRETKEY|AUTHTOKEN", re.I)
# Names which sound like secrets and are not: hiding them would take the evidence away.
_PLAIN_NAME = re.compile(
    r"^(?:PWD|OLDPWD|TOKENIZERS_PARALLELISM|SSH_AUTH_SOCK|HF_HUB_DISABLE_IMPLICIT_TOKEN|XAUTHORITY)$"
    r"|(?:^|_)(?:NUM|MAX|MIN|TOTAL)_.*TOKENS?$|(?:PAD|EOS|BOS|UNK|SEP|CLS|MASK)_TOKEN(?:_ID)?$",
    re.I,
)

_VALUE = r"""(?:"[^"\n]*"|'[^'\n]*'|[^\s,;&"')}\]]+)"""
_PEM = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY[A-Z ]*-----.*?(?:-----END [A-Z ]*PRIVATE KEY[A-Z ]*-----|\Z)", re.S),
    # Of a log's end: the key's beginning is not there.
    re.compile(r"(?:^[A-Za-z0-9+/=]{16,80}\n)+-----END [A-Z ]*PRIVATE KEY[A-Z ]*-----", re.M),
)
_REPLACEMENTS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\b([a-z][a-z0-9+.\-]{0,20}://)[^\s/@'\"]{1,400}@", re.I), rf"\1{HIDDEN}@"),
    (re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=\-]{6,}", re.I), rf"\1 {HIDDEN}"),
    (re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{8,}"), HIDDEN),
    (re.compile(r"\b(?:sk|pk|rk)-[A-Za-z0-9_\-]{8,}"), HIDDEN),
    (re.compile(r"\b(?:LTAI|STS\.|CAIS)[A-Za-z0-9+/=]{8,}"), HIDDEN),
    (re.compile(r"\b(?:wandb_v\d_|nvapi-|npm_|pypi-|dckr_pat_)[A-Za-z0-9_\-]{8,}"), HIDDEN),
    (re.compile(r"(\bwandb login(?: --?\w+)*\s+)[A-Za-z0-9_]{8,}"), rf"\1{HIDDEN}"),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}"), HIDDEN),
    (re.compile(r"\b(?:gh[pousr]_|github_pat_|glpat-|xox[abprs]-|ya29\.|AIza)[A-Za-z0-9_\-]{8,}"), HIDDEN),
    (re.compile(r"\beyJ[A-Za-z0-9_\-]{5,}\.[A-Za-z0-9_\-]{5,}\.[A-Za-z0-9_\-]*"), HIDDEN),
)
_ASSIGNED = re.compile(
    rf"(?<![\w.\-])(?P<name>[A-Za-z][\w.\-]{{0,80}})(?P<sep>['\"]?\s{{0,8}}[=:]\s{{0,8}})(?P<value>{_VALUE})"
)
# A line without one of these (in small letters) holds no secret that is known here: the expressions above are slow.
_MARKS = (
    *("token", "secret", "pass", "pwd", "credential", "auth", "cookie", "signature", "key", "dsn", "string", "webhook"),
    *("://", "bearer", "basic", "hf_", "api_org_", "sk-", "pk-", "rk-", "ltai", "sts.", "cais", "wandb", "nvapi-"),
    *("npm_", "pypi-", "dckr_pat_", "akia", "asia", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-"),
    *("xox", "ya29.", "aiza", "eyj"),
)
_MIN_VALUE_CHARS = 8  # a shorter value of an environment variable is a word that logs are full of
_OPTION = re.compile(rf"(?<!\S)(?P<name>--?[A-Za-z][\w\-]{{0,80}})(?P<sep>\s{{1,8}})(?P<value>{_VALUE})")


def is_secret_name(name: str) -> bool:
    return bool(_SECRET_NAME.search(name)) and not _PLAIN_NAME.search(name)


def redact_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment, sorted, with secret values hidden and every other value passed through `redact_text`."""
    return {name: HIDDEN if is_secret_name(name) else redact_text(environ[name]) for name in sorted(environ)}


def redact_text(text: str) -> str:
    """The text without tokens, keys, passwords and credentials in URLs; line structure is kept."""
    if "PRIVATE KEY" in text:
        for pattern in _PEM:
            text = pattern.sub(HIDDEN, text)
    small = text.lower()
    marks = [mark for mark in _MARKS if mark in small]
    if not marks:
        return text
    return "\n".join(_redact_line(line) if _has_one(marks, line.lower()) else line for line in text.split("\n"))


def redact_document(value: Any) -> Any:
    """Every string of a document through `redact_text`, and named secrets hidden, however deep they sit."""
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Mapping):
        flat = redact_environ({str(k): v for k, v in value.items() if isinstance(v, str)})
        return {str(k): flat[str(k)] if isinstance(v, str) else redact_document(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_document(item) for item in value]
    return value


def secret_values(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The values of variables that sound like secrets, to be hidden wherever they turn up; the longest first."""
    values = {value for name, value in environ.items() if is_secret_name(name) and _is_telling(value)}
    return tuple(sorted(values, key=len, reverse=True))


def _is_telling(value: str) -> bool:
    return len(value) >= _MIN_VALUE_CHARS and not re.fullmatch(r"[\d.]+|[A-Za-z]+|[\w.\-]*/[\w./\-]*", value)


def hide_values(text: str, values: Sequence[str]) -> str:
    for value in values:
        text = text.replace(value, HIDDEN)
    return text


def _has_one(marks: Sequence[str], line: str) -> bool:
    return any(mark in line for mark in marks)


def _redact_line(line: str) -> str:
    for pattern, replacement in _REPLACEMENTS:
        line = pattern.sub(replacement, line)
    for pattern in (_ASSIGNED, _OPTION):
        line = _hide_named(pattern, line)
    return line


def _hide_named(pattern: re.Pattern[str], line: str) -> str:
    """Hides `name=value`, `name: value` and `--name value` by the name. What follows another name is looked at, too: in
    `path: /x?token=...` the secret is inside the value."""
    parts: list[str] = []
    done = at = 0
    while found := pattern.search(line, at):
        if not _is_to_hide(found["name"], found["value"]):
            at = found.end("sep")
            continue
        quote = found["value"][0] if found["value"][0] in "'\"" else ""
        parts.append(f"{line[done : found.start('value')]}{quote}{HIDDEN}{quote}")
        done = at = found.end()
    return "".join([*parts, line[done:]])


def _is_to_hide(name: str, value: str) -> bool:
    """A bare number is a count."""
    bare = value.strip("'\"")
    is_plain = HIDDEN[:-1] in value or len(bare) < 4 or re.fullmatch(r"[\d.]+", bare)
    return not is_plain and is_secret_name(name)
