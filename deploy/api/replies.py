"""OpenAI's answers: whole objects, stream chunks, errors. One style per endpoint.

A plain text chunk, by far the most frequent, is put together from bytes made once per stream.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from ...cluster.errors import RequestError
from ...cluster.messages import TokenLogprobs
from .answer import CallDelta
from .gathered import Gathered, Piece
from .text import Tokenizer

_LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """What every object of one answer repeats."""

    reply_id: str
    created: int  # Unix time
    model: str
    tokenizer: Tokenizer
    num_logprobs: int | None  # alternatives to each token of the output; None: no log-probabilities
    has_usage: bool  # chunks carry a usage field
    running_usage: Callable[[], dict[str, Any]] | None = None  # what that field tells; None: null
    has_token_ids: bool = False  # of prompt and output

    @property
    def has_logprobs(self) -> bool:
        return self.num_logprobs is not None


class ReplyStyle(Protocol):
    """How one endpoint words its answer."""

    end: bytes  # behind everything else of a stream that went well

    def opening(self, index: int) -> bytes:
        """The chunk before a choice's first text, or nothing."""
        ...

    def chunk(self, piece: Piece) -> bytes:
        """The chunks of a piece; nothing when it has nothing to show."""
        ...

    def closing(self, totals: dict[str, Any]) -> bytes:
        """The chunk behind all text, which has no choices: `totals` are its further fields."""
        ...

    def failure(self, error: RequestError) -> bytes:
        """How a stream that has begun says that it failed; nothing follows."""
        ...

    def whole(self, choices: list[Gathered], totals: dict[str, Any]) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The prompt of a choice, where its answer tells of it."""

    token_ids: list[int]
    echoed: str  # text that goes before the output
    num_logprobs: int | None  # alternatives to tell with each of its tokens; None: tell nothing


class ChatStyle:
    """/v1/chat/completions."""

    end = DONE

    def __init__(self, heading: Heading, prompt: Prompt) -> None:
        self._heading = heading
        self._prompt = prompt
        self._chunks = _Chunks("chat.completion.chunk", heading, '"delta":{"content":')

    def opening(self, index: int) -> bytes:
        return self._chunks.choice(
            {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            },
            **_prompt_ids(self._heading, self._prompt),
        )

    def chunk(self, piece: Piece) -> bytes:
        out = b""
        if piece.tokens or piece.calls or piece.reasoning or piece.token_ids:
            delta = _delta(piece)
            logprobs = self._logprobs(piece.tokens) if piece.tokens else None
            told = {"index": piece.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
            out = self._chunks.choice(told | _output_ids(self._heading, piece))
        elif piece.text:
            out = self._chunks.text(piece.index, piece.text, b"}")
        if piece.finish_reason is not None:
            out += self._chunks.choice(
                {"index": piece.index, "delta": {}, "logprobs": None, "finish_reason": piece.finish_reason}
            )
        return out

    def closing(self, totals: dict[str, Any]) -> bytes:
        return self._chunks.closing(totals)

    def failure(self, error: RequestError) -> bytes:
        return error_event(error)

    def whole(self, choices: list[Gathered], totals: dict[str, Any]) -> bytes:
        shown = [
            {
                "index": index,
                "message": _message(choice),
                "logprobs": self._logprobs(choice.tokens) if self._heading.has_logprobs else None,
                "finish_reason": choice.finish_reason,
                **_output_ids(self._heading, choice),
            }
            for index, choice in enumerate(choices)
        ]
        told = _prompt_logprobs(self._heading.tokenizer, self._prompt, choices[0])
        told |= _prompt_ids(self._heading, self._prompt)
        return _whole("chat.completion", self._heading, shown, {**told, **totals})

    def _logprobs(self, tokens: list[tuple[int, TokenLogprobs]]) -> dict[str, Any]:
        def entry(token_id: int, logprob: float) -> dict[str, Any]:
            spelled = self._heading.tokenizer.spell(token_id)
            return {"token": readable(spelled), "logprob": finite(logprob), "bytes": list(spelled)}

        content = [
            {**entry(token_id, at.logprob), "top_logprobs": [entry(i, logprob) for i, logprob in at.top]}
            for token_id, at in tokens
        ]
        return {"content": content, "refusal": None}


def _delta(piece: Piece) -> dict[str, Any]:
    """What a piece adds to an assistant's message; words, unless it has something else."""
    delta: dict[str, Any] = {}
    if piece.reasoning:
        delta["reasoning_content"] = piece.reasoning
    if piece.text or not (piece.reasoning or piece.calls):
        delta["content"] = piece.text
    if piece.calls:
        delta["tool_calls"] = [
            {"index": part.index, "function": {"arguments": part.arguments}}
            if part.name is None
            else {"index": part.index, **_call(part)}
            for part in piece.calls
        ]
    return delta


