"""Who answers a batch's lines: an application in this process, or a server. Both are asked over HTTP.

The application is the one that `paceline serve` shows the world, so a batch knows every endpoint, validates
as it does and words its answers as it does; only the socket is left out.
"""

import contextlib
import os
from collections.abc import AsyncIterator

import httpx
import msgspec
from starlette.types import ASGIApp

from ...cluster.errors import ConfigError
from .job import Answer, AnswererLost, Line, Response

API_KEY_VARIABLE = "PACELINE_API_KEY"
_TIMEOUT = httpx.Timeout(10.0, read=None, pool=None)  # a long answer takes as long as it takes


def local_answer(app: ASGIApp) -> Answer:
    """Answers from an application in this process; it needs no closing."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return _answer_of(httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=_TIMEOUT))


@contextlib.asynccontextmanager
async def server_answer(url: str, concurrency: int) -> AsyncIterator[Answer]:
    """Answers from a running server, with the key in PACELINE_API_KEY if there is one."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url!r} is not the URL of a server; write http://HOST:PORT")
    key = os.environ.get(API_KEY_VARIABLE)
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(
        base_url=url.rstrip("/").removesuffix("/v1"),
        headers={"authorization": f"Bearer {key}"} if key else {},
        timeout=_TIMEOUT,
        limits=limits,
    ) as client:
        yield _answer_of(client)


def _answer_of(client: httpx.AsyncClient) -> Answer:
    async def answer(line: Line) -> Response:
        try:
            reply = await client.post(
                line["url"],
                content=msgspec.json.encode(line["body"]),
                headers={"content-type": "application/json"},
            )
        except httpx.TransportError as error:
            raise AnswererLost(
                f"{client.base_url} does not answer ({error or type(error).__name__})"
            ) from None
        try:
            body = msgspec.json.decode(reply.content)
        except msgspec.DecodeError:
            raise AnswererLost(f"{client.base_url} answers with something else than JSON") from None
        return {
            "status_code": reply.status_code,
            "request_id": reply.headers.get("x-request-id", ""),
            "body": body,
        }

    return answer
