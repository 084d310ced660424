"""Whether the files of a model belong together: read from names, sizes and JSON, never from weights."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from launcher.config.inputs import model_folder
from launcher.config.models import ModelConfig
from launcher.host.bounded import within

HUB = "https://huggingface.co"
HUB_ANSWERS_WITHIN_S = 3.0
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tokenizer_config.json",
)
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_POINTER_BYTES = 1024  # a Git LFS pointer is some 130 bytes, a shard of weights never
_MAX_JSON_BYTES = 64 << 20


@dataclass(frozen=True)
class ModelFiles:
    """`folder` is None where the files are not on this machine; `hub` says then why they cannot be fetched either, ""
    where they can or nobody tried. `problems`: what is missing or broken in the folder, in words for English."""

    source: str
    folder: str | None
    hub: str = ""
    offline: bool = False
    problems: tuple[str, ...] = ()
    vocab_size: int | None = None
    max_positions: int | None = None
    learned_positions: bool = False  # a table of positions: beyond its end there is nothing
    tokenizer_size: int | None = None  # the largest id and one
    has_chat_template: bool | None = None
    tokenizer_file: str | None = None


def read_model_files(model: ModelConfig, environ: Mapping[str, str]) -> ModelFiles:
    """Takes a fraction of a second, and up to `HUB_ANSWERS_WITHIN_S` where a hub must be asked."""
    folder = model_folder(model.path)
    offline = _is_on(environ, "HF_HUB_OFFLINE") or _is_on(environ, "TRANSFORMERS_OFFLINE")
    if folder is None:
        folder = cached_snapshot(model.path, model.revision or "main", environ)
        if folder is None:
            return ModelFiles(model.path, None, _why_not_fetched(environ, offline=offline), offline)
    if model.gguf_file or not folder.is_dir():
        return ModelFiles(model.path, str(folder), offline=offline)
    config = _json(folder / "config.json")
    inner = config.get("text_config", config)
    tokenizer_file = folder / "tokenizer.json"
    return ModelFiles(
        source=model.path,
        folder=str(folder),
        offline=offline,
        problems=tuple(_problems(folder, config)),
        vocab_size=_whole(inner.get("vocab_size")),
        max_positions=_whole(inner.get("max_position_embeddings") or inner.get("n_positions")),
        learned_positions=not any(key in inner for key in ("rope_theta", "rope_parameters", "rope_scaling"))
        and inner.get("model_type") in ("gpt2", "opt", "gpt_bigcode", "biogpt", "xglm", "gpt_neo"),
        tokenizer_size=_tokenizer_size(tokenizer_file),
        has_chat_template=_has_chat_template(folder),
        tokenizer_file=str(tokenizer_file) if tokenizer_file.is_file() else None,
    )


def cached_snapshot(hub_id: str, revision: str, environ: Mapping[str, str]) -> Path | None:
    """The folder of a model that the hub's cache on this machine holds, where it has a configuration."""
    home = Path(environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface")
    cache = Path(environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or home / "hub")
    repository = cache / ("models--" + hub_id.replace("/", "--"))
    try:
        commit = (repository / "refs" / revision).read_text("utf-8").strip()
    except OSError:
        commit = revision
    folder = repository / "snapshots" / commit
    return folder if (folder / "config.json").is_file() else None


def _why_not_fetched(environ: Mapping[str, str], *, offline: bool) -> str:
    if offline:
        return "HF_HUB_OFFLINE is set and the model is not in the hub's cache on this machine"
    endpoint = environ.get("HF_ENDPOINT") or HUB
    if any(environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return ""  # the proxy decides
    parts = urlsplit(endpoint)
    host, port = parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)

    def connect() -> None:
        socket.create_connection((host, port), HUB_ANSWERS_WITHIN_S).close()

    try:
        within(HUB_ANSWERS_WITHIN_S, connect, f"{host}:{port}")
    except (OSError, UnicodeError) as error:
        return f"{endpoint} cannot be reached: {error}"
    return ""


def _problems(folder: Path, config: Mapping[str, Any]) -> Iterator[str]:
    if not config:
        yield "config.json is missing or not a JSON object"
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        yield "no tokenizer (tokenizer.json, tokenizer.model, ...)"
    yield from _problems_of_weights(folder)


def _problems_of_weights(folder: Path) -> Iterator[str]:
    index = next((name for name in INDEXES if (folder / name).is_file()), None)
    single = next((name for name in WEIGHTS if (folder / name).is_file()), None)
    if single is not None:
        yield from _problem_of_file(folder / single)
        return
    if index is None:
        shards = [path for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern)]
        yield f"{len(shards)} file(s) of weights without {INDEXES[0]}" if shards else "no weights (model.safetensors)"
        return
    content = _json(folder / index)
    mapping = content.get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        yield f"{index} has no weight_map"
        return
    names = sorted({str(name) for name in mapping.values()})
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        yield f"{len(missing)} of {len(names)} files of {index} are missing: {', '.join(missing[:3])}"
    there = [folder / name for name in names if name not in missing]
    for path in there:
        yield from _problem_of_file(path)
    wanted = _whole((content.get("metadata") or {}).get("total_size"))
    size = sum(path.stat().st_size for path in there)
    if wanted is not None and not missing and size < wanted:
        yield f"the files of {index} have {size} bytes, their weights alone {wanted}: a download was cut short"


def _problem_of_file(path: Path) -> Iterator[str]:
    """A safetensors file says in its head how long it is."""
    size = path.stat().st_size
    if size < _POINTER_BYTES and path.read_bytes().startswith(b"version https://git-lfs"):
        yield f"{path.name} is a Git LFS pointer, not the weights"
        return
    if path.suffix != ".safetensors":
        return
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        head = stream.read(length) if 0 < length <= _MAX_JSON_BYTES else b""
    try:
        tensors = json.loads(head)
        end = max((value["data_offsets"][1] for name, value in tensors.items() if name != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        yield f"{path.name} has no readable head"
        return
    if size != 8 + length + end:
        yield f"{path.name} has {size} bytes and its head says {8 + length + end}: a download was cut short"


def _tokenizer_size(path: Path) -> int | None:
    """Largest id of tokenizer.json and one, added tokens included."""
    content = _json(path)
    model = content.get("model")
    if not isinstance(model, dict):
        return None
    vocab, added = model.get("vocab"), content.get("added_tokens") or []
    largest = -1
    if isinstance(vocab, dict):
        largest = max((number for number in vocab.values() if isinstance(number, int)), default=-1)
    elif isinstance(vocab, list):
        largest = len(vocab) - 1
    largest = max([largest, *(token.get("id", -1) for token in added if isinstance(token, dict))])
    return largest + 1 if largest >= 0 else None


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    return bool(_json(folder / "tokenizer_config.json").get("chat_template"))


def _json(path: Path) -> dict[str, Any]:
    """Empty for what is missing, too large or no JSON object."""
    try:
        if os.stat(path).st_size > _MAX_JSON_BYTES:
            return {}
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().upper() in ("1", "ON", "YES", "TRUE")