def _message(choice: Gathered) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [_call(call) for call in choice.calls]
    return message


def _call(call: CallDelta) -> dict[str, Any]:
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


class CompletionStyle:
    """/v1/completions."""

    end = DONE

    def __init__(self, heading: Heading, prompts: list[Prompt]) -> None:
        self._heading = heading
        self._prompts = prompts  # of each choice
        self._offsets: dict[int, int] = {}  # by choice: characters spelled so far
        self._chunks = _Chunks("text_completion", heading, '"text":')

    def opening(self, index: int) -> bytes:
        prompt = self._prompts[index]
        if ids := _prompt_ids(self._heading, prompt):
            told = {"index": index, "text": prompt.echoed, "logprobs": None, "finish_reason": None}
            return self._chunks.choice(told | ids)
        return self._chunks.text(index, prompt.echoed, b"") if prompt.echoed else b""

    def chunk(self, piece: Piece) -> bytes:
        if piece.tokens or piece.token_ids or piece.finish_reason is not None:
            return self._chunks.choice(
                {
                    "index": piece.index,
                    "text": piece.text,
                    "logprobs": self._logprobs(piece.index, piece.tokens) if piece.tokens else None,
                    "finish_reason": piece.finish_reason,
                    **_output_ids(self._heading, piece),
                }
            )
        return self._chunks.text(piece.index, piece.text, b"") if piece.text else b""

    def closing(self, totals: dict[str, Any]) -> bytes:
        return self._chunks.closing(totals)

    def failure(self, error: RequestError) -> bytes:
        return error_event(error)

    def whole(self, choices: list[Gathered], totals: dict[str, Any]) -> bytes:
        shown = [
            {
                "index": index,
                "text": prompt.echoed + choice.text,
                "logprobs": self._all_logprobs(index, prompt, choice) if self._heading.has_logprobs else None,
                "finish_reason": choice.finish_reason,
                **_prompt_logprobs(self._heading.tokenizer, prompt, choice),
                **_prompt_ids(self._heading, prompt),
                **_output_ids(self._heading, choice),
            }
            for index, (prompt, choice) in enumerate(zip(self._prompts, choices, strict=True))
        ]
        return _whole("text_completion", self._heading, shown, totals)

    def _all_logprobs(self, index: int, prompt: Prompt, choice: Gathered) -> dict[str, Any]:
        """Of the output, behind those of an echoed prompt; nothing comes before a prompt's first token."""
        if not prompt.echoed:
            return self._logprobs(index, choice.tokens)
        num = self._heading.num_logprobs
        unknown = TokenLogprobs(0.0, [])
        of_prompt = [choice.prompt_logprobs.get(place, unknown) for place in range(len(prompt.token_ids))]
        cut = [TokenLogprobs(at.logprob, at.top[:num]) for at in of_prompt]
        told = self._logprobs(index, [*zip(prompt.token_ids, cut, strict=True), *choice.tokens])
        told["token_logprobs"][0] = told["top_logprobs"][0] = None
        return told

    def _logprobs(self, index: int, tokens: list[tuple[int, TokenLogprobs]]) -> dict[str, Any]:
        spell = self._heading.tokenizer.spell
        names = [readable(spell(token_id)) for token_id, _ in tokens]
        offsets: list[int] = []
        offset = self._offsets.get(index, 0)
        for name in names:
            offsets.append(offset)
            offset += len(name)
        self._offsets[index] = offset
        return {
            "tokens": names,
            "token_logprobs": [finite(at.logprob) for _, at in tokens],
            "top_logprobs": [
                {readable(spell(i)): finite(logprob) for i, logprob in at.top} for _, at in tokens
            ],
            "text_offset": offsets,
        }


