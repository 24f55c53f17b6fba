"""The channel between a scheduler and its peers: a star, ordered, authenticated, without pickle.

The scheduler is the hub; the server, the ranks and the shards are peers ("server", "rank0", "shard0.1", ...).
Three transports carry the same frames:

    LocalHub    queues inside one process
    UnixHub     a unix socket in a private directory: the fastest between processes of one node
    ZmqHub      ZeroMQ over TCP, between nodes

* Every frame is numbered and authenticated (`frames.py`). What is forged, repeated or of another epoch is
  dropped and counted in `num_ignored`; a gap raises ProtocolError. The token lives as long as the hub and
  travels only inside its `Address`.
* A peer says hello once in an epoch. A connection that breaks is a lost peer; the gang decides what follows.
"""

import queue
import secrets
import threading
from collections.abc import Sequence
from typing import Protocol

import msgspec

from .address import MAX_QUEUED_MESSAGES, Address, deadline_of, left_s
from .errors import EngineError, EngineStopped
from .frames import TO_HUB, TO_PEER, Inbox, Outbox, Outboxes
from .messages import Message
from .unix_channel import SCHEME, UnixLink
from .zmq_channel import ZmqLink


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
        self._outboxes = Outboxes(self._key, epoch)
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
        deadline = deadline_of(timeout_s)
        while True:
            try:
                frame = self._incoming.get(timeout=left_s(deadline))
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
        outgoing.put(self._outboxes.seal(peer, body))

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
        deadline = deadline_of(timeout_s)
        while True:
            try:
                frame = self._from_hub.get(timeout=left_s(deadline))
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


def connect(address: Address, peer: str) -> Link:
    """Open the link of `peer` to a hub of another process and say hello."""
    return (UnixLink if address.endpoint.startswith(SCHEME) else ZmqLink)(address, peer)
