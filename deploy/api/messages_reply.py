"""What /v1/messages answers: Anthropic's message, or the events that build one up."""

import json
from typing import Any

import msgspec

from ...cluster.errors import RequestError
from .errors import anthropic_error
from .gathered import Gathered, Piece
from .replies import Heading
from .validate import Job

_encode = msgspec.json.encode

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_NO_SIGNATURE = ""  # of a thought; it would prove to Anthropic's servers that the thought is theirs


class MessageStyle:
    """/v1/messages. An answer is a list of blocks: thoughts, words, calls."""

    end = b""

    def __init__(self, heading: Heading, job: Job) -> None:
        self._heading = heading
        self._num_prompt_tokens = job.num_prompt_tokens
        self._num_blocks = 0
        self._open: str | None = None  # kind of the last block, while it may grow
        self._finish_reason: str | None = None
        self._stop_string: str | None = None

    def opening(self, index: int) -> bytes:
        del index
        # How much of the prompt was cached is told at the end, with the rest of the usage.
        usage = {"input_tokens": self._num_prompt_tokens, "output_tokens": 0}
        return _event("message_start", message=self._message([], None, None, usage))

    def chunk(self, piece: Piece) -> bytes:
        self._finish_reason, self._stop_string = piece.finish_reason, piece.stop_string
        out = b""
        if piece.reasoning:
            out += self._block("thinking", {"thinking": "", "signature": _NO_SIGNATURE})
            out += self._delta("thinking_delta", thinking=piece.reasoning)
        if piece.text:
            out += self._block("text", {"text": ""})
            out += self._delta("text_delta", text=piece.text)
        for call in piece.calls:
            if call.name is not None:
                out += self._close() + self._block(
                    "tool_use", {"id": call.call_id, "name": call.name, "input": {}}
                )
            if call.arguments:
                out += self._delta("input_json_delta", partial_json=call.arguments)
        return out

    def closing(self, totals: dict[str, Any]) -> bytes:
        stop_reason = _stop_reason(self._finish_reason, self._stop_string)
        delta = {"stop_reason": stop_reason, "stop_sequence": self._stop_string}
        further = {name: value for name, value in totals.items() if name != "usage"}
        return (
            self._close()
            + _event("message_delta", delta=delta, usage=_usage(totals["usage"]), **further)
            + _event("message_stop")
        )

    def failure(self, error: RequestError) -> bytes:
        return b"event: error\ndata: %b\n\n" % _encode(anthropic_error(error))

    def whole(self, choices: list[Gathered], totals: dict[str, Any]) -> bytes:
        (told,) = choices
        content: list[dict[str, Any]] = []
        if told.reasoning:
            content.append({"type": "thinking", "thinking": told.reasoning, "signature": _NO_SIGNATURE})
        if told.text:
            content.append({"type": "text", "text": told.text})
        content += [
            {"type": "tool_use", "id": call.call_id, "name": call.name, "input": _object(call.arguments)}
            for call in told.calls
        ]
        stop_reason = _stop_reason(told.finish_reason, told.stop_string)
        message = self._message(content, stop_reason, told.stop_string, _usage(totals["usage"]))
        return _encode({**totals, **message})

    def _block(self, kind: str, empty: dict[str, Any]) -> bytes:
        """The event that begins a block, unless one of its kind is open."""
        if self._open == kind:
            return b""
        closed = self._close()
        self._open = kind
        self._num_blocks += 1
        block = {"type": kind, **empty}
        return closed + _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _delta(self, kind: str, **fields: Any) -> bytes:
        return _event("content_block_delta", index=self._num_blocks - 1, delta={"type": kind, **fields})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", index=self._num_blocks - 1)

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


def _stop_reason(finish_reason: str | None, stop_string: str | None) -> str:
    if stop_string is not None and finish_reason == "stop":
        return "stop_sequence"
    return _STOP_REASONS.get(finish_reason or "", "end_turn")


def _object(arguments: str) -> dict[str, Any]:
    """A call's input; what the end of the answer cut off, as it stands."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": arguments}


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
