"""The engine as its server sees it: streams of tokens that outlive the processes behind them.

    stream() opens a journal and submits it -> a reader thread takes the scheduler's messages from the link ->
    one callback per message pushes outputs into journals -> each stream yields its own

An epoch is one life of scheduler and ranks. When it is lost (a rank died, a step overran its deadline, the
scheduler fell silent) the supervisor tears it down, launches the next and submits every open journal again,
as prompt + emitted tokens: a stream pauses, and no token is lost or repeated. One loss more than
`MAX_REBUILDS` within `REBUILD_WINDOW_S` and the engine gives up: every stream ends with EngineError.

All methods belong to one event loop. What starts processes is a Launcher: Ray's gang, or threads of this
process.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence

from ..cluster.channel import Link
from ..cluster.config import Config
from ..cluster.drafter_choice import DrafterChoice
from ..cluster.errors import EngineError, EngineStopped, ProtocolError, RankLost, RequestError
from ..cluster.messages import (
    Cancel,
    Failed,
    Message,
    Output,
    Outputs,
    Refused,
    SamplingParams,
    ShardSilent,
    Stats,
    Submit,
)
from ..cluster.ready import ready_peers
from .journal import Journal
from .life import Launcher, Life

MAX_REBUILDS = 3
REBUILD_WINDOW_S = 300.0
SILENCE_S = 15.0  # the scheduler speaks at least once a second; silent for this long it counts as hung
POLL_S = 0.2  # how soon the reader thread notices that it shall end
SWAP_S = 30.0  # for a drafter that has loaded to get its first plan
RETRY_S = 1.0  # before a resumed request that met a full queue is submitted again

log = logging.getLogger(__name__)


class Engine:
    """Owns the journals, the current epoch and the latest Stats. Made by `assemble`."""

    def __init__(self, launcher: Launcher, config: Config) -> None:
        self.epoch = -1
        self.num_rebuilds = 0
        self._launcher = launcher
        self._max_backlog = config.server.max_stream_backlog
        self._step_deadline_s = config.engine.step_deadline_s
        self._journals: dict[str, Journal] = {}
        self._life: Life | None = None
        self._launching: asyncio.Future[Life] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._lost: asyncio.Future[EngineError] | None = None
        self._rebuilt_at: deque[float] = deque()
        self._swapping = asyncio.Lock()
        self._end: EngineError | None = None  # why no stream can be served any more
        self._stats = Stats()
        self._stats_at = 0.0
        self._progress_at = 0.0

    async def start(self) -> None:
        """Launch the first epoch; a UserError of loading comes out as it is."""
        life = await self._launch()
        self._supervisor = asyncio.create_task(self._supervise(life), name="engine supervisor")

    async def stream(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        *,
        cache_salt: str = "",
        max_draft_tokens: int | None = None,
        is_traced: bool = False,
    ) -> AsyncGenerator[Output, None]:
        """The outputs of one request, in order; the last has a finish_reason.

        A traced request's outputs say what their steps took. Closing the iterator, or cancelling its task,
        cancels the request. Raises RequestError when it is refused or its reader too slow, EngineError when
        the engine has given up. `request_id` must be new.
        """
        if self._end is not None:
            raise self._end
        assert request_id not in self._journals, f"request id {request_id} is taken"
        submit = Submit(
            request_id=request_id,
            prompt_ids=list(prompt_ids),
            params=params,
            priority=priority,
            cache_salt=cache_salt,
            max_draft_tokens=max_draft_tokens,
            is_traced=is_traced,
        )
        journal = self._journals[request_id] = Journal(submit, self._max_backlog)
        self._submit(journal)
        try:
            while True:
                output = await journal.next()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self._drop(journal)

    @property
    def stats(self) -> Stats:
        """The scheduler's latest report; its counters start again with each epoch."""
        return self._stats

    @property
    def num_streams(self) -> int:
        """Requests that have not ended, running or waiting."""
        return len(self._journals)

    def check_health(self) -> None:
        """Raise EngineError unless the engine serves, or is being rebuilt and will.

        Serving is proven by steps, not by being alive: with work at hand, steps must advance.
        """
        if self._end is not None:
            raise self._end
        if self._life is None:
            return
        now = time.monotonic()
        if now - self._stats_at > SILENCE_S:
            raise EngineError(f"the scheduler has not reported for {now - self._stats_at:.0f} s")
        if now - self._progress_at > self._step_deadline_s + SILENCE_S:
            raise EngineError(f"no step has ended for {now - self._progress_at:.0f} s although there is work")

    async def swap_drafter(self, choice: DrafterChoice | None) -> None:
        """Draft with another drafter, or with none, from some step on; streams go on and keep their tokens.

        Returns when the scheduler uses it. Raises UserError, with the old one serving on, when the new one
        does not load or reads other tap rows, and EngineError while there is no engine to do it.
        """
        async with self._swapping:
            if self._end is not None:
                raise self._end
            if self._life is None:
                raise EngineError("the engine is being rebuilt; swap its drafter when it serves again")
            epoch = self.epoch
            peers = await asyncio.to_thread(self._launcher.swap_drafter, choice)
            deadline = time.monotonic() + SWAP_S
            while self.epoch == epoch and not peers <= ready_peers(self._stats):
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"{', '.join(sorted(peers))} loaded, but drafted nothing in {SWAP_S:.0f} s"
                    )
                await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        """End streams with EngineStopped and every process of the engine; returns when they are gone."""
        self._stop_serving(EngineStopped("the engine was shut down"))
        self._launcher.abort()
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
            self._supervisor = None
        if self._launching is not None:
            with contextlib.suppress(Exception):  # whatever broke that launch, it has cleaned up
                self._life = await self._launching
            self._launching = None
        try:
            if self._life is not None:
                life, self._life = self._life, None
                await asyncio.to_thread(life.close)
        finally:
            await asyncio.to_thread(self._launcher.close)

    async def _launch(self) -> Life:
        self.epoch += 1
        self._launching = asyncio.ensure_future(asyncio.to_thread(self._launcher.launch, self.epoch))
        life = await asyncio.shield(self._launching)  # a thread cannot be cancelled: close() awaits it
        self._launching = None
        self._life = life
        return life

    async def _supervise(self, life: Life) -> None:
        try:
            while True:
                error = await self._serve(life)
                log.warning("epoch %d is lost: %s", self.epoch, error)
                await asyncio.shield(asyncio.to_thread(life.close))
                self._life = None
                life = await self._rebuild(error)
        except EngineError as error:
            log.error("the engine gives up: %s", error)
            self._stop_serving(error)
        except Exception as error:
            log.exception("the engine's supervisor failed")
            self._stop_serving(EngineError(f"the engine's supervisor failed: {error}"))

    async def _serve(self, life: Life) -> EngineError:
        """Serve in this epoch until it is lost; returns why."""
        loop = asyncio.get_running_loop()
        lost = self._lost = loop.create_future()
        now = time.monotonic()
        self._stats, self._stats_at, self._progress_at = Stats(), now, now
        is_stopping = threading.Event()
        reader = threading.Thread(
            target=self._read, args=(life.link, loop, lost, is_stopping), name="engine reader", daemon=True
        )
        reader.start()

        def on_loss(error: EngineError) -> None:
            loop.call_soon_threadsafe(_resolve, lost, error)

        life.watch(on_loss)
        try:
            for journal in list(self._journals.values()):
                self._submit(journal)
            return await lost
        finally:
            is_stopping.set()
            reader.join()  # at most POLL_S; the link must not be closed under it

    async def _rebuild(self, error: EngineError) -> Life:
        """The next epoch; raises EngineError when too many were lost."""
        while True:
            now = time.monotonic()
            while self._rebuilt_at and now - self._rebuilt_at[0] > REBUILD_WINDOW_S:
                self._rebuilt_at.popleft()
            if len(self._rebuilt_at) >= MAX_REBUILDS:
                raise EngineError(
                    f"the engine was lost {MAX_REBUILDS + 1} times in {REBUILD_WINDOW_S:.0f} s, last: {error}"
                )
            self._rebuilt_at.append(now)
            self.num_rebuilds += 1
            try:
                life = await self._launch()
            except Exception as failure:
                log.warning("epoch %d did not start: %s", self.epoch, failure)
                error = EngineError(f"{type(failure).__name__}: {failure}")
                self._launching = None
            else:
                log.warning("epoch %d serves; %d streams resume", self.epoch, len(self._journals))
                return life

    def _read(
        self,
        link: Link,
        loop: asyncio.AbstractEventLoop,
        lost: "asyncio.Future[EngineError]",
        is_stopping: threading.Event,
    ) -> None:
        """The reader thread: one callback in the loop per message."""
        heard_at = time.monotonic()
        try:
            while not is_stopping.is_set():
                message = link.recv(POLL_S)
                if message is not None:
                    heard_at = time.monotonic()
                    loop.call_soon_threadsafe(self._take, lost, message)
                elif time.monotonic() - heard_at > SILENCE_S:
                    raise RankLost(f"the scheduler has been silent for {SILENCE_S:.0f} s")
        except EngineError as error:
            loop.call_soon_threadsafe(_resolve, lost, error)

    def _take(self, lost: "asyncio.Future[EngineError]", message: Message) -> None:
        if lost.done():
            return  # said before the epoch was lost; its journals are, or will be, submitted again
        match message:
            case Outputs(outputs):
                for output in outputs:
                    self._take_output(lost, output)
            case Stats():
                now = time.monotonic()
                if not message.has_work or message.num_steps != self._stats.num_steps:
                    self._progress_at = now
                self._stats, self._stats_at = message, now
            case Refused():
                self._take_refusal(message)
            case ShardSilent(peer=peer):
                if self._life is not None:
                    log.warning("%s did not answer within the draft deadline and is replaced", peer)
                    self._life.replace_shard(peer)
            case Failed(source=source, reason=reason):
                _resolve(lost, EngineError(f"{source}: {reason}"))
            case _:
                _resolve(lost, ProtocolError(f"the scheduler sent the server {type(message).__name__}"))

    def _take_output(self, lost: "asyncio.Future[EngineError]", output: Output) -> None:
        journal = self._journals.get(output.request_id)
        if journal is None or journal.is_finished:
            return  # it was cancelled while this was under way
        if output.first_index != len(journal.emitted_ids):
            have, got = len(journal.emitted_ids), output.first_index
            _resolve(lost, ProtocolError(f"{output.request_id}: token {have} was due, token {got} came"))
            return
        journal.push(output)
        if journal.is_finished and output.finish_reason is None:
            self._send(Cancel(request_id=journal.request_id))

    def _take_refusal(self, refused: Refused) -> None:
        journal = self._journals.get(refused.request_id)
        if journal is None or journal.is_finished:
            return
        if refused.status == 429 and journal.num_submits > 1:
            # it was admitted in an earlier epoch; all come back at once, and the queue is only so long
            asyncio.get_running_loop().call_later(RETRY_S, self._retry, journal, self.epoch)
            return
        journal.fail(
            RequestError(
                refused.message,
                status=refused.status,
                code=refused.code,
                error_type="rate_limit_error" if refused.status == 429 else "invalid_request_error",
                retry_after_s=refused.retry_after_s,
            )
        )

    def _retry(self, journal: Journal, epoch: int) -> None:
        is_open = self._journals.get(journal.request_id) is journal and not journal.is_finished
        if is_open and epoch == self.epoch:
            self._submit(journal)

    def _submit(self, journal: Journal) -> None:
        """To the scheduler if there is one; else the next epoch will get it."""
        if self.is_serving and not journal.is_finished:
            self._send(journal.resume())

    def _drop(self, journal: Journal) -> None:
        del self._journals[journal.request_id]
        if not journal.is_finished:
            journal.is_finished = True
            self._send(Cancel(request_id=journal.request_id))

    @property
    def is_serving(self) -> bool:
        """Whether requests reach a scheduler now; while an epoch is being rebuilt they wait."""
        return self._life is not None and self._lost is not None and not self._lost.done()

    def _send(self, message: Message) -> None:
        if not self.is_serving:
            return
        assert self._life is not None
        assert self._lost is not None
        try:
            self._life.link.send(message)
        except EngineError as error:
            _resolve(self._lost, error)

    def _stop_serving(self, end: EngineError) -> None:
        if self._end is None:
            self._end = end
        for journal in self._journals.values():
            journal.fail(end)


def _resolve(lost: "asyncio.Future[EngineError]", error: EngineError) -> None:
    if not lost.done():
        lost.set_result(error)
