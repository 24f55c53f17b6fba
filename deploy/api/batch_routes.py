"""/v1/files and /v1/batches: the routes over `file_store` and `batch_jobs`."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse
from pydantic import Field, StringConstraints
from starlette.datastructures import UploadFile
from starlette.types import Message

from ...cluster.errors import RequestError
from .bodies import parse_request, read_body, validated
from .file_store import PURPOSES, FileRecord
from .front import BatchDoor, Front
from .gate import caller_of
from .openai_protocol import Strict

MAX_PAGE = 10_000
FORM_BYTES = 64 << 10  # of a multipart body beside its file

_UNPRINTABLE = re.compile(r"[^\x20-\x7e\u00a0-\ud7ff\ue000-\uffef]")


class ExpiresAfter(Strict):
    """When a file expires."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2592000)


class BatchRequest(Strict):
    """POST /v1/batches."""

    input_file_id: str = Field(max_length=64)
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: (
        Annotated[
            dict[
                Annotated[str, StringConstraints(max_length=64)],
                Annotated[str, StringConstraints(max_length=512)],
            ],
            Field(max_length=16),
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None


def add_batches(app: FastAPI, front: Front) -> None:
    """Give an application the routes of files and batches; without a folder for them they say so."""
    if front.batches is None:
        _add_refusal(app)
        return
    _add_file_routes(app, front.batches)
    _add_batch_routes(app, front.batches, front.max_body_bytes)


def _add_refusal(app: FastAPI) -> None:
    async def refuse() -> JSONResponse:
        raise RequestError(
            "this server keeps no files; start it with --batch-dir", status=404, code="unknown_url"
        )

    for path in ("/v1/files", "/v1/batches"):
        for end in ("", "/{rest:path}"):
            app.add_api_route(path + end, refuse, methods=["GET", "POST", "DELETE"], include_in_schema=False)


def _add_file_routes(app: FastAPI, door: BatchDoor) -> None:
    store = door.store

    @app.post("/v1/files")
    async def upload(request: Request) -> JSONResponse:
        owner = caller_of(request.scope).name
        async with _form(request, store.max_bytes) as (file, fields):
            purpose = fields.get("purpose", "")
            if purpose not in PURPOSES:
                raise RequestError(
                    f"'purpose' must be one of {', '.join(PURPOSES)}", code="invalid_value", param="purpose"
                )
            record = await asyncio.to_thread(
                store.add,
                file.file,
                owner=owner,
                filename=_UNPRINTABLE.sub("", file.filename or "")[:255] or "file",
                purpose=purpose,
                expires_after_s=_expires_after_s(fields),
            )
        return JSONResponse(record.object())

    @app.get("/v1/files")
    async def list_files(request: Request) -> JSONResponse:
        records = await asyncio.to_thread(store.of_owner, caller_of(request.scope).name)
        purpose = request.query_params.get("purpose")
        kept = [record for record in records if purpose in (None, record.purpose)]
        return JSONResponse(_page(kept, request, FileRecord.object))

    @app.get("/v1/files/{file_id}")
    async def show_file(request: Request, file_id: str) -> JSONResponse:
        return JSONResponse(store.get(file_id, caller_of(request.scope).name).object())

    @app.get("/v1/files/{file_id}/content")
    async def content(request: Request, file_id: str) -> FileResponse:
        record = store.get(file_id, caller_of(request.scope).name)
        # never shown by a browser: it is whatever somebody uploaded
        headers = {"content-disposition": "attachment", "x-content-type-options": "nosniff"}
        return FileResponse(store.content(record), media_type="application/octet-stream", headers=headers)

    @app.delete("/v1/files/{file_id}")
    async def delete_file(request: Request, file_id: str) -> JSONResponse:
        record = store.get(file_id, caller_of(request.scope).name)
        await asyncio.to_thread(store.delete, record)
        return JSONResponse({"id": record.id, "object": "file", "deleted": True})


def _add_batch_routes(app: FastAPI, door: BatchDoor, max_body_bytes: int) -> None:
    jobs = door.jobs

    @app.post("/v1/batches")
    async def create_batch(request: Request) -> JSONResponse:
        asked = parse_request(BatchRequest, await read_body(request, max_body_bytes))
        expires_after = asked.output_expires_after
        record = await asyncio.to_thread(
            jobs.create,
            owner=caller_of(request.scope).name,
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            metadata=asked.metadata,
            output_expires_after_s=None if expires_after is None else expires_after.seconds,
        )
        jobs.wake()
        return JSONResponse(jobs.object(record))

    @app.get("/v1/batches")
    async def list_batches(request: Request) -> JSONResponse:
        records = await asyncio.to_thread(jobs.of_owner, caller_of(request.scope).name)
        return JSONResponse(_page(records, request, jobs.object))

    @app.get("/v1/batches/{batch_id}")
    async def show_batch(request: Request, batch_id: str) -> JSONResponse:
        return JSONResponse(jobs.object(jobs.get(batch_id, caller_of(request.scope).name)))

    @app.post("/v1/batches/{batch_id}/cancel")
    async def cancel_batch(request: Request, batch_id: str) -> JSONResponse:
        record = jobs.get(batch_id, caller_of(request.scope).name)
        jobs.cancel(record)
        return JSONResponse(jobs.object(record))


@asynccontextmanager
async def _form(request: Request, max_bytes: int) -> AsyncIterator[tuple[UploadFile, dict[str, str]]]:
    """The file of a multipart body, never more of it kept than the limit, and the other fields."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise RequestError("send the file as multipart/form-data", status=415, code="unsupported_media_type")
    num_bytes = 0

    async def receive() -> Message:
        nonlocal num_bytes
        message = await request.receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes + FORM_BYTES:
            raise RequestError(
                f"the file is larger than {max_bytes} bytes, the limit of this server",
                status=413,
                code="request_too_large",
                param="file",
            )
        return message

    async with Request(request.scope, receive).form(max_files=1, max_fields=8) as form:
        fields = {name: value for name, value in form.items() if isinstance(value, str)}
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise RequestError(
                "Missing required parameter: 'file'.", code="missing_required_parameter", param="file"
            )
        yield file, fields


def _expires_after_s(fields: dict[str, str]) -> int | None:
    given = {
        name: fields[f"expires_after[{name}]"]
        for name in ("anchor", "seconds")
        if f"expires_after[{name}]" in fields
    }
    if not given:
        return None
    seconds = given.get("seconds", "")
    return validated(
        ExpiresAfter, {**given, "seconds": int(seconds) if seconds.isdecimal() else seconds}
    ).seconds


def _page(records: Sequence[Any], request: Request, show: Any) -> dict[str, Any]:
    """A list of at most `limit` from behind `after`."""
    query = request.query_params
    limit = query.get("limit", str(MAX_PAGE))
    if not limit.isdecimal() or len(limit) > 5 or not 1 <= int(limit) <= MAX_PAGE:
        raise RequestError(f"'limit' must be between 1 and {MAX_PAGE}", code="invalid_value", param="limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError("'order' must be asc or desc", code="invalid_value", param="order")
    ordered = list(records) if order == "desc" else list(records)[::-1]
    if (after := query.get("after")) is not None:
        ids = [record.id for record in ordered]
        if after not in ids:
            raise RequestError("'after' is not in this list", code="invalid_value", param="after")
        ordered = ordered[ids.index(after) + 1 :]
    shown = [show(record) for record in ordered[: int(limit)]]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else "",
        "last_id": shown[-1]["id"] if shown else "",
        "has_more": len(ordered) > len(shown),
    }
