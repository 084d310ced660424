"""A small S3 server over a folder, as far as s3fs needs it: one bucket, no signatures, objects in memory.

Run as a program: `python -m tests.mounts.s3_server PORT_FILE`; writes the port that it listens on into PORT_FILE.
"""

from __future__ import annotations

import hashlib
import re
import sys
import threading
import urllib.parse
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.sax.saxutils import escape

_DATE = "2026-01-01T00:00:00.000Z"


@dataclass
class Object:
    data: bytes
    headers: dict[str, str]

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.data, usedforsecurity=False).hexdigest()}"'


@dataclass
class Bucket:
    objects: dict[str, Object] = field(default_factory=dict)
    uploads: dict[str, tuple[dict[str, str], dict[int, bytes]]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bucket = Bucket()

    def log_message(self, format: str, *args: object) -> None:
        pass

    # ---- requests ----

    def do_GET(self) -> None:
        key, query = self._target()
        if not key:
            self._answer(200, self._listing(query), {"Content-Type": "application/xml"})
            return
        found = self.bucket.objects.get(key)
        if found is None:
            self._error(404, "NoSuchKey")
            return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        headers = {**found.headers, "ETag": found.etag, "Last-Modified": formatdate(0, usegmt=True)}
        if not wanted:
            self._answer(200, found.data, headers)
            return
        first, last = int(wanted[1]), int(wanted[2] or len(found.data) - 1)
        headers["Content-Range"] = f"bytes {first}-{min(last, len(found.data) - 1)}/{len(found.data)}"
        self._answer(206, found.data[first : last + 1], headers)

    do_HEAD = do_GET  # noqa: N815

    def do_PUT(self) -> None:
        key, query = self._target()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        copied = self._copied()
        if "x-amz-copy-source" in self.headers and copied is None:
            self._error(404, "NoSuchKey")
            return
        if not key:
            self._answer(200, b"", {})
            return
        data = copied.data if copied is not None else body
        if "uploadId" in query:
            part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("x-amz-copy-source-range", ""))
            data = data[int(part[1]) : int(part[2]) + 1] if part else data
            self.bucket.uploads[query["uploadId"]][1][int(query["partNumber"])] = data
            made = Object(data, {})
        else:
            keeps = copied is not None and self.headers.get("x-amz-metadata-directive") != "REPLACE"
            made = Object(data, copied.headers if copied is not None and keeps else self._metadata())
            with self.bucket.lock:
                self.bucket.objects[key] = made
        if copied is None:
            self._answer(200, b"", {"ETag": made.etag})
        else:
            kind = "CopyPartResult" if "uploadId" in query else "CopyObjectResult"
            text = f"<{kind}><LastModified>{_DATE}</LastModified><ETag>{escape(made.etag)}</ETag></{kind}>"
            self._answer(200, text.encode(), {"Content-Type": "application/xml"})

    def do_POST(self) -> None:
        key, query = self._target()
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "uploads" in query:
            number = str(len(self.bucket.uploads) + 1)
            self.bucket.uploads[number] = (self._metadata(), {})
            text = f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>"
        else:
            headers, parts = self.bucket.uploads.pop(query["uploadId"])
            made = Object(b"".join(parts[number] for number in sorted(parts)), headers)
            with self.bucket.lock:
                self.bucket.objects[key] = made
            text = f"<CompleteMultipartUploadResult><ETag>{escape(made.etag)}</ETag></CompleteMultipartUploadResult>"
        self._answer(200, text.encode(), {"Content-Type": "application/xml"})

    def do_DELETE(self) -> None:
        key, query = self._target()
        if "uploadId" in query:
            self.bucket.uploads.pop(query["uploadId"], None)
        else:
            with self.bucket.lock:
                self.bucket.objects.pop(key, None)
        self._answer(204, b"", {})

    # ---- the rest ----

    def _target(self) -> tuple[str, dict[str, str]]:
        parsed = urllib.parse.urlsplit(self.path)
        _, _, key = urllib.parse.unquote(parsed.path).lstrip("/").partition("/")
        return key, dict(urllib.parse.parse_qsl(parsed.query, keep_blank_values=True))

    def _copied(self) -> Object | None:
        source = urllib.parse.unquote(self.headers.get("x-amz-copy-source", "")).lstrip("/").partition("/")[2]
        return self.bucket.objects.get(source) if source else None

    def _metadata(self) -> dict[str, str]:
        kept = ("content-type", "x-amz-meta-")
        return {name.lower(): value for name, value in self.headers.items() if name.lower().startswith(kept)}

    def _listing(self, query: dict[str, str]) -> bytes:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        contents, folders = [], set()
        with self.bucket.lock:
            found = sorted(self.bucket.objects.items())
        for key, value in found:
            if not key.startswith(prefix):
                continue
            head, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if cut:
                folders.add(prefix + head + delimiter)
            else:
                contents.append(
                    f"<Contents><Key>{escape(key)}</Key><LastModified>{_DATE}</LastModified>"
                    f"<ETag>{escape(value.etag)}</ETag><Size>{len(value.data)}</Size></Contents>"
                )
        common = "".join(f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>" for f in sorted(folders))
        return (
            f"<ListBucketResult><Name>bucket</Name><Prefix>{escape(prefix)}</Prefix><MaxKeys>100000</MaxKeys>"
            f"<IsTruncated>false</IsTruncated>{''.join(contents)}{common}</ListBucketResult>"
        ).encode()

    def _error(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code></Error>".encode(), {"Content-Type": "application/xml"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main() -> None:
    server = Server(("127.0.0.1", 0), Handler)
    Handler.disable_nagle_algorithm = True  # type: ignore[attr-defined]
    port_file = Path(sys.argv[1])
    temporary = port_file.with_suffix(".new")
    temporary.write_text(str(server.server_address[1]))
    temporary.rename(port_file)
    server.serve_forever()


if __name__ == "__main__":
    main()
