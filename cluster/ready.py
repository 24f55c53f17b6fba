"""When an epoch counts as up: the scheduler has heard from every rank and reports to the server."""

from collections.abc import Callable

from .channel import Link
from .errors import EngineError, ProtocolError
from .messages import Failed, Stats

_POLL_S = 0.1


def wait_until_up(link: Link, check: Callable[[], None], is_up: Callable[[Stats], bool]) -> None:
    """Block until the scheduler says over the server's `link` what `is_up` waits for: ranks, or shards too.

    `check` runs between looks and raises what has gone wrong elsewhere; the scheduler's own start timeout
    bounds the wait for ranks that only hang.
    """
    while True:
        message = link.recv(_POLL_S)
        check()
        match message:
            case None:
                continue
            case Stats():
                if is_up(message):
                    return
            case Failed(source=source, reason=reason):
                raise EngineError(f"{source}: {reason}")
            case _:
                raise ProtocolError(f"{type(message).__name__} came before the engine was up")


def ready_peers(stats: Stats) -> set[str]:
    """The lives of shards that draft."""
    return {shard.peer for shard in stats.shards if shard.state == "ready"}
