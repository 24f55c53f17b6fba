"""The batches of /v1/batches: kept in the server's folder, worked off one by one beside its other requests.

    batches/batch_<32 hex digits>/batch.json   what was asked for; written once
    batches/batch_<32 hex digits>/state.json   how far it is; written by the replica that holds the lock
    batches/batch_<32 hex digits>/cancel       there once somebody has cancelled it
    batches/batch_<32 hex digits>/run/         its results so far, see `batch/segments.py`

Nothing but files is shared, so a batch survives its server: the next one, or another replica, goes on with
what is missing. A line is a request like any other, of the batch's owner, with a low priority.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp

from ...cluster.errors import EngineError, RequestError, UserError
from ..batch.lines import read_batch
from ..batch.segments import write_durably
from .batch_records import DEFAULT_OUTPUT_S, OPEN, WINDOW_S, BatchRecord, BatchState, batch_object
from .batch_run import BatchRun
from .file_store import FileStore

MAX_LINES = 50_000
IDLE_S = 15.0  # between looks for batches that another replica left, or for which there were no answers

_BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")

log = logging.getLogger(__name__)


class BatchJobs:
    """Owns the folder's batches. `start` it with the application that answers the lines; `close` it."""

    def __init__(self, store: FileStore, concurrency: int, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._concurrency = concurrency
        self._clock = clock
        self._folder = store.folder / "batches"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._has_news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, app: ASGIApp) -> None:
        self._task = asyncio.create_task(self._work(app), name="batches")

    async def close(self) -> None:
        """Stop; what is done is kept, and the rest is for the next server."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def create(
        self,
        *,
        owner: str,
        endpoint: str,
        input_file_id: str,
        metadata: dict[str, str] | None,
        output_expires_after_s: int | None,
    ) -> BatchRecord:
        """RequestError when the owner has no such file."""
        self._store.get(input_file_id, owner)
        now = int(self._clock())
        record = BatchRecord(
            id=f"batch_{secrets.token_hex(16)}",
            owner=owner,
            endpoint=endpoint,
            input_file_id=input_file_id,
            created_at=now,
            expires_at=now + WINDOW_S,
            metadata=metadata,
            output_expires_after_s=output_expires_after_s or DEFAULT_OUTPUT_S,
        )
        folder = self._folder / record.id
        folder.mkdir(mode=0o700)
        write_durably(folder / "batch.json", [msgspec.json.encode(record)])
        return record

    def wake(self) -> None:
        """There is a new batch; only in the event loop."""
        self._has_news.set()

    def get(self, batch_id: str, owner: str) -> BatchRecord:
        """RequestError 404 for a batch that is not there or is someone else's."""
        record = self._record(self._folder / batch_id) if _BATCH_ID.fullmatch(batch_id) else None
        if record is None or record.owner != owner:
            raise RequestError(
                f"there is no batch {batch_id[:64]!r}", status=404, code="batch_not_found", param="batch_id"
            )
        return record

    def of_owner(self, owner: str) -> list[BatchRecord]:
        """The batches of an owner, newest first."""
        own = [record for record in self._all() if record.owner == owner]
        return sorted(own, key=lambda record: (record.created_at, record.id), reverse=True)

    def cancel(self, record: BatchRecord) -> None:
        """RequestError 409 unless it is still going on."""
        status = self.state(record).status
        if status not in OPEN:
            raise RequestError(
                f"batch {record.id} is {status}; there is nothing to cancel",
                status=409,
                code="batch_not_cancellable",
                param="batch_id",
            )
        (self._folder / record.id / "cancel").touch()

    def state(self, record: BatchRecord) -> BatchState:
        try:
            return msgspec.json.decode(
                (self._folder / record.id / "state.json").read_bytes(), type=BatchState
            )
        except FileNotFoundError:
            return BatchState()

    def object(self, record: BatchRecord) -> dict[str, Any]:
        """OpenAI's batch object."""
        try:
            cancelling_at = int((self._folder / record.id / "cancel").stat().st_mtime)
        except FileNotFoundError:
            cancelling_at = None
        return batch_object(record, self.state(record), cancelling_at)

    async def _work(self, app: ASGIApp) -> None:
        """One batch after another, the oldest first."""
        while True:
            self._has_news.clear()
            try:
                await asyncio.to_thread(self._store.sweep)
                for record in await asyncio.to_thread(self._open_records):
                    with self._lock(record) as is_ours:
                        if is_ours:
                            await self._run(record, app)
            except (OSError, EngineError):
                log.exception("the batches of %s cannot be worked on now", self._folder)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE_S):
                    await self._has_news.wait()

    async def _run(self, record: BatchRecord, app: ASGIApp) -> None:
        state = self.state(record)
        if state.status not in OPEN:
            return  # another replica was faster
        try:
            lines = self._store.content(self._store.get(record.input_file_id, record.owner))
            batch = await asyncio.to_thread(read_batch, lines)
        except UserError as error:
            self._fail(record, state, "invalid_input_file", str(error))
            return
        num_lines = len(batch.places) + len(batch.bad_lines)
        if num_lines > MAX_LINES:
            self._fail(
                record, state, "too_many_lines", f"a batch has at most {MAX_LINES} lines, not {num_lines}"
            )
            return
        run = BatchRun(
            record,
            msgspec.structs.replace(state, num_lines=num_lines),
            self._folder / record.id,
            self._store,
            lambda state: self._write(record, state),
            self._clock,
        )
        await run.work(lines, batch.digest, app, self._concurrency)

    def _fail(self, record: BatchRecord, state: BatchState, code: str, message: str) -> None:
        errors = [{"code": code, "message": message, "param": None, "line": None}]
        now = int(self._clock())
        self._write(record, msgspec.structs.replace(state, status="failed", failed_at=now, errors=errors))

    def _write(self, record: BatchRecord, state: BatchState) -> None:
        write_durably(self._folder / record.id / "state.json", [msgspec.json.encode(state)])

    def _open_records(self) -> list[BatchRecord]:
        records = [record for record in self._all() if self.state(record).status in OPEN]
        return sorted(records, key=lambda record: (record.created_at, record.id))

    def _all(self) -> Iterator[BatchRecord]:
        for path in self._folder.iterdir():
            if _BATCH_ID.fullmatch(path.name) and (record := self._record(path)) is not None:
                yield record

    def _record(self, path: Path) -> BatchRecord | None:
        try:
            return msgspec.json.decode((path / "batch.json").read_bytes(), type=BatchRecord)
        except FileNotFoundError:
            return None

    @contextlib.contextmanager
    def _lock(self, record: BatchRecord) -> Iterator[bool]:
        """Whether this replica may work on it: one at a time, until it ends or dies."""
        descriptor = os.open(self._folder / record.id / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
        finally:
            os.close(descriptor)
