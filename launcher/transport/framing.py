"""HTTP/1.1 read from a stream, within bounds. httptools parses it: the C parser of Node.js (llhttp)."""

from __future__ import annotations

from dataclasses import dataclass, field

import httptools

from launcher.transport.body import MAX_BODY_BYTES

MAX_HEAD_BYTES = 16 * 1024
PATH = b"/v1/messages"
RUN_HEADER, SEAL_HEADER = b"ftlaunch-run", b"ftlaunch-seal"
REASONS = {
    200: b"OK",
    400: b"Bad Request",
    401: b"Unauthorized",
    404: b"Not Found",
    405: b"Method Not Allowed",
    409: b"Conflict",
    413: b"Content Too Large",
    431: b"Request Header Fields Too Large",
}


class NonsenseError(Exception):
    """What came in is no HTTP, or too much of it. status: what HTTP says to that."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(slots=True)
class Received:
    """A whole request (method and path are set) or answer (status is set). Header names are in lower case."""

    method: bytes = b""
    path: bytes = b""
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    keep_alive: bool = True


class Reader:
    """Bytes in as they come, whole requests (or answers) out. midst: one has begun and is not whole."""

    def __init__(self, *, answers: bool) -> None:
        self.midst = False
        self._parser = httptools.HttpResponseParser(self) if answers else httptools.HttpRequestParser(self)
        self._whole: list[Received] = []
        self._refusal: NonsenseError | None = None
        self._now = Received()
        self._parts: list[bytes] = []
        self._in_head = False
        self._unended_head_bytes = 0  # the parser holds an unended header line back, so what was fed is counted too
        self._head_bytes = self._body_bytes = 0

    def feed(self, data: bytes) -> list[Received]:
        """Raises NonsenseError; after that this reader is of no use."""
        refusal = None
        if not self.midst:
            self.midst = self._in_head = True
            self._unended_head_bytes = 0
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            refusal = NonsenseError(400, f"no HTTP that is understood here ({error or type(error).__name__})")
        if self._in_head:
            self._unended_head_bytes += len(data)
            if self._unended_head_bytes > MAX_HEAD_BYTES:
                self._refusal = self._refusal or _too_long_a_head()
        refusal = self._refusal or refusal
        if refusal:
            raise refusal
        whole, self._whole = self._whole, []
        return whole

    # ---- the parser calls these ----

    def on_message_begin(self) -> None:
        self._now = Received()
        self._parts = []
        self.midst = self._in_head = True
        self._unended_head_bytes = self._head_bytes = self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._now.path += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._now.headers[name.lower()] = value
        self._count_head(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        if int(self._now.headers.get(b"content-length", b"0")) > MAX_BODY_BYTES:  # the parser has checked its digits
            self._refusal = _too_long_a_body()

    def on_body(self, part: bytes) -> None:
        self._body_bytes += len(part)
        if self._body_bytes > MAX_BODY_BYTES:
            self._refusal = _too_long_a_body()
        elif not self._refusal:
            self._parts.append(part)

    def on_message_complete(self) -> None:
        if isinstance(self._parser, httptools.HttpRequestParser):
            self._now.method = self._parser.get_method()
        else:
            self._now.status = self._parser.get_status_code()
        self._now.keep_alive = self._parser.should_keep_alive()
        self._now.body = b"".join(self._parts)
        self._whole.append(self._now)
        self.midst = False

    def _count_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refusal = _too_long_a_head()


def _too_long_a_head() -> NonsenseError:
    return NonsenseError(431, f"more than {MAX_HEAD_BYTES} bytes of headers")


def _too_long_a_body() -> NonsenseError:
    return NonsenseError(413, f"more than {MAX_BODY_BYTES} bytes")


def request(host: bytes, run: bytes, seal: bytes, body: bytes) -> bytes:
    return (
        b"POST %b HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
        b"Ftlaunch-Run: %b\r\nFtlaunch-Seal: %b\r\n\r\n%b" % (PATH, host, len(body), run, seal, body)
    )


def answer(seal: bytes, body: bytes, *, close: bool = False) -> bytes:
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\nFtlaunch-Seal: %b\r\n%b\r\n%b"
        % (len(body), seal, b"Connection: close\r\n" if close else b"", body)
    )


def refusal(status: int, text: str) -> bytes:
    """An answer without a seal; the connection ends with it."""
    body = text.encode() + b"\n"
    return (
        b"HTTP/1.1 %d %b\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\n"
        b"Connection: close\r\n\r\n%b" % (status, REASONS[status], len(body), body)
    )
