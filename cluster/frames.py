"""The frames of a channel: sealed by one end, opened by the other.

    frame = mac (16) | direction (1) | epoch (8) | number (8) | peer length (1) | peer | MessagePack body

* The mac is keyed BLAKE2b (RFC 7693) over the rest; its key is a token that lives as long as the hub. A frame
  without a good mac never existed: it is counted and dropped.
* Each direction of each peer counts its frames from 1; 0 is the hello that opens a link. A frame of another
  epoch, or with a number seen before, is counted and dropped. A gap raises ProtocolError.
"""

import hmac
import struct
from hashlib import blake2b

import msgspec

from .errors import ProtocolError
from .messages import Message

MAC_LEN = 16
TO_HUB = b"u"
TO_PEER = b"d"

_HEAD = struct.Struct("<cQQB")


class Outbox:
    """Numbers and seals the frames of one direction of one peer."""

    def __init__(self, key: bytes, direction: bytes, epoch: int, peer: str) -> None:
        self._key = key
        self._direction = direction
        self._epoch = epoch
        self._peer = peer.encode()
        self._number = 0

    def seal(self, body: bytes) -> bytes:
        self._number += 1
        return self._frame(self._number, body)

    def hello(self) -> bytes:
        return self._frame(0, b"")

    def _frame(self, number: int, body: bytes) -> bytes:
        head = _HEAD.pack(self._direction, self._epoch, number, len(self._peer)) + self._peer
        return _mac(self._key, head + body) + head + body


class Outboxes:
    """The outboxes of a hub, one for each peer."""

    def __init__(self, key: bytes, epoch: int) -> None:
        self._key = key
        self._epoch = epoch
        self._outboxes: dict[str, Outbox] = {}

    def seal(self, peer: str, body: bytes) -> bytes:
        outbox = self._outboxes.get(peer)
        if outbox is None:
            outbox = self._outboxes[peer] = Outbox(self._key, TO_PEER, self._epoch, peer)
        return outbox.seal(body)


class Inbox:
    """Opens the frames of one direction: checks mac, epoch and order; counts what it drops."""

    def __init__(self, key: bytes, direction: bytes, epoch: int) -> None:
        self.num_ignored = 0
        self._key = key
        self._direction = direction
        self._epoch = epoch
        self._last: dict[str, int] = {}
        self._greeted: set[str] = set()
        self._decoder = msgspec.msgpack.Decoder(Message)

    def open(self, frame: bytes) -> tuple[str, Message | None] | None:
        """(peer, message); (peer, None) for a first hello; None for a frame that counts as never sent.

        Raises ProtocolError if an authentic frame leaves a gap or is not a message.
        """
        head_end = MAC_LEN + _HEAD.size
        if len(frame) < head_end or not hmac.compare_digest(
            frame[:MAC_LEN], _mac(self._key, frame[MAC_LEN:])
        ):
            return self._ignore()
        direction, epoch, number, peer_len = _HEAD.unpack_from(frame, MAC_LEN)
        peer = frame[head_end : head_end + peer_len].decode()
        if direction != self._direction or epoch != self._epoch:
            return self._ignore()
        if number == 0:
            return self._greet(peer)
        expected = self._last.get(peer, 0) + 1
        if number < expected:
            return self._ignore()
        if number > expected:
            raise ProtocolError(f"{peer}: message {expected} is missing, {number} came")
        self._last[peer] = number
        try:
            return peer, self._decoder.decode(memoryview(frame)[head_end + peer_len :])
        except msgspec.DecodeError as error:
            raise ProtocolError(f"{peer}: message {number} is none of ours: {error}") from None

    def _greet(self, peer: str) -> tuple[str, None] | None:
        if peer in self._greeted:  # a replayed hello must not steal the peer's messages
            return self._ignore()
        self._greeted.add(peer)
        return peer, None

    def _ignore(self) -> None:
        self.num_ignored += 1


def _mac(key: bytes, payload: bytes) -> bytes:
    return blake2b(payload, key=key, digest_size=MAC_LEN).digest()
