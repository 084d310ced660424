"""The YAML text as plain data, with the line of every key.

Invariant: what comes out is `dict`, `list`, `str`, `int`, `float`, `bool` and None only, has no key twice, and is
YAML 1.2: `1e-4` is a number, `yes` and `on` are text, `2:4` is text.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, ReusedAnchorWarning, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from launcher.config.mistakes import KeyPath, sounds_secret
from launcher.errors import UserError

_MAX_BYTES = 1 << 20
_MAX_NODES = 100_000
_EXAMPLE = "output_dir: runs/first\n    model: {path: Qwen/Qwen2.5-0.5B-Instruct}\n    data: {train: train.jsonl}"
_MERGE_TAG = "tag:yaml.org,2002:merge"
_MAPPING_TAG = "tag:yaml.org,2002:map"
_LIST_TAG = "tag:yaml.org,2002:seq"
_NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_PLAIN_TAGS = (*_NUMBER_TAGS, "tag:yaml.org,2002:bool", "tag:yaml.org,2002:null")
_TEXT_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value", _MERGE_TAG)
# Problems that YAML sees only lines later: the line where the construct began is the one to look at.
_SEEN_LATE = ("could not find expected ':'", "found unexpected end of stream", "expected ',' or")
_HINTS = (
    ("cannot start any token", "put the value in quotes"),
    ("mapping values are not allowed", "a value with ': ' in it needs quotes, or a line above is indented wrongly"),
    ("could not find expected ':'", "write a space after the colon, as in 'method: lora'"),
    ("did not find expected ',' or", "a '{' or '[' is not closed, or a comma is missing"),
    ("expected ',' or", "a '{' or '[' is not closed, or a comma is missing"),
    ("expected <block end>", "indent this line like its neighbours"),
    ("undefined alias", "define the anchor (&name) above the line that uses it (*name)"),
    ("found unexpected end of stream", "a quote that opens in this line is not closed"),
    ("but found another document", "keep one document: remove the second '---' and what follows"),
)


@dataclass(frozen=True)
class Document:
    """`lines` are 1-based; `number_texts` holds numbers as they were written (`1.10`), for places that want text."""

    path: Path
    text: str
    data: dict[str, Any]
    lines: dict[KeyPath, int]
    number_texts: dict[KeyPath, str]


def read_document(path: Path) -> Document:
    """Read a job file. Raises UserError with the place and the way out for everything that is not a YAML mapping."""
    text = _read_text(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReusedAnchorWarning)
            root = YAML(typ="safe", pure=True).compose(text)
    except RecursionError:
        raise UserError(f"{path}: is nested too deeply for a job file. Is it the data?") from None
    except MarkedYAMLError as error:
        raise UserError(_syntax_message(path, text, error)) from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position or 0) + 1
        raise UserError(f"{path}:{line}: holds a character that YAML does not allow ({error.reason}).") from None
    except YAMLError as error:
        raise UserError(f"{path}: is not YAML: {error}") from None
    if root is None or (isinstance(root, ScalarNode) and not root.value.strip()):
        raise UserError(f"{path}: is empty. The least that a job needs:\n    {_EXAMPLE}")
    if not isinstance(root, MappingNode):
        kind = "a list" if isinstance(root, SequenceNode) else "text"
        raise UserError(
            f"{path}:{root.start_mark.line + 1}: holds {kind}, not 'key: value' lines"
            f" (is there a space after each colon?). The least that a job needs:\n    {_EXAMPLE}"
        )
    reader = _Reader(path)
    data = reader.mapping(root, ())
    return Document(path, text, data, reader.lines, reader.number_texts)


def parse_override_value(text: str) -> Any:
    """The value in `--set key=value`: a flow list or mapping, a quoted text, or a scalar with its YAML type.

    Anything that YAML does not read as a number, a boolean or null stays the text that was typed. Raises ValueError
    when a list or mapping is malformed.
    """
    text = text.strip()
    if not text:
        return None
    structured = text[:1] in ("[", "{", "'", '"')
    try:
        node = YAML(typ="safe", pure=True).compose(text)
        if structured or isinstance(node, ScalarNode):
            value = _Reader(Path("--set")).value(node, ()) if node is not None else None
            return text if isinstance(value, str) and not structured else value
    except (YAMLError, UserError) as error:
        if structured:
            raise ValueError(getattr(error, "problem", None) or str(error)) from None
    return text


class _Reader:
    """One walk over the composed nodes that collects data, lines and the written form of numbers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: dict[KeyPath, int] = {}
        self.number_texts: dict[KeyPath, str] = {}
        self._constructor = YAML(typ="safe", pure=True).constructor
        self._open: set[int] = set()
        self._num_nodes = 0

    def value(self, node: Node, key: KeyPath) -> Any:
        self._num_nodes += 1
        if id(node) in self._open or self._num_nodes > _MAX_NODES:
            raise self._error(node, "an anchor (&name) contains itself, or aliases (*name) multiply without end")
        self._open.add(id(node))
        try:
            if isinstance(node, MappingNode):
                return self.mapping(node, key)
            if isinstance(node, SequenceNode):
                self._refuse_tag(node, _LIST_TAG)
                return [self._item(item, (*key, index)) for index, item in enumerate(node.value)]
            return self._scalar(node, key)
        finally:
            self._open.discard(id(node))

    def mapping(self, node: MappingNode, key: KeyPath) -> dict[str, Any]:
        self._refuse_tag(node, _MAPPING_TAG)
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE_TAG:
                for source in self._merge_sources(value_node):
                    merged = {**self.value(source, key), **merged}
        own: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag != _MERGE_TAG:
                name = self._key_name(key_node)
                below = (*key, name)
                if name in own:
                    first = self.lines[below]
                    raise self._error(key_node, f"the key '{name}' was given before, in line {first}; keep one of them")
                self._forget(below)
                self.lines[below] = key_node.start_mark.line + 1
                own[name] = self.value(value_node, below)
        return {**merged, **own}

    def _item(self, node: Node, key: KeyPath) -> Any:
        self.lines[key] = node.start_mark.line + 1
        return self.value(node, key)

    def _scalar(self, node: Node, key: KeyPath) -> Any:
        tag = str(node.tag)
        if tag in _TEXT_TAGS:
            return node.value
        self._refuse_tag(node, *_PLAIN_TAGS)
        if tag in _NUMBER_TAGS:
            self.number_texts[key] = node.value
        try:
            return self._constructor.construct_object(node)
        except (ValueError, LookupError):  # an explicit tag on a text that does not fit it, as in `!!int many`
            raise self._error(node, f"'{node.value}' does not fit its tag {tag}; write the value without it") from None

    def _refuse_tag(self, node: Node, *known: str) -> None:
        if str(node.tag) not in known:
            raise self._error(node, f"the tag {node.tag} is not known here; write the value without it")

    def _key_name(self, node: Node) -> str:
        if not isinstance(node, ScalarNode):
            raise self._error(node, "a key must be a word, not a list or a mapping ('{{x}}' of a template left in?)")
        return str(node.value)

    def _merge_sources(self, node: Node) -> Iterator[MappingNode]:
        sources = node.value if isinstance(node, SequenceNode) else [node]
        for source in sources:
            if not isinstance(source, MappingNode):
                raise self._error(node, "'<<' takes the alias (*name) of a mapping")
            yield source

    def _forget(self, key: KeyPath) -> None:
        """Drop what a merge recorded below `key`: the mapping's own value replaces it whole."""
        for known in [known for known in self.lines if known[: len(key)] == key]:
            del self.lines[known]
            self.number_texts.pop(known, None)

    def _error(self, node: Node, problem: str) -> UserError:
        return UserError(f"{self.path}:{node.start_mark.line + 1}: {problem}")


