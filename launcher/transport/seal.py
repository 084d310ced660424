"""Who may speak: HMAC-SHA256 with the run's token over what is sent. The token itself never travels.

Invariant: a seal made for one run, direction or protocol version is worth nothing in another, and the seal of an
answer is worth something only to who holds the question. Not covered: a request may be sent again, or to another
agent of the run, by whoever can read the network; membership is proof against messages that come twice or late.
"""

from __future__ import annotations

import hashlib
import hmac

PROTOCOL = b"ftlaunch messages 1"


class Seal:
    """run: tells runs apart on the wire without the token: two jobs may meet at one port."""

    def __init__(self, token: str, run_id: str) -> None:
        if not token:
            raise ValueError("an empty token keeps nobody out")
        secret, run = token.encode(), run_id.encode()
        self.run = hashlib.sha256(PROTOCOL + b" run " + run).hexdigest()[:32].encode()
        self._request_key = hmac.digest(secret, PROTOCOL + b" request " + run, "sha256")
        self._answer_key = hmac.digest(secret, PROTOCOL + b" answer " + run, "sha256")

    def of_request(self, body: bytes) -> bytes:
        return hmac.digest(self._request_key, body, "sha256").hex().encode()

    def of_answer(self, request_seal: bytes, body: bytes) -> bytes:
        """request_seal: what `of_request` gave for the question; 64 characters, so the two parts cannot be shifted."""
        return hmac.digest(self._answer_key, request_seal + body, "sha256").hex().encode()


def same(one: bytes, other: bytes) -> bool:
    """In constant time."""
    return hmac.compare_digest(one, other)
