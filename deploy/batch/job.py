"""A batch from its file to its results: many requests at once, each answered and kept exactly once.

    lines that have no result yet -> workers -> answer(line) -> results -> a segment every FLUSH_S

Whoever answers (an engine here, a server, replicas on Ray) is a function; nothing here knows which.
"""

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...cluster.errors import EngineError
from .lines import BadLine, Batch, read_batch, read_lines
from .segments import Result, Segments

FLUSH_S = 1.0  # what a crash may cost
FLUSH_LINES = 256
MAX_ATTEMPTS = 5
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
RETRIED = (408, 429, 500, 502, 503, 504)

Line = dict[str, Any]  # {"custom_id", "method", "url", "body"}
Response = dict[str, Any]  # {"status_code", "request_id", "body"}
Answer = Callable[[Line], Awaitable[Response]]


class AnswererLost(EngineError):
    """Whoever answers is not there, or not able to; no line is to blame."""


@dataclass(slots=True)
class Totals:
    """How far a batch is. Of `num_lines` some are done, well or not, and the rest is to come."""

    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0  # refused by the server, or bad lines
    num_resumed: int = 0  # of those done: in an earlier run
    prompt_tokens: int = 0  # of this run, like all below
    completion_tokens: int = 0
    seconds: float = 0.0

    @property
    def is_complete(self) -> bool:
        return self.num_completed + self.num_failed == self.num_lines

    def count(self, *, is_failed: bool) -> None:
        if is_failed:
            self.num_failed += 1
        else:
            self.num_completed += 1


async def run_batch(
    lines: Path,
    out_dir: Path,
    answer: Answer,
    *,
    concurrency: int,
    progress: Callable[[Totals], None] = lambda _: None,
    stopping: asyncio.Event | None = None,
    grace_s: float = 2.0,
    is_ordered: bool = False,
) -> Totals:
    """Answer what `out_dir` has no result of yet; when all have one, output.jsonl and errors.jsonl are there.

    `answer` takes a line and gives `{"status_code", "request_id", "body"}`; statuses that may pass are tried
    again. It raises AnswererLost when no line can be answered now, which ends the run after a few attempts
    with everything kept. `progress` is called after every result. After `stopping` is set no line is begun,
    and those under way have `grace_s`; the totals then are not complete. Cancelling also keeps what is done.

    Raises ConfigError for files that cannot be used, AnswererLost as said.
    """
    batch = await asyncio.to_thread(read_batch, lines)
    segments = Segments(out_dir, batch.digest)
    try:
        run = _Run(batch, segments, answer, progress, stopping or asyncio.Event(), grace_s)
        await run.work(concurrency)
        if run.totals.is_complete:
            order = [place.custom_id for place in batch.places] if is_ordered else None
            await asyncio.to_thread(segments.finish, order, [_bad(line) for line in batch.bad_lines])
        return run.totals
    finally:
        segments.close()


class _Run:
    """One run over one batch."""

    def __init__(
        self,
        batch: Batch,
        segments: Segments,
        answer: Answer,
        progress: Callable[[Totals], None],
        stopping: asyncio.Event,
        grace_s: float,
    ) -> None:
        self.totals = Totals(num_lines=len(batch.places) + len(batch.bad_lines))
        self._segments = segments
        self._answer = answer
        self._progress = progress
        self._stopping = stopping
        self._grace_s = grace_s
        self._unsaved: list[Result] = []
        self._shall_save = asyncio.Event()
        self._is_over = False
        self._began = time.monotonic()
        done: set[str] = set()
        for result in segments.done():
            done.add(result.custom_id)
            self.totals.count(is_failed=result.is_failed)
        self.totals.num_resumed = len(done)
        self.totals.num_failed += len(batch.bad_lines)
        self._left = read_lines(batch, [place for place in batch.places if place.custom_id not in done])

    async def work(self, concurrency: int) -> None:
        """Returns when no line is left, or in time after `stopping`; in any case what was done is kept."""
        self._progress(self.totals)
        saver = asyncio.create_task(self._save())
        workers = [asyncio.create_task(self._ask()) for _ in range(concurrency)]
        working = asyncio.ensure_future(asyncio.gather(*workers))  # the first that fails ends it
        stopper = asyncio.create_task(self._stop(workers))
        try:
            await asyncio.wait((working, saver), return_when=asyncio.FIRST_COMPLETED)
            if working.done() and not self._stopping.is_set():
                working.result()
        finally:
            for task in (working, stopper, *workers):
                task.cancel()
            await asyncio.gather(working, stopper, *workers, return_exceptions=True)
            self._is_over = True
            self._shall_save.set()
            await saver

    async def _stop(self, workers: "list[asyncio.Task[None]]") -> None:
        await self._stopping.wait()
        await asyncio.sleep(self._grace_s)
        for worker in workers:
            worker.cancel()

    async def _ask(self) -> None:
        """A worker: line after line, as long as there are any."""
        while not self._stopping.is_set() and (line := next(self._left, None)) is not None:
            response = await self._answered(line)
            result = _result(line["custom_id"], response)
            self._unsaved.append(result)
            self._count(result)
            if len(self._unsaved) >= FLUSH_LINES:
                self._shall_save.set()

    async def _save(self) -> None:
        """The only one that writes, until the run is over; never cancelled, so no write is left half done."""
        while not (self._is_over and not self._unsaved):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self._shall_save.wait()
            self._shall_save.clear()
            if self._unsaved:
                results, self._unsaved = self._unsaved, []
                try:
                    await asyncio.to_thread(self._segments.append, results)
                except OSError as error:
                    raise EngineError(f"results cannot be written ({error}); mend it and run again") from None

    async def _answered(self, line: Line) -> Response:
        num_attempts = 0
        while True:
            num_attempts += 1
            try:
                response = await self._answer(line)
            except AnswererLost:
                if num_attempts == MAX_ATTEMPTS:
                    raise
            else:
                status = response["status_code"]
                if status not in RETRIED:
                    return response
                if num_attempts >= MAX_ATTEMPTS and status != 429:  # a full queue is no failure
                    if status == 503:
                        raise AnswererLost(_message(response))
                    return response
            pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(num_attempts - 1, 16))
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    def _count(self, result: Result) -> None:
        self.totals.count(is_failed=result["error"] is not None)
        usage = result["response"]["body"].get("usage") or {}
        self.totals.prompt_tokens += usage.get("prompt_tokens") or usage.get("input_tokens") or 0
        self.totals.completion_tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0
        self.totals.seconds = time.monotonic() - self._began
        self._progress(self.totals)


def _result(custom_id: str, response: Response) -> Result:
    """A line of the output, or of the errors."""
    error = None
    if response["status_code"] >= 400:
        told = response["body"].get("error")
        code = (told.get("code") if isinstance(told, dict) else None) or "request_failed"
        error = {"code": code, "message": _message(response)}
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }


def _message(response: Response) -> str:
    told = response["body"].get("error")
    message = told.get("message") if isinstance(told, dict) else None
    return message or f"status {response['status_code']}"


def _bad(line: BadLine) -> Result:
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": None,
        "response": None,
        "error": {"code": line.code, "message": line.message, "line": line.number},
    }
