"""Files that may be logs: alone, in folders, in archives. Names first; the bytes are read when they are asked for.

Nothing is unpacked to a disk. Links in archives are not followed.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import gzip
import importlib
import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from launcher.errors import UserError

_PROBE_BYTES = 8192
_MAX_CONTROL_SHARE = 0.1  # of the first bytes; above it the file is no text
_CONTROL = bytes(set(range(32)) - set(b"\t\n\r\x0b\x0c\x1b\x08")) + b"\x7f"
_MAX_FILES = 20_000
_SINGLE: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_CUT_SHORT = (EOFError, zlib.error, lzma.LZMAError)
_BOMS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


@dataclass(frozen=True)
class LogFile:
    """`name` is relative to what was given, `shown` is what people are told; `num_bytes` None where nobody knows."""

    name: PurePosixPath
    shown: str
    num_bytes: int | None
    open: Callable[[], BinaryIO]


@contextlib.contextmanager
def files_in(path: Path) -> Iterator[list[LogFile]]:
    """Every file of a folder or an archive, or the file itself. UserError where that cannot be read."""
    try:
        path.stat()
        with contextlib.ExitStack() as stack:
            yield list(_files(path, stack))
    except (zipfile.BadZipFile, tarfile.TarError, *_CUT_SHORT) as error:
        raise UserError(f"{path}: this archive is broken or cut short ({error})") from error
    except FileNotFoundError as error:
        raise UserError(
            f"{path}: no such file or folder. Give a log, an output_dir, an incident folder or an archive."
        ) from error
    except PermissionError as error:
        raise UserError(f"{error.filename or path}: no permission to read it") from error
    except OSError as error:
        raise UserError(f"{error.filename or path}: cannot be read: {error.strerror or error}") from error


def _files(path: Path, stack: contextlib.ExitStack) -> Iterator[LogFile]:
    if path.is_dir():
        yield from _in_folder(path)
    elif zipfile.is_zipfile(path):
        yield from _in_zip(path, stack.enter_context(zipfile.ZipFile(path)))
    elif _is_tar(path):
        yield from _in_tar(path, stack.enter_context(tarfile.open(path)))  # noqa: SIM115  # the stack closes it
    else:
        with path.open("rb"):  # a refusal is told for the file that was asked for, and now
            pass
        yield LogFile(PurePosixPath(_plain_name(path)), str(path), _size(path), partial(_open, path))


def _in_folder(folder: Path) -> Iterator[LogFile]:
    def refused(error: OSError) -> None:
        if error.filename == str(folder):
            raise error

    num = 0
    for root, folders, names in os.walk(folder, onerror=refused):
        folders.sort()
        for name in sorted(names):
            file = Path(root, name)
            if not file.is_file():
                continue  # a socket, a pipe: reading would wait for ever
            num += 1
            if num > _MAX_FILES:
                raise UserError(f"{folder}: more than {_MAX_FILES} files; name the folder of the logs itself")
            within = PurePosixPath(file.relative_to(folder).as_posix())
            yield LogFile(within.with_name(_plain_name(file)), str(file), _size(file), partial(_open, file))


def _in_zip(path: Path, archive: zipfile.ZipFile) -> Iterator[LogFile]:
    for member in archive.infolist():
        if not member.is_dir():
            shown = f"{path}:{member.filename}"
            opener = cast(Callable[[], BinaryIO], partial(archive.open, member))
            yield LogFile(PurePosixPath(member.filename), shown, member.file_size, opener)


def _in_tar(path: Path, archive: tarfile.TarFile) -> Iterator[LogFile]:
    for member in archive:
        if member.isfile():
            shown = f"{path}:{member.name}"
            opener = cast(Callable[[], BinaryIO], partial(archive.extractfile, member))
            yield LogFile(PurePosixPath(member.name), shown, member.size, opener)


def _is_tar(path: Path) -> bool:
    suffixes = [s.lower() for s in path.suffixes[-2:]]
    return ".tar" in suffixes or path.suffix.lower() in (".tgz", ".tbz2", ".txz")


def _plain_name(path: Path) -> str:
    """`rank-0.log` for `rank-0.log.gz`."""
    return path.stem if path.suffix in (*_SINGLE, ".zst") else path.name


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.suffix not in (*_SINGLE, ".zst") else None


def _open(path: Path) -> BinaryIO:
    if path.suffix in _SINGLE:
        return cast(BinaryIO, _SINGLE[path.suffix](path, "rb"))
    if path.suffix == ".zst":
        return _open_zst(path)
    return path.open("rb")


def _open_zst(path: Path) -> BinaryIO:
    for library in ("compression.zstd", "backports.zstd", "zstandard"):  # Python's own since 3.14
        with contextlib.suppress(ImportError):
            return cast(BinaryIO, importlib.import_module(library).open(path, "rb"))
    raise UserError(f"{path}: this Python cannot read zstd; unpack it first (`zstd -d {path.name}`)")


class TextStream:
    """A log's bytes as UTF-8 or something near it; an archive that is cut short ends where it was cut."""

    def __init__(self, stream: BinaryIO) -> None:
        self._rest = stream
        self.is_cut_short = False
        self._start = self._next(_PROBE_BYTES)
        controls = len(self._start) - len(self._start.translate(None, _CONTROL))
        encoding = _BOMS.get(self._start[:2])
        self._decoder = codecs.getincrementaldecoder(encoding)("replace") if encoding else None
        self.is_text = bool(encoding) or controls <= _MAX_CONTROL_SHARE * len(self._start)

    def read(self, num_bytes: int) -> bytes:
        """At most about `num_bytes`; empty at the end."""
        data, self._start = self._start or self._next(num_bytes), b""
        return data if self._decoder is None else self._decoder.decode(data).encode("utf-8", "replace")

    def _next(self, num_bytes: int) -> bytes:
        try:
            return self._rest.read(num_bytes)
        except _CUT_SHORT:
            self.is_cut_short = True
            return b""
