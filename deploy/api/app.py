"""The HTTP surface: routes and bodies. It knows requests and text; tokens come from a TokenSource.

Every error, whoever raises it, is worded by `errors`. Serve adds the header `x-request-id` to every answer:
the client's own, or one it made; the engine's ids are ours alone.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from importlib.metadata import version
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from ...cluster.errors import EngineError, RequestError
from ..metrics import CONTENT_TYPE
from ..observing import Observer, current_record
from .accounting import Account
from .batch_routes import add_batches
from .bodies import read_body
from .errors import (
    answer_error,
    answer_http_exception,
    as_request_error,
    as_stream_failure,
    error_response,
)
from .front import Front
from .gate import Gate, caller_of
from .gathered import Gathered, Piece
from .messages_reply import MessageStyle
from .messages_request import count_tokens, prepare_message
from .openapi import add_openapi
from .pieces import pieces_of
from .playground import add_playground
from .replies import ChatStyle, CompletionStyle, Heading, Prompt, ReplyStyle
from .responses_reply import ResponseStyle
from .responses_request import ResponseJob, prepare_response
from .steps import Steps
from .streaming import EventStream, unless_gone
from .tokens import detokenize, tokenize
from .validate import Job, ServedModel, prepare_chat, prepare_completion, unknown_model

Prepared = TypeVar("Prepared")

THREADED_BODY_BYTES = 16 << 10  # longer bodies are parsed and tokenised beside the event loop


def create_app(front: Front) -> FastAPI:
    """The application; one per replica."""
    app = FastAPI(title="Paceline", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(RequestError, answer_error)
    app.add_exception_handler(HTTPException, answer_http_exception)
    app.add_exception_handler(Exception, answer_error)
    app.add_middleware(Gate, ring=front.keys)
    if front.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=front.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type", "x-api-key", "x-request-id", "anthropic-version"],
            expose_headers=["x-request-id", "retry-after"],
        )

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        def style(heading: Heading, job: Job) -> ReplyStyle:
            return ChatStyle(heading, _prompts(job)[0])

        return await _complete(request, front, prepare_chat, style, "chatcmpl")

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        def style(heading: Heading, job: Job) -> ReplyStyle:
            return CompletionStyle(heading, _prompts(job))

        return await _complete(request, front, prepare_completion, style, "cmpl")

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        def style(heading: Heading, job: Job) -> ReplyStyle:
            assert isinstance(job, ResponseJob)
            return ResponseStyle(heading, job)

        return await _complete(request, front, prepare_response, style, "resp")

    @app.post("/v1/messages")
    async def messages(request: Request) -> Response:
        return await _complete(request, front, prepare_message, MessageStyle, "msg")

    @app.post("/v1/messages/count_tokens")
    async def messages_count_tokens(request: Request) -> JSONResponse:
        return JSONResponse(await _prepared(request, front, count_tokens))

    @app.post("/tokenize")
    async def tokenize_text(request: Request) -> JSONResponse:
        return JSONResponse(await _prepared(request, front, tokenize))

    @app.post("/detokenize")
    async def detokenize_tokens(request: Request) -> JSONResponse:
        return JSONResponse(await _prepared(request, front, detokenize))

    add_batches(app, front)

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

    @app.get("/ready")
    async def ready() -> JSONResponse:
        front.drain.check()
        if not front.is_serving():
            raise as_request_error(EngineError("it is being rebuilt"))
        return JSONResponse({"status": "ready"})

    @app.get("/version")
    async def show_version() -> JSONResponse:
        return JSONResponse({"version": version("paceline")})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await front.render_metrics(), headers={"content-type": CONTENT_TYPE})

    app.add_middleware(Observer, metrics=front.metrics, tracer=front.tracer)
    if front.has_page:
        add_playground(app)
    add_openapi(app)
    return app


async def _complete(
    request: Request,
    front: Front,
    prepare: Callable[[bytes, ServedModel], Job],
    make_style: Callable[[Heading, Job], ReplyStyle],
    prefix: str,
) -> Response:
    try:
        front.drain.check()
        job = await _prepared(request, front, prepare)
        account = Account(job)
        heading = Heading(
            reply_id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=front.served.name,
            tokenizer=front.served.tokenizer,
            num_logprobs=job.choices[0].params.logprobs,
            has_usage=job.has_usage,
            running_usage=account.usage if job.has_running_usage else None,
            has_token_ids=job.choices[0].has_token_ids,
        )
        record = current_record.get()
        trace = None if record is None else record.trace
        pieces = pieces_of(front, caller_of(request.scope), heading.reply_id, job, trace)
        style = make_style(heading, job)
        if job.is_stream:
            # Nothing is sent before the first tokens: until then a refusal can still have its own status.
            first = await unless_gone(request.receive, anext(pieces))
            return EventStream(_events(first, pieces, style, job, account), front.abandoned_s)
        whole = await unless_gone(request.receive, _gather(pieces, style, account, len(job.choices)))
        return Response(whole, media_type="application/json")
    except Exception as error:
        return error_response(as_request_error(error), request.scope)


def _prompts(job: Job) -> list[Prompt]:
    return [
        Prompt(token_ids=choice.prompt_ids, echoed=choice.echoed, num_logprobs=job.num_prompt_logprobs)
        for choice in job.choices
    ]


async def _prepared(
    request: Request, front: Front, prepare: Callable[[bytes, ServedModel], Prepared]
) -> Prepared:
    """What `prepare` makes of the body; a long one is parsed and tokenised beside the event loop."""
    body = await read_body(request, front.max_body_bytes)
    if len(body) > THREADED_BODY_BYTES:
        return await asyncio.to_thread(prepare, body, front.served)
    return prepare(body, front.served)


async def _gather(
    pieces: AsyncGenerator[Piece, None], style: ReplyStyle, account: Account, num_choices: int
) -> bytes:
    choices = [Gathered() for _ in range(num_choices)]
    async with aclosing(pieces):
        async for piece in pieces:
            choices[piece.index].add(piece)
            account.add(piece)
    return style.whole(choices, {"usage": account.usage(), **account.metrics()})


async def _events(
    first: Piece, pieces: AsyncGenerator[Piece, None], style: ReplyStyle, job: Job, account: Account
) -> AsyncGenerator[bytes, None]:
    """The events of a stream: opening of every choice, its chunks, totals if asked for, [DONE]."""
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
        yield style.failure(as_stream_failure(error))
        return
    totals = ({"usage": account.usage()} if job.has_usage else {}) | account.metrics()
    yield (style.closing(totals) if totals else b"") + style.end


def _model_object(front: Front) -> dict[str, Any]:
    return {
        "id": front.served.name,
        "object": "model",
        "created": front.started,
        "owned_by": "paceline",
        "max_model_len": front.served.max_model_len,
    }
