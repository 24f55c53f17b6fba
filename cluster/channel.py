"""The channel between a scheduler and its peers: a star, ordered, authenticated, without pickle.

The scheduler is the hub; the server and the ranks are peers ("server", "rank0", "rank1", ...). Two transports
carry the same frames: queues inside one process (`LocalHub`), and ZeroMQ (`ZmqHub` and `connect`).

* Every frame is numbered and authenticated (`frames.py`). What is forged, repeated or of another epoch is
  dropped and counted in `num_ignored`; a gap raises ProtocolError. The token lives as long as the hub and
  travels only inside its `Address`.
* A peer says hello once in an epoch. A connection that breaks is a lost peer; the gang decides what follows.
"""

import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from .errors import EngineError, EngineStopped
from .frames import TO_HUB, TO_PEER, Inbox, Outbox
from .messages import Message

MAX_MESSAGE_BYTES = 256 << 20
MAX_QUEUED_MESSAGES = 16384  # per peer and direction; a peer this far behind is lost
LINGER_MS = 500  # how long close() may wait to hand over what was sent


class Address(msgspec.Struct, frozen=True):
    """How a peer finds the hub, and proves that it may speak. The token is a secret: never log an address."""

    endpoint: str
    token: str
    epoch: int

    def __repr__(self) -> str:
        return f"Address(endpoint={self.endpoint!r}, epoch={self.epoch})"


class Hub(Protocol):
    """The scheduler's end. One thread owns it."""

    @property
    def num_ignored(self) -> int:
        """Frames dropped so far: forged, repeated, or of another epoch."""
        ...

    def recv(self, timeout_s: float | None) -> tuple[str, Message] | None:
        """The next (peer, message), or None when `timeout_s` passed; None waits without end."""
        ...

    def send(self, peer: str, message: Message) -> None:
        """Queue for `peer`; never blocks. Before the peer's hello the message waits for it."""
        ...

    def broadcast(self, peers: Sequence[str], message: Message) -> None:
        """Queue for all of `peers`, encoded once."""
        ...

    def close(self) -> None: ...


class Link(Protocol):
    """A peer's end. One thread may send while another receives."""

    def send(self, message: Message) -> None: ...

    def recv(self, timeout_s: float | None) -> Message | None:
        """The next message, or None when `timeout_s` passed. EngineStopped once a LocalHub was closed."""
        ...

    def close(self) -> None: ...


class LocalHub:
    """A hub for peers in the same process. Frames are encoded all the same: ends share no mutable object."""

    def __init__(self, epoch: int = 0) -> None:
        self.address = Address("local", secrets.token_hex(32), epoch)
        self._key = self.address.token.encode()
        self._inbox = Inbox(self._key, TO_HUB, epoch)
        self._incoming: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._outgoing: dict[str, queue.SimpleQueue[bytes | None]] = {}
        self._outboxes: dict[str, Outbox] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def num_ignored(self) -> int:
        return self._inbox.num_ignored

    def link(self, peer: str) -> "LocalLink":
        """The end of `peer`; ask once per peer."""
        outbox = Outbox(self._key, TO_HUB, self.address.epoch, peer)
        inbox = Inbox(self._key, TO_PEER, self.address.epoch)
        return LocalLink(outbox, inbox, self._incoming, self._queue_of(peer))

    def recv(self, timeout_s: float | None) -> tuple[str, Message] | None:
        deadline = _deadline(timeout_s)
        while True:
            try:
                frame = self._incoming.get(timeout=_remaining(deadline))
            except queue.Empty:
                return None
            opened = self._inbox.open(frame)
            if opened is not None and opened[1] is not None:
                return opened[0], opened[1]

    def send(self, peer: str, message: Message) -> None:
        self._send_body(peer, self._encoder.encode(message))

    def broadcast(self, peers: Sequence[str], message: Message) -> None:
        body = self._encoder.encode(message)
        for peer in peers:
            self._send_body(peer, body)

    def close(self) -> None:
        """Every link's recv raises EngineStopped once it has read what was sent."""
        with self._lock:
            self._is_closed = True
            for outgoing in self._outgoing.values():
                outgoing.put(None)

    def _send_body(self, peer: str, body: bytes) -> None:
        outgoing = self._queue_of(peer)
        if outgoing.qsize() >= MAX_QUEUED_MESSAGES:
            raise EngineError(f"{peer} has left {MAX_QUEUED_MESSAGES} messages unread")
        outbox = self._outboxes.get(peer)
        if outbox is None:
            outbox = self._outboxes[peer] = Outbox(self._key, TO_PEER, self.address.epoch, peer)
        outgoing.put(outbox.seal(body))

    def _queue_of(self, peer: str) -> "queue.SimpleQueue[bytes | None]":
        with self._lock:
            if peer not in self._outgoing:
                self._outgoing[peer] = queue.SimpleQueue()
                if self._is_closed:
                    self._outgoing[peer].put(None)
            return self._outgoing[peer]


class LocalLink:
    """A peer's end of a LocalHub."""

    def __init__(
        self,
        outbox: Outbox,
        inbox: Inbox,
        to_hub: "queue.SimpleQueue[bytes]",
        from_hub: "queue.SimpleQueue[bytes | None]",
    ) -> None:
        self._outbox = outbox
        self._inbox = inbox
        self._to_hub = to_hub
        self._from_hub = from_hub
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: Message) -> None:
        with self._lock:  # numbers must enter the queue in order
            self._to_hub.put(self._outbox.seal(self._encoder.encode(message)))

    def recv(self, timeout_s: float | None) -> Message | None:
        deadline = _deadline(timeout_s)
        while True:
            try:
                frame = self._from_hub.get(timeout=_remaining(deadline))
            except queue.Empty:
                return None
            if frame is None:
                self._from_hub.put(None)
                raise EngineStopped("the hub was closed")
            opened = self._inbox.open(frame)
            if opened is not None and opened[1] is not None:
                return opened[1]

    def close(self) -> None:
        self._from_hub.put(None)


