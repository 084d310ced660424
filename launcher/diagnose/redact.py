"""Takes secrets out of texts and environments before they reach a log, an event or a bundle.

Errs on the side of hiding: a name that sounds like a secret hides its value whatever the value is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

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
_REPLACEMENTS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S), HIDDEN),
    (re.compile(r"\b([a-z][a-z0-9+.\-]{0,20}://)[^\s/@'\"]{1,400}@", re.I), rf"\1{HIDDEN}@"),
    (re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=\-]{6,}", re.I), rf"\1 {HIDDEN}"),
    (re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{8,}"), HIDDEN),
    (re.compile(r"\b(?:sk|pk|rk)-[A-Za-z0-9_\-]{8,}"), HIDDEN),
    (re.compile(r"\b(?:LTAI|STS\.)[A-Za-z0-9]{8,}"), HIDDEN),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}"), HIDDEN),
    (re.compile(r"\b(?:gh[pousr]_|github_pat_|glpat-|xox[abprs]-|ya29\.|AIza)[A-Za-z0-9_\-]{8,}"), HIDDEN),
    (re.compile(r"\beyJ[A-Za-z0-9_\-]{5,}\.[A-Za-z0-9_\-]{5,}\.[A-Za-z0-9_\-]*"), HIDDEN),
)
_ASSIGNED = re.compile(
    rf"(?<![\w.\-])(?P<name>[A-Za-z][\w.\-]{{0,80}})(?P<sep>['\"]?\s{{0,8}}[=:]\s{{0,8}})(?P<value>{_VALUE})"
)
_OPTION = re.compile(rf"(?<!\S)(?P<name>--?[A-Za-z][\w\-]{{0,80}})(?P<sep>\s{{1,8}})(?P<value>{_VALUE})")


def is_secret_name(name: str) -> bool:
    return bool(_SECRET_NAME.search(name)) and not _PLAIN_NAME.search(name)


def redact_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment, sorted, with secret values hidden and every other value passed through `redact_text`."""
    return {name: HIDDEN if is_secret_name(name) else redact_text(environ[name]) for name in sorted(environ)}


def redact_text(text: str) -> str:
    """The text without tokens, keys, passwords and credentials in URLs; line structure is kept."""
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    for pattern in (_ASSIGNED, _OPTION):
        text = pattern.sub(_hide_named, text)
    return text


def _hide_named(found: re.Match[str]) -> str:
    """Hides `name=value`, `name: value` and `--name value` by the name; a bare number is a count."""
    name, separator, value = found["name"], found["sep"], found["value"]
    bare = value.strip("'\"")
    if HIDDEN[:-1] in value or len(bare) < 4 or re.fullmatch(r"[\d.]+", bare) or not is_secret_name(name):
        return found[0]
    quote = value[0] if value[0] in "'\"" else ""
    return f"{name}{separator}{quote}{HIDDEN}{quote}"
