"""What /v1/messages answers: Anthropic's message, or the events that build one up."""

from typing import Any

import msgspec

from ...cluster.errors import RequestError
from .errors import anthropic_error
from .replies import Gathered, Heading, Piece
from .validate import Job

_encode = msgspec.json.encode


class MessageStyle:
    """/v1/messages. Its only block is one of text."""

    end = b""

    def __init__(self, heading: Heading, job: Job) -> None:
        self._heading = heading
        self._num_prompt_tokens = job.num_prompt_tokens
        self._told = Gathered()

    def opening(self, index: int) -> bytes:
        del index
        # How much of the prompt was cached is told at the end, with the rest of the usage.
        usage = {"input_tokens": self._num_prompt_tokens, "output_tokens": 0}
        message = self._message([], None, None, usage)
        block = {"type": "text", "text": ""}
        return _event("message_start", message=message) + _event(
            "content_block_start", index=0, content_block=block
        )

    def chunk(self, piece: Piece) -> bytes:
        self._told.add(piece)
        if not piece.text:
            return b""
        return _event("content_block_delta", index=0, delta={"type": "text_delta", "text": piece.text})

    def closing(self, totals: dict[str, Any]) -> bytes:
        told = self._told
        delta = {"stop_reason": _stop_reason(told), "stop_sequence": told.stop_string}
        usage = _usage(totals["usage"])
        further = {name: value for name, value in totals.items() if name != "usage"}
        return (
            _event("content_block_stop", index=0)
            + _event("message_delta", delta=delta, usage=usage, **further)
            + _event("message_stop")
        )

    def failure(self, error: RequestError) -> bytes:
        return b"event: error\ndata: %b\n\n" % _encode(anthropic_error(error))

    def whole(self, choices: list[Gathered], totals: dict[str, Any]) -> bytes:
        (told,) = choices
        content = [{"type": "text", "text": told.text}] if told.text else []
        message = self._message(content, _stop_reason(told), told.stop_string, _usage(totals["usage"]))
        return _encode({**totals, **message})

    def _message(
        self, content: list[Any], stop_reason: str | None, stop_sequence: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self._heading.reply_id,
            "type": "message",
            "role": "assistant",
            "model": self._heading.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": usage,
        }


def _stop_reason(told: Gathered) -> str:
    if told.finish_reason == "length":
        return "max_tokens"
    return "end_turn" if told.stop_string is None else "stop_sequence"


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Anthropic counts what was read from the cache beside the input, not as part of it."""
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": usage["completion_tokens"],
    }


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))