class ZmqHub:
    """A hub over ZeroMQ: a ROUTER on a unix socket in a private directory, or on TCP at a node's address."""

    def __init__(self, epoch: int, *, directory: Path | None = None, host: str | None = None) -> None:
        """Bind in `directory`, which its owner made with mode 0700, or on a free port of `host`."""
        assert (directory is None) != (host is None), "give a directory or a host"
        self._context = zmq.Context()
        self._socket = _socket(self._context, zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if directory is not None:
            assert directory.stat().st_mode & 0o077 == 0, f"{directory} is open to others"
            endpoint = f"ipc://{directory}/hub"
            self._socket.bind(endpoint)
        else:
            self._socket.setsockopt(zmq.IPV6, int(":" in str(host)))
            self._socket.bind(f"tcp://[{host}]:0" if ":" in str(host) else f"tcp://{host}:0")
            endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = Address(endpoint, secrets.token_hex(32), epoch)
        self._key = self.address.token.encode()
        self._inbox = Inbox(self._key, TO_HUB, epoch)
        self._outboxes: dict[str, Outbox] = {}
        self._routes: dict[str, bytes] = {}
        self._waiting: dict[str, deque[bytes]] = {}  # frames for peers that have not said hello
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def num_ignored(self) -> int:
        return self._inbox.num_ignored

    def recv(self, timeout_s: float | None) -> tuple[str, Message] | None:
        deadline = _deadline(timeout_s)
        while (parts := _receive(self._socket, deadline)) is not None:
            if len(parts) != 2:
                self._inbox.num_ignored += 1
                continue
            opened = self._inbox.open(parts[1])
            if opened is None:
                continue
            peer, message = opened
            if message is not None:
                return peer, message
            self._greet(peer, parts[0])
        return None

    def send(self, peer: str, message: Message) -> None:
        self._send_body(peer, self._encoder.encode(message))

    def broadcast(self, peers: Sequence[str], message: Message) -> None:
        body = self._encoder.encode(message)
        for peer in peers:
            self._send_body(peer, body)

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _greet(self, peer: str, route: bytes) -> None:
        self._routes[peer] = route
        for frame in self._waiting.pop(peer, ()):
            self._send_frame(peer, frame)

    def _send_body(self, peer: str, body: bytes) -> None:
        outbox = self._outboxes.get(peer)
        if outbox is None:
            outbox = self._outboxes[peer] = Outbox(self._key, TO_PEER, self.address.epoch, peer)
        self._send_frame(peer, outbox.seal(body))

    def _send_frame(self, peer: str, frame: bytes) -> None:
        route = self._routes.get(peer)
        try:
            if route is not None:
                self._socket.send_multipart([route, frame], zmq.NOBLOCK)
                return
            waiting = self._waiting.setdefault(peer, deque())
            if len(waiting) < MAX_QUEUED_MESSAGES:
                waiting.append(frame)
                return
        except zmq.Again:
            pass
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return  # the peer's process is gone: the gang's sentinel tells, not the channel
        raise EngineError(f"{peer} has left {MAX_QUEUED_MESSAGES} messages unread")


class ZmqLink:
    """A peer's end of a ZmqHub: one connection for each direction, so that two threads may share the link."""

    def __init__(self, address: Address, peer: str) -> None:
        self._context = zmq.Context()
        self._sender = _socket(self._context, zmq.DEALER)
        self._receiver = _socket(self._context, zmq.DEALER)
        for socket in (self._sender, self._receiver):
            socket.setsockopt(zmq.IPV6, int("[" in address.endpoint))
            socket.connect(address.endpoint)
        key = address.token.encode()
        self._outbox = Outbox(key, TO_HUB, address.epoch, peer)
        self._inbox = Inbox(key, TO_PEER, address.epoch)
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._receiver.send(self._outbox.hello(), zmq.NOBLOCK)

    def send(self, message: Message) -> None:
        with self._lock:
            try:
                self._sender.send(self._outbox.seal(self._encoder.encode(message)), zmq.NOBLOCK)
            except zmq.Again:
                raise EngineError(f"the hub has left {MAX_QUEUED_MESSAGES} messages unread") from None

    def recv(self, timeout_s: float | None) -> Message | None:
        deadline = _deadline(timeout_s)
        while (parts := _receive(self._receiver, deadline)) is not None:
            opened = self._inbox.open(parts[0]) if len(parts) == 1 else None
            if opened is not None and opened[1] is not None:
                return opened[1]
        return None

    def close(self) -> None:
        """No other thread may be in recv."""
        with self._lock:
            self._sender.close()
            self._receiver.close()
            self._context.term()


def connect(address: Address, peer: str) -> Link:
    """Open the link of `peer` to a ZmqHub and say hello."""
    return ZmqLink(address, peer)


def _socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    for option, value in (
        (zmq.LINGER, LINGER_MS),
        (zmq.SNDHWM, MAX_QUEUED_MESSAGES),
        (zmq.RCVHWM, MAX_QUEUED_MESSAGES),
        (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
    ):
        socket.setsockopt(option, value)
    return socket


def _receive(socket: "zmq.Socket[bytes]", deadline: float | None) -> list[bytes] | None:
    while True:
        remaining = _remaining(deadline)
        if not socket.poll(None if remaining is None else int(remaining * 1000 + 0.999)):
            return None
        try:
            return socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            if remaining == 0.0:
                return None


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def _remaining(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
