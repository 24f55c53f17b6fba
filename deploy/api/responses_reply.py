"""What /v1/responses answers: a response object, or the events that build one up."""

import uuid
from typing import Any

import msgspec

from ...cluster.errors import RequestError
from .replies import Gathered, Heading, Piece, finite, readable
from .responses_request import ResponseJob

_encode = msgspec.json.encode


class ResponseStyle:
    """/v1/responses. Its only output item is a message with one part of text."""

    end = b""

    def __init__(self, heading: Heading, job: ResponseJob) -> None:
        self._heading = heading
        self._request = job.request
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._number = 0  # of the next event
        self._told = Gathered()

    def opening(self, index: int) -> bytes:
        del index
        response = self._response("in_progress", [])
        item = self._item("in_progress", [])
        return (
            self._event("response.created", response=response)
            + self._event("response.in_progress", response=response)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._part_event("response.content_part.added", part=self._part("", []))
        )

    def chunk(self, piece: Piece) -> bytes:
        self._told.add(piece)
        if not piece.text and not piece.tokens:
            return b""
        logprobs = self._logprobs(piece.tokens, has_bytes=False)
        return self._part_event("response.output_text.delta", delta=piece.text, logprobs=logprobs)

    def closing(self, totals: dict[str, Any]) -> bytes:
        told = self._told
        status = _status(told)
        part = self._part(told.text, told.tokens)
        item = self._item(status, [part])
        logprobs = self._logprobs(told.tokens, has_bytes=False)
        return (
            self._part_event("response.output_text.done", text=told.text, logprobs=logprobs)
            + self._part_event("response.content_part.done", part=part)
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(f"response.{status}", response=self._response(status, [item], totals))
        )

    def failure(self, error: RequestError) -> bytes:
        response = self._response("failed", [])
        response["error"] = {"code": "server_error", "message": error.message}
        return self._event("error", code=error.code, message=error.message, param=error.param) + self._event(
            "response.failed", response=response
        )

    def whole(self, choices: list[Gathered], totals: dict[str, Any]) -> bytes:
        (told,) = choices
        status = _status(told)
        item = self._item(status, [self._part(told.text, told.tokens)])
        return _encode(self._response(status, [item], totals))

    def _response(
        self, status: str, output: list[dict[str, Any]], totals: dict[str, Any] | None = None
    ) -> dict[str, Any]:
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
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": request.reasoning or {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": (request.text and request.text.format) or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "metadata": request.metadata or {},
        }
        if totals is not None:
            response |= {**totals, "usage": _usage(totals["usage"])}
        return response

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _part(self, text: str, tokens: list[Any]) -> dict[str, Any]:
        logprobs = self._logprobs(tokens, has_bytes=True)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, tokens: list[Any], *, has_bytes: bool) -> list[dict[str, Any]]:
        """Events leave out the bytes that items have."""

        def entry(token_id: int, logprob: float) -> dict[str, Any]:
            spelled = self._heading.tokenizer.spell(token_id)
            told: dict[str, Any] = {"token": readable(spelled), "logprob": finite(logprob)}
            return {**told, "bytes": list(spelled)} if has_bytes else told

        return [
            {**entry(token_id, at.logprob), "top_logprobs": [entry(i, logprob) for i, logprob in at.top]}
            for token_id, at in tokens
        ]

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        content = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(content))


def _status(told: Gathered) -> str:
    return "incomplete" if told.finish_reason == "length" else "completed"


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
