"""The channel of one node: a unix socket, read by the thread that waits and written by the one that sends.

    a message on the wire = length (4, little-endian) | frame

No thread stands between the two ends, so a message costs one system call and one wake-up. Only when a reader
is so far behind that its socket is full does a thread of the writer hand over the rest: sending never blocks.
"""

import contextlib
import secrets
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from .address import LINGER_S, MAX_MESSAGE_BYTES, MAX_QUEUED_MESSAGES, Address, deadline_of, left_s
from .errors import EngineError
from .frames import TO_HUB, TO_PEER, Inbox, Outbox, Outboxes
from .messages import Message

SCHEME = "unix://"
_LEN = struct.Struct("<I")
_READ_BYTES = 64 << 10


class UnixHub:
    """A listening socket in a private directory. One thread owns it."""

    def __init__(self, epoch: int, directory: Path) -> None:
        """Bind in `directory`, which its owner made with mode 0700."""
        assert directory.stat().st_mode & 0o077 == 0, f"{directory} is open to others"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / "hub"))
        self._listener.listen()
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN)
        self.address = Address(f"{SCHEME}{directory}/hub", secrets.token_hex(32), epoch)
        key = self.address.token.encode()
        self._inbox = Inbox(key, TO_HUB, epoch)
        self._outboxes = Outboxes(key, epoch)
        self._connections: dict[int, _Connection] = {}  # by file descriptor
        self._routes: dict[str, _Connection] = {}
        self._waiting: dict[str, deque[bytes]] = {}  # frames for peers that have not said hello
        self._arrived: deque[tuple[_Connection, bytes]] = deque()
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def num_ignored(self) -> int:
        return self._inbox.num_ignored

    def recv(self, timeout_s: float | None) -> tuple[str, Message] | None:
        deadline = deadline_of(timeout_s)
        while True:
            while self._arrived:
                connection, frame = self._arrived.popleft()
                opened = self._inbox.open(frame)
                if opened is None:
                    continue
                peer, message = opened
                if message is not None:
                    return peer, message
                self._greet(peer, connection)
            events = self._poll.poll(left_s(deadline))
            if not events:
                return None
            for fd, _ in events:
                self._accept() if fd == self._listener.fileno() else self._read(fd)

    def send(self, peer: str, message: Message) -> None:
        self._send_frame(peer, self._outboxes.seal(peer, self._encoder.encode(message)))

    def broadcast(self, peers: Sequence[str], message: Message) -> None:
        body = self._encoder.encode(message)
        for peer in peers:
            self._send_frame(peer, self._outboxes.seal(peer, body))

    def close(self) -> None:
        self._poll.close()
        self._listener.close()
        for connection in self._connections.values():
            connection.close()

    def _accept(self) -> None:
        connection = _Connection(self._listener.accept()[0])
        self._connections[connection.fd] = connection
        self._poll.register(connection.fd, select.EPOLLIN)

    def _read(self, fd: int) -> None:
        connection = self._connections[fd]
        frames = connection.read()
        if frames is not None:
            self._arrived += [(connection, frame) for frame in frames]
            return
        self._poll.unregister(fd)
        del self._connections[fd]
        connection.close(linger_s=0.0)

    def _greet(self, peer: str, connection: "_Connection") -> None:
        self._routes[peer] = connection
        for frame in self._waiting.pop(peer, ()):
            self._send_frame(peer, frame)

    def _send_frame(self, peer: str, frame: bytes) -> None:
        route = self._routes.get(peer)
        if route is not None:
            is_taken = route.send(frame)
        else:
            waiting = self._waiting.setdefault(peer, deque())
            if is_taken := len(waiting) < MAX_QUEUED_MESSAGES:
                waiting.append(frame)
        if not is_taken:
            raise EngineError(f"{peer} has left {MAX_QUEUED_MESSAGES} messages unread")


class UnixLink:
    """A peer's end of a UnixHub. When the hub is gone it is silent: the gang tells, not the channel."""

    def __init__(self, address: Address, peer: str) -> None:
        peer_socket = socket.socket(socket.AF_UNIX)
        peer_socket.connect(address.endpoint.removeprefix(SCHEME))
        self._connection = _Connection(peer_socket)
        key = address.token.encode()
        self._outbox = Outbox(key, TO_HUB, address.epoch, peer)
        self._inbox = Inbox(key, TO_PEER, address.epoch)
        self._arrived: deque[bytes] = deque()
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._connection.send(self._outbox.hello())

    def send(self, message: Message) -> None:
        with self._lock:  # numbers must enter the connection in order
            if not self._connection.send(self._outbox.seal(self._encoder.encode(message))):
                raise EngineError(f"the hub has left {MAX_QUEUED_MESSAGES} messages unread")

    def recv(self, timeout_s: float | None) -> Message | None:
        deadline = deadline_of(timeout_s)
        while True:
            while self._arrived:
                opened = self._inbox.open(self._arrived.popleft())
                if opened is not None and opened[1] is not None:
                    return opened[1]
            remaining_s = left_s(deadline)
            if remaining_s is not None and not self._connection.wait(remaining_s):
                return None
            frames = self._connection.read()
            if frames is None:
                threading.Event().wait(remaining_s)
                return None
            self._arrived += frames

    def close(self) -> None:
        """No other thread may be in recv."""
        with self._lock:
            self._connection.close()


class _Connection:
    """One end of a connected socket: one thread reads, one at a time writes."""

    def __init__(self, connected: socket.socket) -> None:
        self.fd = connected.fileno()
        self._socket = connected
        self._unread = bytearray()  # the beginning of a frame
        self._unsent: deque[bytes] = deque()
        self._lock = threading.Lock()  # of `_unsent`
        self._rest: threading.Thread | None = None  # hands over `_unsent`, while there is any
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """Whether there is something to read within this time."""
        return bool(self._poll.poll(1000 * timeout_s))

    def read(self) -> list[bytes] | None:
        """The frames that have become whole, None once no more can come. Blocks if nothing is there."""
        try:
            received = self._socket.recv(_READ_BYTES)
        except OSError:
            return None
        if not received:
            return None
        unread = self._unread
        unread += received
        frames: list[bytes] = []
        first = 0
        while len(unread) - first >= _LEN.size:
            (frame_len,) = _LEN.unpack_from(unread, first)
            if frame_len > MAX_MESSAGE_BYTES:
                return None
            end = first + _LEN.size + frame_len
            if end > len(unread):
                break
            frames.append(bytes(unread[first + _LEN.size : end]))
            first = end
        del unread[:first]
        return frames

    def send(self, frame: bytes) -> bool:
        """Queue a frame; False if too many are. What is sent to an end that is gone is lost."""
        packed = _LEN.pack(len(frame)) + frame
        with self._lock:
            if not self._unsent:
                try:
                    num_sent = self._socket.send(packed, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    num_sent = 0
                except OSError:
                    return True
                if num_sent == len(packed):
                    return True
                packed = packed[num_sent:]
            if len(self._unsent) >= MAX_QUEUED_MESSAGES:
                return False
            self._unsent.append(packed)
            if self._rest is None:
                self._rest = threading.Thread(target=self._send_rest, name="channel", daemon=True)
                self._rest.start()
        return True

    def close(self, linger_s: float = LINGER_S) -> None:
        """Wait for a while until what was sent is handed over."""
        if (rest := self._rest) is not None:
            rest.join(linger_s)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send_rest(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # the other end is gone: what follows is lost as well
                self._socket.sendall(self._unsent[0])
            with self._lock:
                self._unsent.popleft()
                if not self._unsent:
                    self._rest = None
                    return
