"""Text to tokens and back: the tokenizer, conversations, streaming text, stop strings.

Every token has fixed bytes, so decoding is joining bytes and reading them as UTF-8. That makes streamed text
equal to text decoded at once whatever the chunking, at a constant price per token.
"""

import codecs
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from ...cluster.errors import RequestError
from ...cluster.token_bytes import MARKERS, load_tokenizer, token_bytes
from .chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A prompt made from messages."""

    token_ids: list[int]
    tail: str  # of its text: the template's last own words, where an assistant's turn may have begun


class Tokenizer:
    """A model's tokenizer and chat template. Immutable after `load`; safe to use from several threads."""

    def __init__(
        self, parsing: tokenizers.Tokenizer, plain: tokenizers.Tokenizer, template: ChatTemplate | None
    ) -> None:
        self._parsing = parsing  # special-token text becomes special tokens
        self._plain = plain  # special-token text is text
        self._template = template
        added = parsing.get_added_tokens_decoder()
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}
        self._special_pattern = _any_of(self._special.values())
        self._bytes, self._strips_first_space = token_bytes(parsing, self._special)
        self._marker_bytes = {i: text.encode() for i, text in self._special.items() if text in MARKERS}

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read `tokenizer.json` and the chat template of a model directory; ModelError when that fails."""
        parsing, plain = (load_tokenizer(path) for _ in range(2))
        plain.encode_special_tokens = True
        return cls(parsing, plain, ChatTemplate.load(path))

    @property
    def vocab_size(self) -> int:
        """One above the largest token id."""
        return len(self._bytes)

    @cached_property
    def longest_token_len(self) -> int:
        """Bytes, and so at least characters, of the longest token."""
        return max(map(len, self._bytes))

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def chat_template(self) -> ChatTemplate:
        """RequestError where the model has none."""
        if self._template is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions",
                code="invalid_messages",
                param="messages",
            )
        return self._template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a raw prompt: special-token text counts, and the model's prefix (often BOS) is added."""
        return self._parsing.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_word(self, text: str) -> list[int]:
        """Tokens of a piece of text: nothing is added and special-token text is text."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of `render`, where there is nothing but messages."""
        return self.render(messages).token_ids

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        opens_turn: bool = True,
        continues: bool = False,
    ) -> RenderedChat:
        """A conversation as tokens, ready for the assistant's turn; `options` are variables of the template.

        Without `opens_turn` it ends where the last message does; with `continues` even before the words that
        end a turn, so that the answer goes on with that message.
        Only the template can write special tokens: where something of a client's holds the text of one, that
        text is encoded as text, so a client cannot close its turn and speak as another role.
        Raises RequestError when the template refuses the messages.
        """
        template = self.chat_template
        # The rendered text is one string, so what came from a client is marked with an unguessable word.
        nonce = secrets.token_hex(8)
        hidden: list[str] = []

        def hide(match: re.Match[str]) -> str:
            hidden.append(match.group())
            return f"\ue000{nonce}:{len(hidden) - 1}\ue001"

        def guard(value: Any) -> Any:
            if isinstance(value, str):
                return self._special_pattern.sub(hide, value)
            if isinstance(value, Mapping):
                return {guard(key): guard(held) for key, held in value.items()}
            return [guard(held) for held in value] if isinstance(value, list) else value

        guarded = [guard(message) for message in messages]
        end = f"\ue000{nonce}\ue001"
        if continues:
            guarded[-1] = {**guarded[-1], "content": guarded[-1]["content"] + end}
        rendered = template.render(
            guarded,
            tools=None if tools is None else [guard(tool) for tool in tools],
            options=guard(options or {}),
            opens_turn=opens_turn and not continues,
        )
        if continues:
            rendered = rendered[: max(rendered.rfind(end), 0)]
        ids: list[int] = []
        pieces = re.split(f"\ue000{nonce}:([0-9]+)\ue001", rendered)
        for index, piece in enumerate(pieces):
            if index % 2:
                ids += self.encode_word(hidden[int(piece)])
            elif piece:
                ids += self._parsing.encode(piece, add_special_tokens=False).ids
        return RenderedChat(ids, pieces[-1])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens at once, without special tokens; bytes that are not UTF-8 become U+FFFD."""
        text = self.join_bytes(ids).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._strips_first_space else text

    def join_bytes(self, ids: Iterable[int], *, has_markers: bool = False) -> bytes:
        """The bytes of tokens; special tokens, and ids the vocabulary does not have, have none.

        With `has_markers` the special tokens that mark calls and thoughts are text.
        """
        table = self._bytes
        if has_markers and self._marker_bytes:
            markers = self._marker_bytes
            return b"".join(
                markers.get(token_id) or table[token_id] for token_id in ids if 0 <= token_id < len(table)
            )
        return b"".join(table[token_id] for token_id in ids if 0 <= token_id < len(table))

    def spell(self, token_id: int) -> bytes:
        """The bytes that name one token, special tokens included: what log-probabilities show."""
        special = self._special.get(token_id)
        return special.encode() if special is not None else self.join_bytes((token_id,))


class Detokenizer:
    """The text of one stream of output tokens; never half a character.

    Output continues a prompt, so a first token's leading space is kept.
    """

    def __init__(self, tokenizer: Tokenizer, *, has_markers: bool = False) -> None:
        self._tokenizer = tokenizer
        self._has_markers = has_markers  # special tokens that mark calls and thoughts are text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The characters that these tokens complete."""
        return self._decoder.decode(self._tokenizer.join_bytes(ids, has_markers=self._has_markers))

    def flush(self) -> str:
        """At the end of the stream: U+FFFD for a character that was never completed, or nothing."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Finds the first of some stop strings in streamed text, and holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str], *, is_shown: bool = False) -> None:
        self._stops = tuple(stops)
        self._is_shown = is_shown  # the stop string itself is text
        self._held = ""
        self.is_matched = False
        self.matched: str | None = None  # which of the stop strings it was

    def push(self, text: str) -> str:
        """The text that is safe to send now; from a match on, the rest is dropped, and so is the stop string
        unless it is to be shown."""
        if self.is_matched:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        # The stop string that is complete first wins, so chunks that hold several tokens change nothing.
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, at, self.matched = min(found)
            self.is_matched = True
            self._held = ""
            return text[: end if self._is_shown else at]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """At the end of the stream: what was held back and turned out to be text."""
        held, self._held = self._held, ""
        return held


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper start of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
