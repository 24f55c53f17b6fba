"""The output items of /v1/responses: thoughts, words, calls, and the events that build each of them up."""

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from ...cluster.messages import TokenLogprobs
from .answer import CallDelta
from .gathered import Gathered, Piece
from .replies import finite, readable
from .text import Tokenizer

Kind = Literal["reasoning", "message", "function_call"]
Event = tuple[str, dict[str, Any]]  # type, further fields

_PREFIXES: dict[Kind, str] = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


@dataclass(slots=True)
class Item:
    """One output item, as far as it has come."""

    kind: Kind
    text: str = ""  # thoughts, words, or the arguments of a call
    tokens: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    call_id: str = ""
    name: str = ""
    item_id: str = ""

    def __post_init__(self) -> None:
        self.item_id = f"{_PREFIXES[self.kind]}_{uuid.uuid4().hex}"

    @classmethod
    def of_call(cls, call: CallDelta) -> "Item":
        return cls("function_call", call.arguments, call_id=call.call_id or "", name=call.name or "")


class Items:
    """The items of one response, in order; the last one may still grow."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._items: list[Item] = []
        self._is_open = False

    def gather(self, told: Gathered) -> None:
        """All of a whole answer."""
        if told.reasoning:
            self._items.append(Item("reasoning", told.reasoning))
        if told.text or told.tokens or not told.calls:
            self._items.append(Item("message", told.text, told.tokens))
        self._items += [Item.of_call(call) for call in told.calls]

    def add(self, piece: Piece) -> Iterator[Event]:
        """The events of what a piece adds."""
        if piece.reasoning:
            yield from self._grow("reasoning", piece.reasoning)
        if piece.text or (piece.tokens and not piece.reasoning and not piece.calls):
            yield from self._grow("message", piece.text, piece.tokens)
        for call in piece.calls:
            if call.name is not None:
                yield from self.finish("completed")
                yield from self._begin(Item.of_call(CallDelta(call.index, "", call.call_id, call.name)))
            if call.arguments:
                yield from self._grow("function_call", call.arguments)

    def finish(self, status: str) -> Iterator[Event]:
        """The events that end the last item."""
        if not self._is_open:
            return
        self._is_open = False
        item, place = self._items[-1], self._place()
        match item.kind:
            case "message":
                logprobs = self._logprobs(item.tokens, has_bytes=False)
                words = {**place, "content_index": 0}
                yield "response.output_text.done", {**words, "text": item.text, "logprobs": logprobs}
                yield "response.content_part.done", {**words, "part": self._part(item)}
            case "reasoning":
                yield "response.reasoning_text.done", {**place, "content_index": 0, "text": item.text}
            case "function_call":
                told = {"name": item.name, "arguments": item.text}
                yield "response.function_call_arguments.done", {**place, **told}
        index = len(self._items) - 1
        yield "response.output_item.done", {"output_index": index, "item": self._shown(item, status)}

    def finish_all(self, status: str) -> Iterator[Event]:
        """The events behind the last piece; an answer of nothing is an empty message."""
        if not any(item.kind != "reasoning" for item in self._items):
            yield from self._grow("message", "")
        yield from self.finish(status)

    def shown(self, status: str) -> list[dict[str, Any]]:
        """OpenAI's output items; only the last can be incomplete."""
        last = len(self._items) - 1
        return [
            self._shown(item, status if index == last else "completed")
            for index, item in enumerate(self._items)
        ]

    def _grow(
        self, kind: Kind, text: str, tokens: list[tuple[int, TokenLogprobs]] | None = None
    ) -> Iterator[Event]:
        if not self._is_open or self._items[-1].kind != kind:
            yield from self.finish("completed")
            yield from self._begin(Item(kind))
        item = self._items[-1]
        item.text += text
        item.tokens += tokens or []
        if not text and not tokens:
            return
        delta: dict[str, Any] = {**self._place(), "delta": text}
        match kind:
            case "message":
                delta |= {"content_index": 0, "logprobs": self._logprobs(tokens or [], has_bytes=False)}
                yield "response.output_text.delta", delta
            case "reasoning":
                yield "response.reasoning_text.delta", {**delta, "content_index": 0}
            case "function_call":
                yield "response.function_call_arguments.delta", delta

    def _begin(self, item: Item) -> Iterator[Event]:
        self._items.append(item)
        self._is_open = True
        shown = self._shown(item, "in_progress")
        if item.kind == "message":
            shown["content"] = []
        yield "response.output_item.added", {"output_index": len(self._items) - 1, "item": shown}
        if item.kind == "message":
            part = self._part(item)
            yield "response.content_part.added", {**self._place(), "content_index": 0, "part": part}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1].item_id, "output_index": len(self._items) - 1}

    def _shown(self, item: Item, status: str) -> dict[str, Any]:
        shown: dict[str, Any] = {"id": item.item_id, "type": item.kind, "status": status}
        match item.kind:
            case "message":
                return {**shown, "role": "assistant", "content": [self._part(item)]}
            case "reasoning":
                content = [{"type": "reasoning_text", "text": item.text}] if item.text else []
                return {**shown, "summary": [], "content": content}
            case "function_call":
                return {**shown, "call_id": item.call_id, "name": item.name, "arguments": item.text}

    def _part(self, item: Item) -> dict[str, Any]:
        logprobs = self._logprobs(item.tokens, has_bytes=True)
        return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, tokens: list[tuple[int, TokenLogprobs]], *, has_bytes: bool) -> list[dict[str, Any]]:
        """Events leave out the bytes that items have."""
        entry: Callable[[int, float], dict[str, Any]] = self._entry if has_bytes else self._bare_entry
        return [
            {**entry(token_id, at.logprob), "top_logprobs": [entry(i, logprob) for i, logprob in at.top]}
            for token_id, at in tokens
        ]

    def _bare_entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": readable(self._tokenizer.spell(token_id)), "logprob": finite(logprob)}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {**self._bare_entry(token_id, logprob), "bytes": list(self._tokenizer.spell(token_id))}
