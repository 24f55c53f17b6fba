"""Where a hub is found, and the limits that all transports keep."""

import time

import msgspec

MAX_MESSAGE_BYTES = 256 << 20
MAX_QUEUED_MESSAGES = 16384  # per peer and direction; a peer this far behind is lost
LINGER_S = 0.5  # how long close() may wait to hand over what was sent


class Address(msgspec.Struct, frozen=True):
    """How a peer finds the hub, and proves that it may speak. The token is a secret: never log an address."""

    endpoint: str
    token: str
    epoch: int

    def __repr__(self) -> str:
        return f"Address(endpoint={self.endpoint!r}, epoch={self.epoch})"


def deadline_of(timeout_s: float | None) -> float | None:
    """When a wait of so long that begins now will end; None never."""
    return None if timeout_s is None else time.monotonic() + timeout_s


def left_s(deadline: float | None) -> float | None:
    """Seconds until then, at least 0."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())
