"""The scheduler's shell without Ray: it turns a hub's messages into events and performs the commands.

    wait for Ready from every rank -> Stats to the server (its first: the engine is up)
    then, until Shutdown: receive, gather a step's results from all ranks, decide, send the plan, then outputs

Clocks live here. A step that outlasts its deadline and a rank that reports failure end the loop with an
error, of which the server is told first. The ranks are left as they are, for the caller to inspect and end.
Nothing that a shard says or fails to say ends the loop: shards may come, fail and be silent at any time.
"""

import time
from collections.abc import Sequence

import msgspec

from ..cluster.channel import Hub
from ..cluster.config import EngineConfig
from ..cluster.errors import EngineError, ProtocolError, RankLost, StepDeadlineExceeded
from ..cluster.messages import (
    Cancel,
    Drafts,
    Failed,
    Message,
    Ready,
    ShardLost,
    ShardReady,
    Shutdown,
    StepPlan,
    StepResult,
    Submit,
)
from .events import DraftsArrived, DraftsOverdue, Event, ShardUp, ToShard
from .limits import Limits
from .state import Scheduler

SERVER = "server"
SCHEDULER = "scheduler"
SHARD = "shard"  # shards' peers are "shard{shard}.{life}"
HEARTBEAT_S = 0.5  # half of what the server is promised, so that a late one is still in time


def run_scheduler(hub: Hub, ranks: Sequence[str], engine: EngineConfig, max_model_len: int) -> None:
    """Serve the peer "server" with these ranks, rank 0 first, until it sends Shutdown; they are sent it too.

    Raises RankLost, StepDeadlineExceeded or ProtocolError when the engine cannot go on in this epoch.
    """
    try:
        backlog: list[Event] = []
        ready = _wait_ready(hub, ranks, engine.start_timeout_s, backlog)
        if ready is not None:
            num_pages = min(rank.num_pages for rank in ready.values())
            limits = Limits.of(engine, max_model_len=max_model_len, num_pages=num_pages)
            scheduler = Scheduler(limits, check=engine.check_invariants)
            scheduler.learn(ready[ranks[0]].step_costs)
            loop = _Loop(hub, ranks, scheduler, engine.step_deadline_s, engine.draft_deadline_s)
            loop.run(backlog)
            hub.broadcast(scheduler.shard_peers, Shutdown())
    except Exception as error:
        reason = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
        hub.send(SERVER, Failed(source=SCHEDULER, reason=reason))
        raise
    hub.broadcast(ranks, Shutdown())


def _wait_ready(
    hub: Hub, ranks: Sequence[str], timeout_s: float, backlog: list[Event]
) -> dict[str, Ready] | None:
    """What each rank says of itself, None if the server said Shutdown; early requests go to `backlog`."""
    deadline = time.monotonic() + timeout_s
    found: dict[str, Ready] = {}
    while len(found) < len(ranks):
        match hub.recv(max(0.0, deadline - time.monotonic())):
            case None:
                missing = ", ".join(rank for rank in ranks if rank not in found)
                raise RankLost(f"{missing} did not get ready in {timeout_s:g} s")
            case (peer, Ready() as ready) if peer in ranks:
                found[peer] = ready
            case (peer, Submit() | Cancel() | ShardLost() as event) if peer == SERVER:
                backlog.append(event)
            case (peer, ShardReady() | Failed() as message) if peer.startswith(SHARD):
                backlog.append(ShardUp(peer, message) if isinstance(message, ShardReady) else ShardLost(peer))
            case (peer, Shutdown()) if peer == SERVER:
                return None
            case (peer, message):
                raise _unwelcome(peer, message, ranks)
    return found