def _read_text(path: Path) -> str:
    raw = _read_bytes(path)
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UserError(f"{path}: is UTF-16. Save it as UTF-8:\n    iconv -f UTF-16 -t UTF-8 '{path}' > job-utf8.yaml")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}:{line}: is not UTF-8 (byte 0x{raw[error.start]:02x}). If it was saved in a Chinese encoding:\n"
            f"    iconv -f GB18030 -t UTF-8 '{path}' > job-utf8.yaml"
        ) from None


def _read_bytes(path: Path) -> bytes:
    try:
        if path.is_dir():
            raise UserError(f"{path}: is a folder. Give the file in it: --config {path / 'job.yaml'}")
        size_bytes = path.stat().st_size
        if size_bytes > _MAX_BYTES:
            raise UserError(f"{path}: has {size_bytes / 2**20:.1f} MiB, more than any job file. Is it the data?")
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError(_missing_message(path)) from None
    except PermissionError:
        raise UserError(f"{path}: no permission to read it. As its owner: chmod a+r '{path}'") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _missing_message(path: Path) -> str:
    folder = path.absolute().parent
    if not folder.is_dir():
        return f"{path}: no such file; its folder {folder} does not exist either (is the volume mounted?)"
    others = sorted(entry.name for entry in folder.iterdir() if entry.suffix in (".yaml", ".yml"))
    beside = f" In that folder: {', '.join(others[:5])}." if others else " That folder holds no .yaml file."
    return f"{path}: no such file.{beside}"


def _syntax_message(path: Path, text: str, error: MarkedYAMLError) -> str:
    problem = error.problem or error.context or "cannot be read as YAML"
    seen_late = error.context_mark is not None and any(part in problem for part in _SEEN_LATE)
    mark = error.context_mark if seen_late else error.problem_mark or error.context_mark
    if mark is None:
        return f"{path}: is not YAML: {problem}"
    lines = text.splitlines()
    line_text = lines[mark.line] if mark.line < len(lines) else ""
    indent = line_text[: len(line_text) - len(line_text.lstrip())]
    hint = next((hint for part, hint in _HINTS if part in problem), "compare with the lines around it")
    if "\t" in indent:
        hint = "the line begins with a tab; YAML takes spaces only"
    shown = "(not shown)" if sounds_secret(line_text) else line_text.replace("\t", "<tab>") or "(end of file)"
    return f"{path}:{mark.line + 1}: is not YAML: {problem}\n    {'line:':<10}{shown}\n    {'do:':<10}{hint}"
