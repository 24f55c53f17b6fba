"""What is seen of each HTTP request: a count, a log line, and a span if it is traced. Never what was said.

An ASGI layer around the application opens a Record; whoever works on the request finds it by `current_record`
in whatever task that is, and adds what it knows. Without such a layer there is none, and nothing is recorded.
"""

import logging
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .metrics import Metrics
from .tracing import RequestTrace, Tracer

QUIET_PATHS = ("/health", "/ready", "/metrics", "/")  # asked over and over: at level debug only
CLIENT_GONE = 499

log = logging.getLogger("paceline.requests")


@dataclass(slots=True)
class Record:
    """One HTTP request while it is answered."""

    trace: RequestTrace | None = None
    usage: Callable[[], dict[str, Any]] | None = None  # OpenAI's usage object as it stands


current_record: ContextVar[Record | None] = ContextVar("current_record", default=None)


class Observer:
    """An ASGI application around another."""

    def __init__(self, app: ASGIApp, metrics: Metrics, tracer: Tracer | None) -> None:
        self._app = app
        self._metrics = metrics
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        record = Record()
        if self._tracer is not None:
            record.trace = self._tracer.start_request(headers, scope["method"])
        status = CLIENT_GONE  # unless an answer begins

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        token = current_record.set(record)
        try:
            await self._app(scope, receive, watched)
        finally:
            current_record.reset(token)
            # An unknown path would make a series, and a span's name, of every typo.
            route = getattr(scope.get("route"), "path", "unknown")
            self._tell(scope, headers, record, route, status, time.perf_counter() - began)

    def _tell(
        self,
        scope: Scope,
        headers: dict[str, str],
        record: Record,
        route: str,
        status: int,
        duration_s: float,
    ) -> None:
        method, request_id = scope["method"], headers.get("x-request-id")
        self._metrics.answered(method, route, status, duration_s)
        usage = {} if record.usage is None else record.usage()
        if record.trace is not None:
            record.trace.end(route, status, request_id, usage)
        level = logging.DEBUG if route in QUIET_PATHS else logging.INFO
        if not log.isEnabledFor(level):
            return
        fields = {
            "request_id": request_id,
            "key": scope.get("state", {}).get("key_name"),
            "method": method,
            "route": route,
            "status": status,
            "duration_ms": round(1e3 * duration_s, 1),
            "prompt_tokens": usage.get("prompt_tokens"),
            "completion_tokens": usage.get("completion_tokens"),
            "trace_id": None if record.trace is None else record.trace.trace_id,
        }
        told = {name: value for name, value in fields.items() if value is not None}
        log.log(level, "request", extra={"fields": told})