class _Chunks:
    """Server-sent events of one stream."""

    def __init__(self, kind: str, heading: Heading, text_key: str) -> None:
        encode = msgspec.json.encode
        self._head = b'data: {"id":%b,"object":"%b","created":%d,"model":%b,"choices":[' % (
            encode(heading.reply_id),
            kind.encode(),
            heading.created,
            encode(heading.model),
        )
        self._constant_tail = b'],"usage":null}\n\n' if heading.has_usage else b"]}\n\n"
        self._running_usage = heading.running_usage
        self._text_key = text_key.encode()
        self._encoder = msgspec.json.Encoder()

    def text(self, index: int, text: str, closing: bytes) -> bytes:
        return b'%b{"index":%d,%b%b%b,"logprobs":null,"finish_reason":null}%b' % (
            self._head,
            index,
            self._text_key,
            self._encoder.encode(text),
            closing,
            self._tail,
        )

    def choice(self, choice: dict[str, Any], **further: Any) -> bytes:
        """A chunk of one choice; `further` are fields beside the choices."""
        beside = b"]," + self._encoder.encode(further)[1:-1] + self._tail[1:] if further else self._tail
        return self._head + self._encoder.encode(choice) + beside

    @property
    def _tail(self) -> bytes:
        if self._running_usage is None:
            return self._constant_tail
        return b'],"usage":%b}\n\n' % self._encoder.encode(self._running_usage())

    def closing(self, totals: dict[str, Any]) -> bytes:
        return self._head + b"]," + self._encoder.encode(totals)[1:] + b"\n\n"


def _prompt_logprobs(tokenizer: Tokenizer, prompt: Prompt, choice: Gathered) -> dict[str, Any]:
    """vLLM's field: of each token of the prompt by id, its own first; nothing is told of the very first."""
    if prompt.num_logprobs is None:
        return {}

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"logprob": finite(logprob), "decoded_token": readable(tokenizer.spell(token_id))}

    def told(token_id: int, at: TokenLogprobs) -> dict[str, Any]:
        of_others = {str(i): entry(i, logprob) for i, logprob in at.top[: prompt.num_logprobs]}
        return {str(token_id): entry(token_id, at.logprob), **of_others}

    places = range(1, len(prompt.token_ids))
    return {
        "prompt_logprobs": [None, *(told(prompt.token_ids[i], choice.prompt_logprobs[i]) for i in places)]
    }


def _prompt_ids(heading: Heading, prompt: Prompt) -> dict[str, Any]:
    """vLLM's field, beside the choices of a chat and inside those of a text completion."""
    return {"prompt_token_ids": prompt.token_ids} if heading.has_token_ids else {}


def _output_ids(heading: Heading, told: Piece | Gathered) -> dict[str, Any]:
    return {"token_ids": told.token_ids} if heading.has_token_ids else {}


def error_object(error: RequestError) -> dict[str, Any]:
    """OpenAI's error object, all four keys."""
    return {
        "error": {
            "message": error.message,
            "type": error.error_type,
            "param": error.param,
            "code": error.code,
        }
    }


def error_event(error: RequestError) -> bytes:
    """How a stream that has begun says that it failed; no [DONE] follows."""
    return b"data: " + msgspec.json.encode(error_object(error)) + b"\n\n"


def _whole(kind: str, heading: Heading, choices: list[dict[str, Any]], totals: dict[str, Any]) -> bytes:
    return msgspec.json.encode(
        {
            "id": heading.reply_id,
            "object": kind,
            "created": heading.created,
            "model": heading.model,
            "choices": choices,
            **totals,
        }
    )


def readable(spelled: bytes) -> str:
    """A token as text; one that is part of a character is written byte by byte, as OpenAI does."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
