"""What an agent says to the others and hears from them.

Invariant: `on_message` is called only with what was sealed with this run's token, and neither it nor `on_unreachable`
is ever called from within `send`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from launcher.cluster.codec import CodecError
from launcher.cluster.messages import Message
from launcher.event_loop import EventLoop
from launcher.transport import framing
from launcher.transport.body import MAX_BODY_BYTES, decode, encode, join
from launcher.transport.framing import PATH, RUN_HEADER, SEAL_HEADER, Received
from launcher.transport.inbound import Asker, Inbound
from launcher.transport.notices import Notices
from launcher.transport.outbound import Batch, Peer
from launcher.transport.seal import Seal, same

LINGER_S = 2.0
_ANOTHER_RUN = (
    "Either the two do not see the same output_dir (it has to be on storage that all nodes mount), or two jobs use one "
    "port (then set cluster.agent_port)"
)
FLUSH_AGAIN_S = 0.05  # how exactly `HEDGE_S` and the pauses between probes are kept
SWEEP_S = 0.5  # how exactly the other bounds are


class Question:
    """A request that is welcome, and what is said to its sender while it is handled."""

    def __init__(self, request: Received, messages: tuple[Message, ...]) -> None:
        self.request, self.messages = request, messages
        self.addresses = {message.sender.address for message in messages}
        self.answers: list[bytes] = []
        self.num_bytes = 2
        self._answered: list[bytes] = []
        self._answer = b""

    def add(self, encoded: bytes) -> bool:
        """False: the answer would become too large."""
        num_bytes = self.num_bytes + len(encoded) + 1
        if num_bytes > MAX_BODY_BYTES:
            return False
        self.answers.append(encoded)
        self.num_bytes = num_bytes
        return True

    def take_answer(self, seal: Seal) -> bytes:
        """The answer, whole. The same words to the same request again are sealed once."""
        if not self._answer or self.answers != self._answered:
            body = join(self.answers)
            sealed = seal.of_answer(self.request.headers[SEAL_HEADER], body)
            self._answer = framing.answer(sealed, body, close=not self.request.keep_alive)
            self._answered = self.answers
        self.answers, self.num_bytes = [], 2
        return self._answer


class Transport:
    """Messages to and from the agents of one run, on the agent's loop."""

    def __init__(
        self,
        loop: EventLoop,
        *,
        token: str,
        run_id: str,
        host: str,
        port: int,
        on_message: Callable[[Message], None],
        on_unreachable: Callable[[str], None],
        say: Callable[[str], None],
        on_refused: Callable[[str, str], None] = lambda address, reason: None,
    ) -> None:
        """Listens at once. host: "0.0.0.0" or an IPv4 address of this machine. port: 0 takes a free one.

        on_unreachable: gets an address at which nobody listens any more. on_refused: an address, and what the agent
        there has against this one. Raises UserError when the port is taken.
        """
        self.loop = loop
        self.notices = Notices(say)
        self._seal = Seal(token, run_id)
        self._on_message, self._on_unreachable, self._on_refused = on_message, on_unreachable, on_refused
        self._peers: dict[str, Peer] = {}
        self._to_flush: dict[Peer, None] = {}
        self._question: Question | None = None  # the one that is being handled
        self._asker: Asker | None = None  # whose it is
        self._closed = False
        self._sweep_at = 0.0
        self._bound = f"transport {id(self)}: flush"  # several may share a loop
        self._inbound = Inbound(loop, host, port, self.notices, self._on_request, self._on_lost)

    @property
    def port(self) -> int:
        return self._inbound.port

    def send(self, address: str, message: Message) -> None:
        """Never blocks; the message may be lost in silence. While a request from `address` is being handled, it travels
        in the answer."""
        if self._closed:
            return
        encoded = encode(message)
        question = self._question
        if question and address in question.addresses and question.add(encoded):
            return
        if len(encoded) + 2 > MAX_BODY_BYTES:
            self.notices.say(address, "large", f"a {type(message).__name__} of {len(encoded)} bytes is not sent")
            return
        peer = self._peer(address)
        if peer:
            peer.add(message, encoded, time.monotonic())
            self._flush_in(peer, 0.0)

    def tick(self) -> None:
        """To be called after every wait of the loop."""
        now = time.monotonic()
        if self._closed or now < self._sweep_at:
            return
        self._sweep_at = now + SWEEP_S
        self._inbound.tick(now)
        for peer in list(self._peers.values()):
            peer.tick(now)
            if peer.is_unused:
                self._peers.pop(peer.address, None)

    def close(self, linger_s: float = LINGER_S) -> None:
        """What was sent and matters is still delivered, for at most `linger_s`; nothing is handled any more."""
        if self._closed:
            return
        self._answer()
        self._closed = True
        self.loop.set_bound(self._bound, 0.0, lambda: None, kept=True)
        self.loop = last = EventLoop(on_tick=lambda: None)
        self._inbound.end(last)
        for peer in self._peers.values():
            peer.move(last)
        until = time.monotonic() + linger_s
        while time.monotonic() < until:
            unsettled = [peer for peer in self._peers.values() if not peer.is_settled]
            for peer in unsettled:
                peer.flush(time.monotonic())
            if not unsettled and self._inbound.is_empty:
                break
            last.set_bound(self._bound, min(FLUSH_AGAIN_S, max(0.0, until - time.monotonic())), lambda: None)
            last.wait()
        self._inbound.close()
        for peer in self._peers.values():
            peer.close()
        last.close()

    # ---- questions of others ----

    def _on_request(self, asker: Asker, request: Received) -> None:
        question = asker.question
        if question is None or question.request is not request:
            question = asker.question = self._welcome(asker, request)
        if self._closed or question is None:
            return
        self._asker, self._question = asker, question
        try:
            self._deliver(question.messages)
        finally:
            self._answer()

    def _welcome(self, asker: Asker, request: Received) -> Question | None:
        if not self._is_welcome(asker, request):
            return None
        asker.known = True
        try:
            question = Question(request, decode(request.body))
        except CodecError as error:
            self.notices.say(asker.ip, "codec", f"{asker.ip} sent a message that is not understood here: {error}")
            asker.answer(framing.refusal(400, str(error)), close=True)
            return None
        asker.addresses |= question.addresses
        return question

    def _is_welcome(self, asker: Asker, request: Received) -> bool:
        if request.path != PATH:
            status, text = 404, f"there is only {PATH.decode()}"
        elif request.method != b"POST":
            status, text = 405, "only POST is taken"
        elif request.headers.get(RUN_HEADER, b"") != self._seal.run:
            status, text = 409, "another run of ftlaunch has this port"
        elif not same(request.headers.get(SEAL_HEADER, b""), self._seal.of_request(request.body)):
            status, text = 401, "this is not the token of the run"
        else:
            return True
        words = {
            409: f"{asker.ip} was refused: it asks for another run. {_ANOTHER_RUN}",
            401: f"{asker.ip} was refused: it does not have this run's token (cluster.token, FTLAUNCH_TOKEN)",
        }
        self.notices.say(asker.ip, str(status), words.get(status, f"{asker.ip} was refused: {text}"))
        asker.answer(framing.refusal(status, text), close=True)
        return False

    def _answer(self) -> None:
        question, asker = self._question, self._asker
        self._question = self._asker = None
        if question and asker:
            asker.answer(question.take_answer(self._seal), close=not question.request.keep_alive)

    def _deliver(self, messages: tuple[Message, ...]) -> None:
        for message in messages:
            if not self._closed:
                self._on_message(message)

    def _on_lost(self, addresses: set[str]) -> None:
        """A connection from there has ended. Whether the agent has ended too shows a connection to it."""
        for address in () if self._closed else sorted(addresses):
            peer = self._peer(address)
            if peer:
                peer.probe(time.monotonic())

    # ---- our questions ----

    def ask(self, host: bytes, batch: Batch) -> bytes:
        """See `outbound.Links`; so are the next ones."""
        body = batch.body
        batch.seal = self._seal.of_request(body)
        return framing.request(host, self._seal.run, batch.seal, body)

    def on_answer(self, address: str, batch: Batch, answer: Received) -> bool:
        if answer.status != 200:
            texts = {
                409: f"belongs to another run. {_ANOTHER_RUN}",
                401: "does not accept this run's token (cluster.token, FTLAUNCH_TOKEN)",
            }
            said = answer.body[:200].decode(errors="replace").strip()
            text = texts.get(answer.status, f"refuses messages ({answer.status}): {said!r}")
            self.notices.say(address, str(answer.status), f"{address} {text}")
            self._on_refused(address, text)
            return False
        if not same(answer.headers.get(SEAL_HEADER, b""), self._seal.of_answer(batch.seal, answer.body)):
            self.notices.say(address, "seal", f"{address} answers without this run's token: not used")
            return False
        try:
            messages = decode(answer.body)
        except CodecError as error:
            self.notices.say(address, "codec", f"{address} answers what is not understood here: {error}")
            return False
        self._deliver(messages)
        return True

    def on_unreachable(self, address: str) -> None:
        if not self._closed:
            self._on_unreachable(address)

    # ----

    def flush_soon(self, peer: Peer) -> None:
        self._flush_in(peer, FLUSH_AGAIN_S)

    def _peer(self, address: str) -> Peer | None:
        if address not in self._peers:
            try:
                self._peers[address] = Peer(self, address)
            except ValueError as error:
                self.notices.say(address, "address", f"{address!r} is no address of an agent (IPv4:port): {error}")
                return None
        return self._peers[address]

    def _flush_in(self, peer: Peer, seconds: float) -> None:
        if not self._to_flush or seconds == 0.0:
            self.loop.set_bound(self._bound, seconds, self._flush, kept=True)
        self._to_flush[peer] = None

    def _flush(self) -> None:
        now = time.monotonic()
        peers, self._to_flush = self._to_flush, {}
        for peer in peers:
            if not self._closed and not peer.flush(now):
                self._flush_in(peer, FLUSH_AGAIN_S)
