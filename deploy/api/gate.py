"""Who may pass: every request needs a key of the ring, but for a few paths, named here byte by byte.

The decision is made on the path as it came over the wire, before any routing: a path that some layer would
read differently (doubled slashes, dots, percent signs, another Host) is not one of these and needs a key.
"""

import re
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...cluster.errors import RequestError
from .errors import error_response
from .keys import ANYONE, MAX_HEADER_LEN, Caller, KeyRing

OPEN_PATHS = frozenset({b"/health", b"/ready", b"/"})
_PAGE_FILE = re.compile(rb"/page/[a-z0-9_-]+\.(css|js|svg)")  # the playground's; it asks for a key itself

# HAProxy takes no more, nor HTTP/0.9; this is for whoever reaches us without it.
MAX_HEAD_BYTES = 16 << 10
MAX_HEADERS = 100

_CALLER = "paceline.caller"  # in an ASGI scope, where no client can write


def caller_of(scope: Scope) -> Caller:
    """Who sent the request, once it has passed the gate."""
    return scope.get(_CALLER, ANYONE)


def as_caller(app: ASGIApp, caller: Caller) -> ASGIApp:
    """The application as one caller sees it, for requests that are made within this process."""

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        state = {**scope.get("state", {}), "key_name": caller.name or None}
        await app({**scope, "state": state, _CALLER: caller}, receive, send)

    return called


class Gate:
    """ASGI middleware around an application."""

    def __init__(self, app: ASGIApp, ring: KeyRing) -> None:
        self._app = app
        self._ring = ring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or _CALLER in scope:
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a websocket that is closed before it is accepted: 403
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            _check_head(scope)
            caller = ANYONE if self._ring.is_open or _is_open(scope) else self._caller(scope)
            if caller is not ANYONE and scope["method"] == "POST":
                caller.admit()
        except RequestError as error:
            await error_response(error, scope)(scope, receive, send)
            return
        scope[_CALLER] = caller
        if caller.name:
            scope.setdefault("state", {})["key_name"] = caller.name  # for the log
        limits = caller.limits()
        if not limits:
            await self._app(scope, receive, send)
            return

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                told = [(name.encode(), value.encode()) for name, value in limits.items()]
                message = {**message, "headers": [*message.get("headers", []), *told]}
            await send(message)

        await self._app(scope, receive, send_with_limits)

    def _caller(self, scope: Scope) -> Caller:
        headers = Headers(scope=scope)
        given = headers.getlist("authorization") + headers.getlist("x-api-key")
        if not given:
            raise _refusal("missing_api_key", "no API key: send the header Authorization: Bearer KEY")
        if len(given) > 1 or len(given[0]) > MAX_HEADER_LEN:
            raise _refusal("invalid_api_key", "send one API key, in one header")
        is_bearer = "authorization" in headers
        caller = self._ring.check(given[0]) if is_bearer else self._ring.check_key(given[0])
        if caller is None:
            raise _refusal("invalid_api_key", "this API key is not one of this server's")
        return caller


def _check_head(scope: Scope) -> None:
    if scope["http_version"] == "0.9":
        raise RequestError("HTTP/0.9 has no headers; speak HTTP/1.1", code="invalid_http_version")
    if len(scope["headers"]) > MAX_HEADERS:
        raise RequestError(f"there are more than {MAX_HEADERS} headers", status=431, code="headers_too_large")
    if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEAD_BYTES:
        raise RequestError(
            f"the headers are longer than {MAX_HEAD_BYTES} bytes", status=431, code="headers_too_large"
        )


def _is_open(scope: Scope) -> bool:
    raw: Any = scope.get("raw_path")
    if not isinstance(raw, bytes) or scope["method"] not in ("GET", "HEAD"):
        return False
    # The router sees `path`: it must mean the same.
    is_plain = raw == scope["path"].encode() and scope.get("root_path", "") in ("", "/")
    return is_plain and (raw in OPEN_PATHS or _PAGE_FILE.fullmatch(raw) is not None)


def _refusal(code: str, message: str) -> RequestError:
    return RequestError(message, status=401, code=code, error_type="authentication_error")