class _Loop:
    """Owns the clocks, and those results of the step in flight that have come."""

    def __init__(
        self,
        hub: Hub,
        ranks: Sequence[str],
        scheduler: Scheduler,
        step_deadline_s: float,
        draft_deadline_s: float,
    ) -> None:
        self._hub = hub
        self._ranks = ranks
        self._scheduler = scheduler
        self._step_deadline_s = step_deadline_s
        self._draft_deadline_s = draft_deadline_s
        self._results: dict[str, StepResult] = {}
        self._num_ignored = 0
        self._sent_at = 0.0  # when the plan in flight went out
        self._draft_sent_at = 0.0  # when the shards' plans went out
        self._draft_phase: int | None = None
        self._draft_s = 0.0
        self._plan_s = 0.0
        self._wait_s = 0.0
        self._compute_s = 0.0

    def run(self, backlog: Sequence[Event]) -> None:
        """Serve until Shutdown, beginning with what was asked before the ranks were ready."""
        for event in backlog:
            self._take(event)
        next_heartbeat = 0.0
        while True:
            now = time.monotonic()
            if now >= next_heartbeat:
                self._beat()
                next_heartbeat = now + HEARTBEAT_S
            self._end_overdue_drafts(now)
            match self._hub.recv(max(0.0, min(next_heartbeat - now, self._left_s(now)))):
                case None:
                    pass
                case (peer, StepResult() as result) if peer in self._ranks:
                    self._gather(peer, result)
                case (peer, Submit() | Cancel() | ShardLost() as event) if peer == SERVER:
                    self._take(event)
                case (peer, Drafts() as drafts) if peer.startswith(SHARD):
                    self._take(DraftsArrived(peer, drafts))
                case (peer, ShardReady() as ready) if peer.startswith(SHARD):
                    self._take(ShardUp(peer, ready))
                case (peer, Failed()) if peer.startswith(SHARD):
                    self._take(ShardLost(peer))
                case (peer, Shutdown()) if peer == SERVER:
                    return
                case (peer, message):
                    raise _unwelcome(peer, message, self._ranks)

    def _take(self, event: Event) -> None:
        """Let the state machine decide, and perform what it says in its order."""
        began = time.monotonic()
        commands = self._scheduler.handle(event, began)
        decided = time.monotonic()
        self._plan_s += decided - began
        if self._scheduler.draft_phase != self._draft_phase:
            if self._draft_phase is not None:
                self._draft_s += began - self._draft_sent_at
            self._draft_phase, self._draft_sent_at = self._scheduler.draft_phase, decided
        for command in commands:
            match command:
                case StepPlan():
                    self._hub.broadcast(self._ranks, command)
                    self._sent_at = time.monotonic()
                case ToShard():
                    self._hub.send(command.peer, command.message)
                case _:
                    self._hub.send(SERVER, command)

    def _gather(self, peer: str, result: StepResult) -> None:
        """Settle once every rank has answered: until then one of them may still be writing pages."""
        if result.step != self._scheduler.step_in_flight or peer in self._results:
            self._num_ignored += 1
            return
        self._results[peer] = result
        if len(self._results) < len(self._ranks):
            return
        first = self._results[self._ranks[0]]
        self._results.clear()
        self._wait_s += time.monotonic() - self._sent_at
        self._compute_s += first.compute_s
        self._take(first)

    def _end_overdue_drafts(self, now: float) -> None:
        """Go on without the shards that have been silent for too long."""
        if self._draft_phase is not None and now - self._draft_sent_at >= self._draft_deadline_s:
            self._take(DraftsOverdue(self._draft_phase))

    def _left_s(self, now: float) -> float:
        """Seconds until what is waited for is overdue; raises StepDeadlineExceeded when a step is."""
        if self._draft_phase is not None:
            return self._draft_sent_at + self._draft_deadline_s - now
        step = self._scheduler.step_in_flight
        if step is None:
            return self._step_deadline_s
        left_s = self._sent_at + self._step_deadline_s - now
        if left_s <= 0:
            missing = ", ".join(rank for rank in self._ranks if rank not in self._results)
            raise StepDeadlineExceeded(
                f"{missing} did not answer step {step} within {self._step_deadline_s:g} s"
            )
        return left_s

    def _beat(self) -> None:
        stats = self._scheduler.stats()
        num_ignored = stats.num_ignored_messages + self._num_ignored + self._hub.num_ignored
        self._hub.send(
            SERVER,
            msgspec.structs.replace(
                stats,
                num_ignored_messages=num_ignored,
                plan_s=self._plan_s,
                wait_s=self._wait_s,
                compute_s=self._compute_s,
                draft_s=self._draft_s,
            ),
        )


def _unwelcome(peer: str, message: Message, ranks: Sequence[str]) -> EngineError:
    """The error for what no peer says while all is well."""
    if isinstance(message, Failed) and peer in ranks:
        return RankLost(f"{peer}: {message.reason}")
    return ProtocolError(f"{peer} sent {type(message).__name__}, which is not its to send now")
