"""A stand-in for JindoFuse on OSS: a FUSE file system over a folder, which is the bucket.

Run as a program: `python -m tests.mounts.jindo BUCKET_FOLDER MOUNT_POINT [--append] [--timeout SECONDS]`; ends on
SIGTERM, unmounted.

Emulated, after the table of operations and the mount options in JindoFuse's guide (docs/user/en/jindofuse of
github.com/aliyun/alibabacloud-jindodata), column OSS:
- supported: getattr, mkdir, rmdir, unlink, rename, sequential write, create, readdir, access, O_TRUNC, release;
- not supported: write anywhere but at the end, truncate, chmod, utimes, xattr, symlink, locks between machines;
- flush and fsync only for files that were opened for appending: a file is complete when it has been released, which the
  kernel tells after close has returned;
- O_APPEND "with restrictions": only objects that were made by appending, and on PAI-DLC only with `EnableOssAppend`:
  `--append` is that setting, and the default is without;
- names, attributes and the absence of a name are kept for 60 s (`entry_timeout`, `attr_timeout`, `negative_timeout`).

After what OSS is (keys without folders): the rename of a folder copies object after object, then deletes them.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import stat
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mfusepy

FSTYPE = "jindofs-fuse"
_COMPLETED_AFTER_S = 0.03  # from release until the object is there
_COPY_S = 0.002  # of one object
_PART = ".uploading-"


@dataclass
class Upload:
    """A file that is being written; its object appears when it is released."""

    path: str
    part: Path
    fd: int
    size_bytes: int
    appending: bool


class Jindo(mfusepy.Operations):
    use_ns = True

    def __init__(self, bucket: Path, *, append: bool) -> None:
        self._bucket = bucket
        self._append = append
        self._lock = threading.RLock()
        self._uploads: dict[int, Upload] = {}
        self._appendable: set[str] = set()
        self._next = 1

    def _object(self, path: str) -> Path:
        return self._bucket / path.lstrip("/")

    def _writing(self, path: str) -> Upload | None:
        return next((upload for upload in self._uploads.values() if upload.path == path), None)

    # ---- names ----

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        with self._lock:
            upload = self._writing(path)
        if upload is not None:
            return {"st_mode": stat.S_IFREG | 0o666, "st_size": upload.size_bytes, "st_nlink": 1}
        found = self._object(path).lstat()
        kind = stat.S_IFDIR | 0o777 if stat.S_ISDIR(found.st_mode) else stat.S_IFREG | 0o666
        return {"st_mode": kind, "st_size": found.st_size, "st_mtime": found.st_mtime_ns, "st_nlink": 1}

    def readdir(self, path: str, fh: int) -> list[str]:
        names = {name for name in os.listdir(self._object(path)) if not name.startswith(_PART)}
        with self._lock:
            names |= {Path(u.path).name for u in self._uploads.values() if str(Path(u.path).parent) == path}
        return [".", "..", *sorted(names)]

    def access(self, path: str, amode: int) -> int:
        self.getattr(path)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        self._object(path).mkdir()
        return 0

    def rmdir(self, path: str) -> int:
        self._object(path).rmdir()
        return 0

    def unlink(self, path: str) -> int:
        with self._lock:
            upload = self._writing(path)
            if upload is not None:
                upload.path = ""  # what is still written goes nowhere
        self._object(path).unlink(missing_ok=upload is not None)
        return 0

    def rename(self, old: str, new: str) -> int:
        with self._lock:
            if self._writing(old):
                raise mfusepy.FuseOSError(errno.ENOENT)  # there is no object yet
            if old in self._appendable:
                self._appendable.add(new)
        source, target = self._object(old), self._object(new)
        if not source.is_dir():
            time.sleep(_COPY_S)
            source.replace(target)
            return 0
        if target.is_dir() and any(target.iterdir()):
            raise mfusepy.FuseOSError(errno.ENOTEMPTY)
        for path in sorted(source.rglob("*")):  # whoever looks now sees both halves
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                copy.mkdir(exist_ok=True)
            else:
                time.sleep(_COPY_S)
                shutil.copyfile(path, copy)
        target.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(source)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        return {"f_bsize": 4096, "f_frsize": 4096, "f_blocks": 1 << 40, "f_bfree": 1 << 40, "f_bavail": 1 << 40}

    # ---- content ----

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        flags = fi if isinstance(fi, int) else os.O_WRONLY
        return self._begin(path, appending=bool(flags & os.O_APPEND))

    def open(self, path: str, flags: int) -> int:
        if flags & os.O_ACCMODE == os.O_RDONLY:
            if not self._object(path).exists():  # still being uploaded
                raise mfusepy.FuseOSError(errno.ENOENT)
            return 0
        if flags & os.O_TRUNC:
            return self._begin(path, appending=bool(flags & os.O_APPEND))
        if flags & os.O_APPEND:
            if path not in self._appendable:
                raise mfusepy.FuseOSError(errno.EOPNOTSUPP)  # ObjectNotAppendable
            return self._begin(path, appending=True)
        return 0  # nothing may be written, but a lock be taken

    def _begin(self, path: str, *, appending: bool) -> int:
        if appending and not self._append:
            raise mfusepy.FuseOSError(errno.EOPNOTSUPP)
        with self._lock:
            number, self._next = self._next, self._next + 1
            if appending:
                part = self._object(path)
                self._appendable.add(path)
            else:
                part = self._object(path).with_name(f"{_PART}{number}")
            flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if appending else os.O_TRUNC)
            fd = os.open(part, flags, 0o666)
            self._uploads[number] = Upload(path, part, fd, os.fstat(fd).st_size, appending)
            return number

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        with self._lock:
            upload = self._uploads.get(fh)
            if upload is None or (offset != upload.size_bytes and not upload.appending):
                raise mfusepy.FuseOSError(errno.EOPNOTSUPP)
            written = os.write(upload.fd, data)
            upload.size_bytes += written
            return written

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        with self._object(path).open("rb") as stream:
            return os.pread(stream.fileno(), size, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        raise mfusepy.FuseOSError(errno.EOPNOTSUPP)

    def flush(self, path: str, fh: int) -> int:
        return 0  # close would fail for every program otherwise

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        upload = self._uploads.get(fh)
        if upload is None or not upload.appending:
            raise mfusepy.FuseOSError(errno.EOPNOTSUPP)
        return 0

    def release(self, path: str, fh: int) -> int:
        upload = self._uploads.get(fh)
        if upload is None:
            return 0
        os.close(upload.fd)
        if not upload.appending:
            time.sleep(_COMPLETED_AFTER_S)
        with self._lock:
            del self._uploads[fh]
            if not upload.appending and upload.path and self._object(upload.path).parent.is_dir():
                upload.part.replace(self._object(upload.path))
                self._appendable.discard(upload.path)
            elif not upload.appending:
                upload.part.unlink(missing_ok=True)
        return 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bucket", type=Path)
    parser.add_argument("mount_point")
    parser.add_argument("--append", action="store_true")
    parser.add_argument("--timeout", type=float, default=60.0)
    options = parser.parse_args()
    mfusepy.FUSE(
        Jindo(options.bucket, append=options.append),
        options.mount_point,
        foreground=True,
        fsname="oss",
        subtype=FSTYPE,
        entry_timeout=options.timeout,
        attr_timeout=options.timeout,
        negative_timeout=options.timeout,
    )


if __name__ == "__main__":
    main()
