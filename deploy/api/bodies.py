"""From a body to a model of the protocol: a size limit, JSON without its traps, types and bounds.

What is wrong is said in OpenAI's words.
"""

import asyncio
import json
import math
import re
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request as HttpRequest

from ...cluster.errors import RequestError

BODY_S = 60.0  # for a body to arrive

Request = TypeVar("Request", bound=BaseModel)

_CODES = {
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_required_parameter",
    "too_short": "empty_array",
    "too_long": "array_above_max_length",
    "string_too_short": "empty_string",
    "string_too_long": "string_above_max_length",
    "literal_error": "invalid_value",
}
_OUR_CODES = {
    "array_above_max_length",
    "conflicting_parameters",
    "empty_array",
    "integer_below_min_value",
    "invalid_token_id",
    "invalid_type",
    "missing_required_parameter",
    "unsupported_content_type",
    "unsupported_parameter",
}

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_body(request: HttpRequest, max_bytes: int) -> bytes:
    """The body, never more of it in memory than the limit. Raises RequestError 408, 413 or 415."""
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
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise RequestError(
            f"the body did not arrive within {BODY_S:g} s",
            status=408,
            code="request_timeout",
            error_type="timeout_error",
        ) from None
    return bytes(body)


def parse_request(kind: type[Request], body: bytes) -> Request:
    """The body as a model of the protocol. Raises RequestError for the first thing that is wrong with it."""
    return validated(kind, parse_object(body))


def validated(kind: type[Request], document: dict[str, Any]) -> Request:
    """A JSON object as a model of the protocol; RequestError as in `parse_request`."""
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_input=False)[0], document) from None


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object that a body is: UTF-8, finite numbers, no key twice. Raises RequestError."""
    try:
        document = json.loads(
            body.decode(), object_pairs_hook=_unique, parse_constant=_not_a_number, parse_float=_finite
        )
        if _SURROGATE.search(body):
            json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError("the body has half of a surrogate pair", code="invalid_encoding") from None
    except UnicodeDecodeError:
        raise RequestError("the body is not UTF-8", code="invalid_encoding") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply", code="json_too_deep") from None
    except ValueError as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(document, dict):
        raise RequestError("the body must be a JSON object", code="invalid_type")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise RequestError("the body has a key twice in one object", code="duplicate_key")
    return document


def _finite(literal: str) -> float:
    value = float(literal)
    return value if math.isfinite(value) else _not_a_number(literal)


def _not_a_number(literal: str) -> NoReturn:
    raise RequestError(f"the body holds {literal[:20]}; numbers must be finite", code="invalid_json")


def _refusal(detail: ErrorDetails, document: dict[str, Any]) -> RequestError:
    """The first of pydantic's complaints, in OpenAI's words."""
    kind, context = detail["type"], detail.get("ctx", {})
    if isinstance(own := context.get("error"), RequestError):  # of a validator that has its own words
        return own
    path = _path(detail, document) or context.get("name", "")
    if kind in _OUR_CODES:
        code = kind
    elif kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        bound = next(value for name, value in context.items() if name in ("ge", "gt", "le", "lt"))
        number = "integer" if isinstance(bound, int) else "decimal"
        code = f"{number}_{'below_min' if kind.startswith('greater') else 'above_max'}_value"
    elif kind.endswith("_type") or kind == "int_from_float":
        code = "invalid_type"
    else:
        code = _CODES.get(kind, "invalid_value")
    if kind == "missing":
        message = f"Missing required parameter: '{path}'."
    else:
        problem = detail["msg"].removeprefix(f"{context.get('name', '')} ")
        message = f"Invalid '{path}': {problem}."
    return RequestError(message, code=code, param=path or None)


def _path(detail: ErrorDetails, document: dict[str, Any]) -> str:
    """Where in the document it is; pydantic also names the arm of a union it has tried, which is nowhere."""
    path, here = "", document
    for part in detail["loc"]:
        is_index = isinstance(part, int) and isinstance(here, list) and part < len(here)
        if is_index or (isinstance(here, dict) and part in here):
            here = here[part]  # pyright: ignore[reportArgumentType, reportCallIssue]
        elif detail["type"] != "missing" or part != detail["loc"][-1]:
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".")
