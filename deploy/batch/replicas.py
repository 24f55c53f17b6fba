"""A batch on Ray: engines as actors, as many as there is work and room for, fed line by line.

Each replica is an actor in bundle 0 of a placement group of its own, as a Serve replica is; its scheduler and
ranks go into the same group and end with it. Lines wait in one place and go to the replica with the fewest
under way, so a slow replica takes fewer and a lost one's lines go to the others.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...cluster.config import Config
from ...cluster.errors import ConfigError, EngineError, PacelineError, UserError
from ...cluster.model_source import resolve_model
from ...cluster.placement import REPLICA_CPUS, bundles, rank_device, strategy_for
from ..api.app import create_app
from ..api.front import front_of
from ..assemble import start_engine
from ..engine import Engine
from .answers import local_answer
from .job import Answer, AnswererLost, Line, Response

TEND_S = 0.5  # how often the number of replicas is looked at
IDLE_S = 10.0  # after which a replica above the least number is given back
CLOSE_S = 30.0
MAX_LOSSES = 3  # of replicas, without a line answered in between

log = logging.getLogger(__name__)


class Replica:
    """The actor: an engine and the application over it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._engine: Engine | None = None
        self._answer: Answer | None = None

    async def start(self) -> None:
        """Load the model. Raises what `start_engine` raises."""
        config = self._config
        path = await asyncio.to_thread(resolve_model, config.model.model, config.model.revision)
        self._engine = await start_engine(config, path)
        self._answer = local_answer(create_app(front_of(config, path, self._engine, "batch")))

    async def answer(self, line: Line) -> Response:
        assert self._answer is not None, "start first"
        return await self._answer(line)

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()


@dataclass(eq=False)
class _Member:
    """A replica as its pool knows it."""

    group: PlacementGroup
    actor: Any = None
    is_up: bool = False
    num_running: int = 0  # lines under way
    idle_since: float = 0.0


class ReplicaPool:
    """Between `num_min` and `num_max` replicas, each with up to `num_slots` lines under way."""

    def __init__(self, config: Config, *, num_min: int, num_max: int, num_slots: int) -> None:
        assert 1 <= num_min <= num_max
        self._config = config
        self._num_min = num_min
        self._num_max = num_max
        self._num_slots = num_slots
        self._members: list[_Member] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._num_waiting = 0
        self._num_losses = 0
        self._failure: PacelineError | None = None
        self._news = asyncio.Condition()

    @property
    def num_up(self) -> int:
        return sum(member.is_up for member in self._members)

    async def answer(self, line: Line) -> Response:
        """From whichever replica has the most room. Raises AnswererLost when that dies under the line."""
        member = await self._take()
        try:
            response = await member.actor.answer.remote(line)
            if response["status_code"] == 503:
                # Its engine has given up: always free, it would be given every line, and fail it.
                await self._lose(member, EngineError("its engine serves no more"))
                raise AnswererLost("a replica was lost")
            self._num_losses = 0
            return response
        except RayError as error:
            await self._lose(member, error)
            raise AnswererLost(f"a replica was lost: {_first_line(error)}") from None
        finally:
            member.num_running -= 1
            member.idle_since = time.monotonic()
            async with self._news:
                self._news.notify()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Answer]:
        """Start, tend and end the replicas. Raises what keeps the first from starting."""
        tending: asyncio.Task[None] | None = None
        try:
            for _ in range(self._num_min):
                self._add()
            await asyncio.wait(self._starting, return_when=asyncio.FIRST_COMPLETED)
            if self._failure is not None:
                raise self._failure
            tending = asyncio.create_task(self._tend())
            yield self.answer
        finally:
            for task in [*self._starting, *([] if tending is None else [tending])]:
                task.cancel()
            await asyncio.gather(*(self._end(member) for member in list(self._members)))

    async def _take(self) -> _Member:
        async with self._news:
            self._num_waiting += 1
            try:
                while True:
                    if self._failure is not None:
                        raise self._failure
                    free = [m for m in self._members if m.is_up and m.num_running < self._num_slots]
                    if free:
                        member = min(free, key=lambda m: m.num_running)
                        member.num_running += 1
                        return member
                    await self._news.wait()
            finally:
                self._num_waiting -= 1

    async def _tend(self) -> None:
        """One more replica while lines wait; one less while one idles."""
        while True:
            await asyncio.sleep(TEND_S)
            if len(self._members) < (self._num_max if self._num_waiting else self._num_min):
                if not self._starting:
                    self._add()
                continue
            for member in [m for m in self._members if m.is_up and not m.num_running]:
                if time.monotonic() - member.idle_since > IDLE_S and self.num_up > self._num_min:
                    log.info("a replica is idle and given back")
                    await self._end(member)

    def _add(self) -> None:
        engine = self._config.engine
        device = rank_device(engine)
        wanted = bundles(engine.tensor_parallel_size, device)
        member = _Member(placement_group(wanted, strategy=strategy_for(engine, device)))
        self._members.append(member)
        task = asyncio.create_task(self._start(member))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start(self, member: _Member) -> None:
        try:
            # The first must have its place in time; a later one may wait until a cluster has grown.
            patience_s = None if self.num_up else self._config.engine.start_timeout_s
            async with asyncio.timeout(patience_s):
                await member.group.ready()
            strategy = PlacementGroupSchedulingStrategy(member.group, 0)
            options = {"num_cpus": REPLICA_CPUS, "scheduling_strategy": strategy, "max_concurrency": 1000}
            member.actor = ray.remote(Replica).options(**options).remote(self._config)
            await member.actor.start.remote()
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            if self.num_up:
                # what serves goes on; what could not be had once is not asked for again
                self._num_max = max(1, self.num_up)
                self._num_min = min(self._num_min, self._num_max)
                await self._lose(member, error)
            elif isinstance(cause, UserError):
                await self._fail(cause)
            else:
                await self._lose(member, error)
        except TimeoutError:
            await self._fail(ConfigError("the cluster has no room for an engine; add nodes or free some"))
        else:
            member.is_up, member.idle_since = True, time.monotonic()
            async with self._news:
                self._news.notify_all()

    async def _lose(self, member: _Member, error: Exception) -> None:
        """Forget a replica that died, with all that is left of it; `_tend` starts another."""
        if member not in self._members:
            return
        self._members.remove(member)
        member.is_up = False
        remove_placement_group(member.group)
        self._num_losses += 1
        log.warning("a replica was lost: %s", _first_line(error))
        if self._num_losses >= MAX_LOSSES and not self.num_up:
            last = _first_line(error)
            await self._fail(
                EngineError(f"{self._num_losses} replicas were lost, last: {last}; run it again")
            )

    async def _fail(self, error: PacelineError) -> None:
        self._failure = self._failure or error
        async with self._news:
            self._news.notify_all()

    async def _end(self, member: _Member) -> None:
        was_up, member.is_up = member.is_up, False
        if member in self._members:
            self._members.remove(member)
        try:
            if was_up:
                with contextlib.suppress(RayError, TimeoutError):
                    await asyncio.wait_for(member.actor.close.remote(), CLOSE_S)
        finally:
            remove_placement_group(member.group)  # takes its actors with it


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
