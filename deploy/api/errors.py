"""How failures are told to HTTP clients: one RequestError for each, worded as the API that was called does.

`/v1/messages` words them as Anthropic does, everything else as OpenAI does, with all four keys.
"""

import json
import logging
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from ...cluster.errors import EngineError, RequestError
from .replies import error_object
from .streaming import ClientGone

MESSAGES_PATH = "/v1/messages"

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

log = logging.getLogger(__name__)


def as_request_error(error: Exception) -> RequestError:
    """What a client is told about any failure; what is not its business stays in the log."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ClientGone | ClientDisconnect):
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


def as_stream_failure(error: Exception) -> RequestError:
    """What ends a stream that has begun. Its client cannot just ask again: a part has been shown."""
    told = as_request_error(error)
    if told.code == "engine_unavailable":
        told.code = "engine_failure"
    return told


def anthropic_error(error: RequestError) -> dict[str, Any]:
    """Anthropic's error object; `code` and `param` are ours, for a client that wants to know more."""
    kind = _ANTHROPIC_TYPES.get(error.status) or (
        "api_error" if error.status >= 500 else "invalid_request_error"
    )
    told = {"type": kind, "message": error.message, "code": error.code, "param": error.param}
    return {"type": "error", "error": told}


def error_response(error: RequestError, scope: Scope) -> Response:
    """The answer to a request that failed before anything was sent."""
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status == 504:
        headers["x-should-retry"] = "false"  # to OpenAI's clients: the time was the request's own to give
    if error.status == 413 or error.code == "shutting_down":
        headers["connection"] = "close"  # the rest of the body is not read; or there will be no next request
    word = anthropic_error if scope["path"].startswith(MESSAGES_PATH) else error_object
    return Response(
        json.dumps(word(error)), status_code=error.status, headers=headers, media_type="application/json"
    )


async def answer_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for what a route raises."""
    return error_response(as_request_error(error), request.scope)


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Routing failures: no such path, no such method."""
    assert isinstance(error, HTTPException)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    # request.url would be built from the Host header, which is the client's to choose
    message = f"{request.method} {request.scope['path'][:200]}: {error.detail}"
    response = error_response(RequestError(message, status=error.status_code, code=code), request.scope)
    response.headers.update(error.headers or {})
    return response
