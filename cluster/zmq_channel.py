"""The channel between nodes: ZeroMQ over TCP."""

import secrets
import threading
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from .address import LINGER_S, MAX_MESSAGE_BYTES, MAX_QUEUED_MESSAGES, Address, deadline_of, left_s
from .errors import EngineError
from .frames import TO_HUB, TO_PEER, Inbox, Outbox, Outboxes
from .messages import Message


class ZmqHub:
    """A ROUTER at a node's address. One thread owns it."""

    def __init__(self, epoch: int, host: str) -> None:
        """Bind a free port of `host`."""
        self._context = zmq.Context()
        self._socket = _socket(self._context, zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        self._socket.bind(f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0")
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = Address(endpoint, secrets.token_hex(32), epoch)
        self._key = self.address.token.encode()
        self._inbox = Inbox(self._key, TO_HUB, epoch)
        self._outboxes = Outboxes(self._key, epoch)
        self._routes: dict[str, bytes] = {}
        self._waiting: dict[str, deque[bytes]] = {}  # frames for peers that have not said hello
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def num_ignored(self) -> int:
        return self._inbox.num_ignored

    def recv(self, timeout_s: float | None) -> tuple[str, Message] | None:
        deadline = deadline_of(timeout_s)
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
        self._send_frame(peer, self._outboxes.seal(peer, body))

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
        deadline = deadline_of(timeout_s)
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


def _socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    for option, value in (
        (zmq.LINGER, int(1000 * LINGER_S)),
        (zmq.SNDHWM, MAX_QUEUED_MESSAGES),
        (zmq.RCVHWM, MAX_QUEUED_MESSAGES),
        (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
    ):
        socket.setsockopt(option, value)
    return socket


def _receive(socket: "zmq.Socket[bytes]", deadline: float | None) -> list[bytes] | None:
    while True:
        remaining = left_s(deadline)
        if not socket.poll(None if remaining is None else int(remaining * 1000 + 0.999)):
            return None
        try:
            return socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            if remaining == 0.0:
                return None
