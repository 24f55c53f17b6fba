"""What /v1/responses answers: a response object, or the events that build one up."""

from collections.abc import Iterable
from typing import Any

import msgspec

from ...cluster.errors import RequestError
from .gathered import Gathered, Piece
from .replies import Heading
from .responses_items import Event, Items
from .responses_request import ResponseJob

_encode = msgspec.json.encode


class ResponseStyle:
    """/v1/responses."""

    end = b""

    def __init__(self, heading: Heading, job: ResponseJob) -> None:
        self._heading = heading
        self._request = job.request
        self._items = Items(heading.tokenizer)
        self._number = 0  # of the next event
        self._finish_reason: str | None = None

    def opening(self, index: int) -> bytes:
        del index
        response = {"response": self._response("in_progress")}
        return self._events([("response.created", response), ("response.in_progress", response)])

    def chunk(self, piece: Piece) -> bytes:
        self._finish_reason = piece.finish_reason
        return self._events(self._items.add(piece))

    def closing(self, totals: dict[str, Any]) -> bytes:
        status = _status(self._finish_reason)
        ending = self._events(self._items.finish_all(status))
        response = self._response(status, totals)
        return ending + self._events([(f"response.{status}", {"response": response})])

    def failure(self, error: RequestError) -> bytes:
        response = self._response("failed")
        response["error"] = {"code": "server_error", "message": error.message}
        told = {"code": error.code, "message": error.message, "param": error.param}
        return self._events([("error", told), ("response.failed", {"response": response})])

    def whole(self, choices: list[Gathered], totals: dict[str, Any]) -> bytes:
        (told,) = choices
        self._items.gather(told)
        return _encode(self._response(_status(told.finish_reason), totals))

    def _response(self, status: str, totals: dict[str, Any] | None = None) -> dict[str, Any]:
        """`totals` come with the end; without them nothing is told of the output."""
        request, heading = self._request, self._heading
        is_short = status == "incomplete"
        response: dict[str, Any] = {
            "id": heading.reply_id,
            "object": "response",
            "created_at": heading.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_short else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": heading.model,
            "output": [] if totals is None else self._items.shown(status),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": request.reasoning or {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": (request.text and request.text.format) or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": [_tool(tool) for tool in request.tools or []],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "metadata": request.metadata or {},
        }
        if totals is not None:
            response |= {**totals, "usage": _usage(totals["usage"])}
        return response

    def _events(self, events: Iterable[Event]) -> bytes:
        out = b""
        for kind, fields in events:
            content = {"type": kind, "sequence_number": self._number, **fields}
            self._number += 1
            out += b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(content))
        return out


def _status(finish_reason: str | None) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"strict": None, "parameters": None, **tool}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    details = usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
        "total_tokens": usage["total_tokens"],
    }
