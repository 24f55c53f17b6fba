"""Which proposer the shards run, and how often a shard that died is started again."""

from collections import deque
from pathlib import Path

import msgspec

from .errors import ConfigError

MAX_RESTARTS = 5
RESTART_WINDOW_S = 300.0
LONGEST_PAUSE_S = 8.0


class DrafterChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A drafter that was found and fits the target. No choice at all means serving without shards."""

    name: str  # as configured
    path: Path | None = None  # of a checkpoint; None: prompt lookup, which needs none
    tap_layer_ids: tuple[int, ...] = ()  # target blocks it reads; none: it keeps no context


def shard_peer(shard: int, life: int) -> str:
    """The name on the channel of one life of a shard."""
    return f"shard{shard}.{life}"


class Restarts:
    """When one shard may come back: at once, then after growing pauses, and no more after too many losses."""

    def __init__(self) -> None:
        self._lost_at: deque[float] = deque()

    def after_loss(self, now: float) -> float | None:
        """The time of the next start, None to leave the shard absent."""
        while self._lost_at and now - self._lost_at[0] > RESTART_WINDOW_S:
            self._lost_at.popleft()
        num_recent = len(self._lost_at)
        self._lost_at.append(now)
        if num_recent >= MAX_RESTARTS:
            return None
        return now + (min(LONGEST_PAUSE_S, 2.0 ** (num_recent - 1)) if num_recent else 0.0)


def check_swap(choice: DrafterChoice | None, tap_layer_ids: tuple[int, ...]) -> None:
    """Raise ConfigError when `choice` reads other tap rows than the ranks write, or in another order."""
    if choice is not None and choice.tap_layer_ids and choice.tap_layer_ids != tap_layer_ids:
        read, written = (", ".join(map(str, ids)) or "none" for ids in (choice.tap_layer_ids, tap_layer_ids))
        raise ConfigError(
            f"drafter {choice.name} reads the target after blocks {read}, but the ranks of this engine tap "
            f"blocks {written}; restart the server with --drafter {choice.name}"
        )
