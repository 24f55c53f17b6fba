"""One batch from its first line, or where it was left, to its output files."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from starlette.types import ASGIApp

from ...cluster.errors import RequestError
from ..batch.answers import local_answer
from ..batch.job import Answer, Line, Response, Totals, run_batch
from ..batch.segments import Segments
from .batch_records import BatchRecord, BatchState
from .file_store import FileStore
from .gate import as_caller
from .keys import Caller
from .replies import error_object

PRIORITY = 100  # lower runs first; requests that say nothing have 0
TICK_S = 1.0  # how soon it is seen to go on, or notices that it shall stop


class BatchRun:
    """Owns the batch's state while it runs; `write` keeps it."""

    def __init__(
        self,
        record: BatchRecord,
        state: BatchState,
        folder: Path,
        store: FileStore,
        write: Callable[[BatchState], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._record = record
        self._state = state
        self._results = folder / "run"
        self._cancel_mark = folder / "cancel"
        self._store = store
        self._write = write
        self._clock = clock
        self._why: str | None = None  # it ends before its last line: "cancelled" or "expired"

    async def work(self, lines: Path, digest: str, app: ASGIApp, concurrency: int) -> None:
        """Returns when the state says how it ended. Raises AnswererLost, and is cancelled, with all kept."""
        stopping = asyncio.Event()
        self._update(status="in_progress", in_progress_at=self._state.in_progress_at or self._now())
        self._look(stopping)
        ticking = asyncio.create_task(self._tick(stopping))
        try:
            totals = await run_batch(
                lines,
                self._results,
                self._answer(app),
                concurrency=concurrency,
                progress=self._count,
                stopping=stopping,
            )
        finally:
            ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticking
        if totals.is_complete:
            self._why = None  # it was faster than whoever wanted to stop it
        await asyncio.to_thread(self._finish, digest)

    def _answer(self, app: ASGIApp) -> Answer:
        ask = local_answer(as_caller(app, Caller.named(self._record.owner)))
        endpoint = self._record.endpoint

        async def answer(line: Line) -> Response:
            if line["url"] != endpoint:
                problem = f"this batch is for {endpoint}, not for {line['url']}"
                refused = error_object(RequestError(problem, code="invalid_url", param="url"))
                return {"status_code": 400, "request_id": "", "body": refused}
            return await ask({**line, "body": {"priority": PRIORITY, **line["body"]}})

        return answer

    def _count(self, totals: Totals) -> None:
        self._state = msgspec.structs.replace(
            self._state,
            num_lines=totals.num_lines,
            num_completed=totals.num_completed,
            num_failed=totals.num_failed,
        )

    async def _tick(self, stopping: asyncio.Event) -> None:
        told = self._state
        while True:
            await asyncio.sleep(TICK_S)
            self._look(stopping)
            if self._state is not told:
                told = self._state
                await asyncio.to_thread(self._write, told)

    def _look(self, stopping: asyncio.Event) -> None:
        if self._cancel_mark.exists():
            self._why = "cancelled"
        elif self._clock() > self._record.expires_at:
            self._why = "expired"
        if self._why is not None:
            stopping.set()

    def _finish(self, digest: str) -> None:
        """What there is of results becomes files of the owner's."""
        self._update(finalizing_at=self._now())
        if self._why is not None:
            with contextlib.closing(Segments(self._results, digest)) as segments:
                segments.finish(None, ())
        output, errors = (self._keep(name) for name in ("output.jsonl", "errors.jsonl"))
        status = self._why or "completed"
        self._update(
            status=status, output_file_id=output, error_file_id=errors, **{f"{status}_at": self._now()}
        )

    def _keep(self, name: str) -> str | None:
        path = self._results / name
        if not path.stat().st_size:
            return None
        with path.open("rb") as content:
            file = self._store.add(
                content,
                owner=self._record.owner,
                filename=f"{self._record.id}_{name}",
                purpose="batch_output",
                expires_after_s=self._record.output_expires_after_s,
            )
        return file.id

    def _update(self, **changes: object) -> None:
        self._state = msgspec.structs.replace(self._state, **changes)
        self._write(self._state)

    def _now(self) -> int:
        return int(self._clock())
