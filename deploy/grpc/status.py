"""How a refusal or a failure leaves over gRPC: a status code, and OpenAI's error object in the trailers."""

from collections.abc import Sequence
from typing import Protocol

import grpc

from ...cluster.errors import RequestError

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_MAX_DETAILS_LEN = 2048  # clients refuse trailers above 8 KiB


class CallContext(Protocol):
    """What Serve's context and grpc.aio's have in common."""

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]] | None: ...

    def set_code(self, code: grpc.StatusCode) -> None: ...

    def set_details(self, details: str) -> None: ...

    def set_trailing_metadata(self, trailing_metadata: Sequence[tuple[str, str]]) -> None: ...


def metadata(context: CallContext, name: str) -> str | None:
    """The value of a metadata key; the first if there are several."""
    for key, value in context.invocation_metadata() or ():
        if key == name:
            return value if isinstance(value, str) else value.decode("latin-1")
    return None


def answer_error(context: CallContext, error: RequestError) -> None:
    """End the call with `error`. The status is set, not raised: Serve logs a stack for what is raised."""
    told = {
        "paceline-code": error.code,
        "paceline-type": error.error_type,
        "paceline-param": error.param,
        "retry-after": None if error.retry_after_s is None else str(error.retry_after_s),
    }
    context.set_code(_CODES.get(error.status, grpc.StatusCode.INTERNAL))
    context.set_details(error.message[:_MAX_DETAILS_LEN])
    context.set_trailing_metadata([(key, _ascii(value)) for key, value in told.items() if value is not None])


def _ascii(value: str) -> str:
    """A header value may hold printable ASCII only."""
    return "".join(char if " " <= char <= "~" else "?" for char in value[:256])
