"""Encoded records on disk, made once by `ftlaunch prepare` and mapped by the ranks of every later start.

Invariant: a set is used only where the same files, tokenizer, template and settings would be encoded to the same; its
key says so, and its digest is compared with what is read. `meta.json` is written last: without it there is no set.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash

from launcher.data.encode import EncodedDataset

FORMAT = 1  # of the files, and of what `encode` makes of a record: another number, another key
META = "meta.json"
_READ_BYTES = 1 << 20
_DTYPE = np.dtype("<i4")


@dataclass(frozen=True)
class Recipe:
    """All that decides what records are encoded to, besides the bytes of the files."""

    tokenizer_digest: str
    data_format: str
    system_prompt: str | None
    max_length: int
    train_on_prompt: bool


def folder_of(output_dir: Path) -> Path:
    """Where the sets of a run are: every node of it sees them there."""
    return output_dir / "ftlaunch" / "data"


def key_of(files: Sequence[Path], recipe: Recipe) -> str:
    """Reads every byte of the files; their names do not count."""
    hasher = xxhash.xxh3_128(json.dumps([FORMAT, sys.byteorder, vars(recipe)], sort_keys=True).encode())
    for path in files:
        hasher.update(b"file")
        with path.open("rb") as stream:
            while block := stream.read(_READ_BYTES):
                hasher.update(block)
    return str(hasher.hexdigest())


def tokenizer_digest(tokenizer: Any) -> str:
    """XXH3-128 of everything that the tokenizer's answers depend on."""
    parts: list[str] = [
        type(tokenizer).__name__,
        str(getattr(tokenizer, "chat_template", None)),
        str(tokenizer.eos_token_id),
        str(getattr(tokenizer, "padding_side", "")),
    ]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()  # both are set anew by each call: what the last one left says nothing
        backend.no_padding()
        parts.append(backend.to_str())
    else:
        parts += [
            json.dumps(tokenizer.get_vocab(), sort_keys=True),
            repr(sorted(tokenizer.init_kwargs.items(), key=str)),
        ]
    return str(xxhash.xxh3_128("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest())


class PreparedWriter:
    """Appends blocks to new files of `folder`, which nobody reads before `finish`. Two writers do not disturb each
    other: the last one to finish is the one that counts."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        tag = secrets.token_hex(4)
        self._names = {kind: f"{kind}-{tag}.bin" for kind in ("input_ids", "labels", "offsets")}
        self._streams = {kind: (folder / name).open("wb") for kind, name in self._names.items() if kind != "offsets"}
        self._ends: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        self._end = 0

    def append(self, input_ids: Any, labels: Any, lengths: Sequence[int]) -> None:
        self._streams["input_ids"].write(np.ascontiguousarray(input_ids, _DTYPE).data)
        self._streams["labels"].write(np.ascontiguousarray(labels, _DTYPE).data)
        ends = self._end + np.cumsum(np.asarray(lengths, dtype=np.int64))
        if len(ends):
            self._end = int(ends[-1])
            self._ends.append(ends)

    def finish(self, *, num_truncated: int, report: dict[str, Any]) -> EncodedDataset:
        """Everything durable, then `meta.json`; earlier files of this set are removed."""
        for stream in self._streams.values():
            _make_durable(stream)
            stream.close()
        offsets = np.concatenate([np.zeros(1, np.int64), *self._ends]).astype("<i8")
        with (self._folder / self._names["offsets"]).open("wb") as stream:
            stream.write(offsets.data)
            _make_durable(stream)
        dataset = _open(self._folder, self._names, len(offsets) - 1, int(offsets[-1]), num_truncated, mapped=True)
        meta = {
            "v": FORMAT,
            "files": self._names,
            "num_samples": len(offsets) - 1,
            "num_tokens": int(offsets[-1]),
            "num_truncated": num_truncated,
            "digest": dataset.digest(),
            "report": report,
        }
        _write_last(self._folder / META, json.dumps(meta, ensure_ascii=False, indent=1))
        _remove_all_but(self._folder, self._names.values())
        return dataset

    def discard(self) -> None:
        for kind, stream in self._streams.items():
            stream.close()
            (self._folder / self._names[kind]).unlink(missing_ok=True)
        for empty in (self._folder, self._folder.parent):
            try:
                empty.rmdir()
            except OSError:
                return  # another set is there


def load(folder: Path, *, mapped: bool = True) -> EncodedDataset | None:
    """The set in `folder`; None where there is none, or where it is not what was written. `mapped`: the ranks of a node
    share the memory; False copies it, for mounts that map badly."""
    try:
        meta = json.loads((folder / META).read_text("utf-8"))
        names, num_samples, num_tokens = meta["files"], meta["num_samples"], meta["num_tokens"]
        dataset = _open(folder, names, num_samples, num_tokens, meta["num_truncated"], mapped=mapped)
        return dataset if meta["v"] == FORMAT and dataset.digest() == meta["digest"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _open(
    folder: Path, names: dict[str, str], num_samples: int, num_tokens: int, num_truncated: int, *, mapped: bool
) -> EncodedDataset:
    """Raises ValueError where a file has another size."""

    def read(kind: str, dtype: str, count: int) -> Any:
        path = folder / Path(names[kind]).name
        if path.stat().st_size != count * np.dtype(dtype).itemsize:
            raise ValueError(f"{path} has another size")
        if mapped and count:
            with contextlib.suppress(OSError):  # some mounts map nothing
                return np.memmap(path, dtype, "r", shape=(count,))
        return np.fromfile(path, dtype)

    return EncodedDataset(
        read("input_ids", "<i4", num_tokens),
        read("labels", "<i4", num_tokens),
        read("offsets", "<i8", num_samples + 1),
        num_truncated,
    )


def _make_durable(stream: IO[bytes]) -> None:
    stream.flush()
    with contextlib.suppress(OSError):  # object mounts have no fsync: closing is what counts there
        os.fsync(stream.fileno())


def _write_last(path: Path, text: str) -> None:
    """By rename where the mount has it; object mounts put a whole file or none."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        new.write_text(text, "utf-8")
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        path.write_text(text, "utf-8")


def _remove_all_but(folder: Path, names: Iterable[str]) -> None:
    for stale in {path.name for path in folder.glob("*.bin")} - set(names):
        (folder / stale).unlink(missing_ok=True)
