"""The HTTP surface: routes, bodies, errors. It knows requests and text; tokens come from a TokenSource.

Every error, whoever raises it, leaves as OpenAI's error object with all four keys. Serve adds the header
`x-request-id` to every answer: the client's own, or one it made; the engine's ids are ours alone.
"""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from ...cluster.errors import EngineError, RequestError
from ..metrics import CONTENT_TYPE
from ..observing import Observer, current_record
from .accounting import Account
from .front import Front
from .playground import add_playground
from .replies import (
    DONE,
    ChatStyle,
    CompletionStyle,
    Gathered,
    Heading,
    Piece,
    ReplyStyle,
    error_event,
    error_object,
)
from .steps import Steps
from .streaming import ClientGone, EventStream, merge, stream_choice, unless_gone
from .validate import Job, ServedModel, prepare_chat, prepare_completion, unknown_model

THREADED_BODY_BYTES = 16 << 10  # longer bodies are parsed and tokenised beside the event loop

log = logging.getLogger(__name__)


def create_app(front: Front) -> FastAPI:
    """The application; one per replica."""
    app = FastAPI(title="Paceline", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(RequestError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(Exception, _answer_error)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        def style(heading: Heading, job: Job) -> ReplyStyle:
            del job
            return ChatStyle(heading)

        return await _complete(request, front, prepare_chat, style, "chatcmpl")

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        def style(heading: Heading, job: Job) -> ReplyStyle:
            return CompletionStyle(heading, {choice.index: choice.echoed for choice in job.choices})

        return await _complete(request, front, prepare_completion, style, "cmpl")

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [_model_object(front)]})

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> JSONResponse:
        if model_id != front.served.name:
            raise unknown_model(model_id, front.served)
        return JSONResponse(_model_object(front))

    @app.get("/health")
    async def health() -> JSONResponse:
        try:
            front.check_health()
        except EngineError as error:
            raise as_request_error(error) from None
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await front.render_metrics(), headers={"content-type": CONTENT_TYPE})

    app.add_middleware(Observer, metrics=front.metrics, tracer=front.tracer)
    if front.has_page:
        add_playground(app)
    return app


async def _complete(
    request: Request,
    front: Front,
    prepare: Callable[[bytes, ServedModel], Job],
    make_style: Callable[[Heading, Job], ReplyStyle],
    prefix: str,
) -> Response:
    try:
        body = await _read_body(request, front.max_body_bytes)
        if len(body) > THREADED_BODY_BYTES:
            job = await asyncio.to_thread(prepare, body, front.served)
        else:
            job = prepare(body, front.served)
        heading = Heading(
            reply_id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=front.served.name,
            tokenizer=front.served.tokenizer,
            has_logprobs=job.choices[0].params.logprobs is not None,
            has_usage=job.has_usage,
        )
        record = current_record.get()
        trace = None if record is None else record.trace
        front.metrics.num_choices.observe(job.num_per_prompt)
        pieces = merge(
            [
                stream_choice(
                    front.source,
                    front.served.tokenizer,
                    f"{heading.reply_id}-{choice.index}",
                    choice,
                    front.metrics.start(len(choice.prompt_ids), choice.params.max_tokens, trace),
                )
                for choice in job.choices
            ]
        )
        style = make_style(heading, job)
        if job.is_stream:
            # Nothing is sent before the first tokens: until then a refusal can still have its own status.
            first = await unless_gone(request.receive, anext(pieces))
            return EventStream(_events(first, pieces, style, job), front.abandoned_s)
        whole = await unless_gone(request.receive, _gather(pieces, style, job))
        return Response(whole, media_type="application/json")
    except Exception as error:
        return _error_response(as_request_error(error))


async def _gather(pieces: AsyncGenerator[Piece, None], style: ReplyStyle, job: Job) -> bytes:
    choices = [Gathered() for _ in job.choices]
    account = Account(job)
    async with aclosing(pieces):
        async for piece in pieces:
            choices[piece.index].add(piece)
            account.add(piece)
    return style.whole(choices, {"usage": account.usage(), **account.metrics()})


async def _events(
    first: Piece, pieces: AsyncGenerator[Piece, None], style: ReplyStyle, job: Job
) -> AsyncGenerator[bytes, None]:
    """The events of a stream: opening of every choice, its chunks, totals if asked for, [DONE]."""
    account = Account(job)
    steps = Steps(job)

    def event(piece: Piece) -> bytes:
        account.add(piece)
        step = steps.of(piece)
        return style.chunk(piece) if step is None else style.chunk(piece) + style.closing(step)

    try:
        async with aclosing(pieces):
            yield b"".join(style.opening(choice.index) for choice in job.choices) + event(first)
            async for piece in pieces:
                if chunk := event(piece):
                    yield chunk
    except Exception as error:
        yield error_event(as_request_error(error))
        return
    totals = ({"usage": account.usage()} if job.has_usage else {}) | account.metrics()
    yield (style.closing(totals) if totals else b"") + DONE


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """The body, never more of it in memory than the limit. Raises RequestError 413 or 415."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(
            "send the body as Content-Type: application/json", status=415, code="unsupported_media_type"
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise RequestError("send the body uncompressed", status=415, code="unsupported_media_type")
    too_large = RequestError(
        f"the body is larger than {max_bytes} bytes, the limit of this server",
        status=413,
        code="request_too_large",
    )
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


def _model_object(front: Front) -> dict[str, Any]:
    return {
        "id": front.served.name,
        "object": "model",
        "created": front.started,
        "owned_by": "paceline",
        "max_model_len": front.served.max_model_len,
    }


def as_request_error(error: Exception) -> RequestError:
    """What a client is told about any failure; what is not its business stays in the log."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ClientGone):
        return RequestError("the client closed the connection", status=499, code="client_closed_request")
    if isinstance(error, EngineError):
        log.error("the engine failed a request: %s", error)
        return RequestError(
            f"the engine failed: {error}",
            status=503,
            code="engine_unavailable",
            error_type="server_error",
            retry_after_s=5,
        )
    log.error("a request failed", exc_info=error)
    return RequestError("internal error", status=500, code="internal_error", error_type="server_error")


def _error_response(error: RequestError) -> Response:
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    if error.status == 413:
        headers["connection"] = "close"  # the rest of the body is not read
    return Response(
        json.dumps(error_object(error)),
        status_code=error.status,
        headers=headers,
        media_type="application/json",
    )


async def _answer_error(request: Request, error: Exception) -> Response:
    del request
    return _error_response(as_request_error(error))


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """Routing failures: no such path, no such method."""
    assert isinstance(error, HTTPException)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    response = _error_response(RequestError(message, status=error.status_code, code=code))
    response.headers.update(error.headers or {})
    return response
