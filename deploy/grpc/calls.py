"""What is seen of each gRPC call, as `observing` tells it of HTTP: a count, a log line, a span if traced."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..api.errors import as_request_error
from ..api.front import Front
from ..observing import CLIENT_GONE, Record
from .status import CallContext, answer_error, metadata

METHOD = "gRPC"  # where an HTTP request has GET or POST

log = logging.getLogger("paceline.requests")


@contextmanager
def answering(front: Front, rpc: str, context: CallContext) -> Iterator[Record]:
    """Around the work of a call: what it raises becomes the status of the call, and is not raised on."""
    began = time.perf_counter()
    record = Record()
    if front.tracer is not None:
        headers = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        record.trace = front.tracer.start_request(headers, METHOD)
    status = CLIENT_GONE  # unless an answer is made
    try:
        yield record
        status = 200
    except Exception as error:
        refusal = as_request_error(error)
        answer_error(context, refusal)
        status = refusal.status
    finally:
        duration_s = time.perf_counter() - began
        request_id = metadata(context, "request_id")
        usage = {} if record.usage is None else record.usage()
        front.metrics.answered(METHOD, rpc, status, duration_s)
        if record.trace is not None:
            record.trace.end(rpc, status, request_id, usage)
        fields = {
            "request_id": request_id,
            "method": METHOD,
            "route": rpc,
            "status": status,
            "duration_ms": round(1e3 * duration_s, 1),
            "prompt_tokens": usage.get("prompt_tokens"),
            "completion_tokens": usage.get("completion_tokens"),
            "trace_id": None if record.trace is None else record.trace.trace_id,
        }
        told = {name: value for name, value in fields.items() if value is not None}
        log.info("request", extra={"fields": told})
