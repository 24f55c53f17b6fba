"""The one shard of an engine in one process: a thread per life, which the engine survives.

    load the proposer -> wait for the rank's tap scratch -> ShardReady, plans -> Shutdown, or a failure:
    ShardLost to the scheduler, and the next life after a pause

A swap loads beside the life that serves and starts a second thread; the scheduler then ends the first.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from torch import Tensor

from ..cluster.channel import Link, LocalHub
from ..cluster.drafter_choice import DrafterChoice, Restarts, shard_peer
from ..cluster.errors import EngineStopped, UserError
from ..cluster.messages import ShardLost, Stats
from ..cluster.ready import ready_peers
from ..drafter.loop import run_shard
from ..drafter.proposer import Proposer
from ..drafter.runner import ShardRunner

MakeProposer = Callable[[DrafterChoice], Proposer]

log = logging.getLogger(__name__)


class LocalShard:
    """Owns the threads of shard 0. Only the life that is current may be lost; earlier ones just end."""

    def __init__(
        self,
        hub: LocalHub,
        server: Link,
        taps: "Future[Tensor | None]",
        make_proposer: MakeProposer,
        *,
        check: bool,
    ) -> None:
        """`taps` resolves to the rank's scratch; `server` is the link on which losses are told."""
        self.failure: UserError | None = None  # the mistake that keeps it from loading
        self._hub = hub
        self._server = server
        self._taps = taps
        self._make_proposer = make_proposer
        self._check = check
        self._restarts = Restarts()
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._choice: DrafterChoice | None = None
        self._num_lives = 0
        self._current: str | None = None  # the peer name of the life that counts
        self._links: dict[str, Link] = {}
        self._threads: dict[str, threading.Thread] = {}  # by the life each runs, or ran last

    def start(self, choice: DrafterChoice) -> None:
        """Begin the first life in a thread of its own."""
        with self._lock:
            self._choice = choice
            self._begin(None)

    def swap(self, choice: DrafterChoice | None) -> str | None:
        """Load, then let the new life take over; returns its peer. An error leaves the old one serving."""
        proposer = None if choice is None else self._make_proposer(choice)
        with self._lock:
            self._choice = choice
            if proposer is not None:
                self._begin(proposer)
            elif self._current is not None:
                self._server.send(ShardLost(self._current, is_dismissed=True))
                self._links[self._current].close()
                self._current = None
            return self._current

    def is_settled(self, stats: Stats) -> bool:
        """Whether the scheduler uses the current life, or there is none to come."""
        return self._current is None or self._current in ready_peers(stats)

    def replace(self, peer: str) -> None:
        """Give up a life that does not answer: its thread cannot be ended, so it is left behind."""
        with self._lock:
            if peer == self._current:
                self._links[peer].close()
                del self._threads[peer]
                self._current = None
                if not self._is_closing.is_set() and self._restarts.after_loss(time.monotonic()) is not None:
                    self._begin(None)

    def close(self) -> None:
        """No life begins from now on; those that run end with the hub."""
        self._is_closing.set()

    def join(self, timeout_s: float) -> list[str]:
        """The names of threads that have not ended by then."""
        deadline = time.monotonic() + timeout_s
        threads = list(self._threads.values())
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in threads if thread.is_alive()]

    def _begin(self, proposer: Proposer | None) -> None:
        """The next life, in a new thread; the lock is held."""
        peer = self._name_life()
        assert self._choice is not None
        thread = threading.Thread(
            target=self._live, args=(peer, self._choice, proposer), name=f"engine {peer}", daemon=True
        )
        self._threads[peer] = thread
        thread.start()

    def _name_life(self) -> str:
        peer = self._current = shard_peer(0, self._num_lives)
        self._num_lives += 1
        self._links[peer] = self._hub.link(peer)
        return peer

    def _live(self, peer: str, choice: DrafterChoice, proposer: Proposer | None) -> None:
        """One life after another, until one is ended on purpose."""
        following: str | None = peer
        while following is not None:
            peer, following = following, None
            try:
                self._serve(peer, proposer or self._make_proposer(choice))
            except EngineStopped:
                return  # the hub or this life's link was closed: whoever closed it knows why
            except Exception as error:
                following, proposer = self._after_loss(peer, error), None

    def _serve(self, peer: str, proposer: Proposer) -> None:
        taps = self._taps.result() if proposer.tap_layer_ids else None
        run_shard(self._links[peer], ShardRunner(0, proposer, taps, check=self._check))

    def _after_loss(self, peer: str, error: Exception) -> str | None:
        """Tell of it and wait; the name of the life to go on with, if any."""
        with self._lock:
            if peer != self._current or self._is_closing.is_set():
                return None
            log.warning("%s is lost: %s: %s", peer, type(error).__name__, error)
            self._server.send(ShardLost(peer))
            if isinstance(error, UserError):
                self.failure, self._current = error, None
                return None
            now = time.monotonic()
            starts_at = self._restarts.after_loss(now)
            if starts_at is None:
                log.error("shard0 was lost too often and stays absent")
                self._current = None
                return None
        self._is_closing.wait(starts_at - now)
        with self._lock:
            if peer != self._current or self._is_closing.is_set():
                return None  # swapped meanwhile
            following = self._name_life()
            self._threads[following] = self._threads.pop(peer)
            return following
