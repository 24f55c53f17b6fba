"""Text to tokens and back: the tokenizer, the chat template, streaming text, stop strings.

Every token has fixed bytes, so decoding is joining bytes and reading them as UTF-8. That makes streamed text
equal to text decoded at once whatever the chunking, at a constant price per token.
"""

import codecs
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

from ...cluster.errors import ModelError, RequestError

_SPACE = "\u2581"  # how SentencePiece vocabularies write a space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer and chat template. Immutable after `load`; safe to use from several threads."""

    def __init__(
        self, parsing: tokenizers.Tokenizer, plain: tokenizers.Tokenizer, template: "ChatTemplate | None"
    ) -> None:
        self._parsing = parsing  # special-token text becomes special tokens
        self._plain = plain  # special-token text is text
        self._template = template
        added = parsing.get_added_tokens_decoder()
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}
        self._special_pattern = _any_of(self._special.values())
        self._bytes, self._strips_first_space = _token_bytes(parsing, self._special)

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read `tokenizer.json` and the chat template of a model directory; ModelError when that fails."""
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ModelError(f"{path} has no tokenizer.json; copy it there from the model's publisher")
        try:
            parsing, plain = (tokenizers.Tokenizer.from_file(str(file)) for _ in range(2))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{file} is not a tokenizer: {error}") from None
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

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a raw prompt: special-token text counts, and the model's prefix (often BOS) is added."""
        return self._parsing.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_word(self, text: str) -> list[int]:
        """Tokens of a piece of text: nothing is added and special-token text is text."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of a conversation, ready for the assistant's turn.

        Only the template can write special tokens: where a message's content holds the text of one, that text
        is encoded as text, so a client cannot close its turn and speak as another role.
        Raises RequestError when the template refuses the messages.
        """
        if self._template is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions",
                code="invalid_messages",
                param="messages",
            )
        # The rendered text is one string, so what came from a client is marked with an unguessable word.
        nonce = secrets.token_hex(8)
        hidden: list[str] = []

        def hide(match: re.Match[str]) -> str:
            hidden.append(match.group())
            return f"\ue000{nonce}:{len(hidden) - 1}\ue001"

        guarded = [
            {**message, "content": self._special_pattern.sub(hide, message["content"])}
            for message in messages
        ]
        rendered = self._template.render(guarded)
        ids: list[int] = []
        for index, piece in enumerate(re.split(f"\ue000{nonce}:([0-9]+)\ue001", rendered)):
            if index % 2:
                ids += self.encode_word(hidden[int(piece)])
            elif piece:
                ids += self._parsing.encode(piece, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens at once, without special tokens; bytes that are not UTF-8 become U+FFFD."""
        text = self.join_bytes(ids).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._strips_first_space else text

    def join_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of tokens; special tokens, and ids the vocabulary does not have, have none."""
        table = self._bytes
        return b"".join(table[token_id] for token_id in ids if 0 <= token_id < len(table))

    def spell(self, token_id: int) -> bytes:
        """The bytes that name one token, special tokens included: what log-probabilities show."""
        special = self._special.get(token_id)
        return special.encode() if special is not None else self.join_bytes((token_id,))


class Detokenizer:
    """The text of one stream of output tokens; never half a character.

    Output continues a prompt, so a first token's leading space is kept.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The characters that these tokens complete."""
        return self._decoder.decode(self._tokenizer.join_bytes(ids))

    def flush(self) -> str:
        """At the end of the stream: U+FFFD for a character that was never completed, or nothing."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Finds the first of some stop strings in streamed text, and holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_matched = False
        self.matched: str | None = None  # which of the stop strings it was

    def push(self, text: str) -> str:
        """The text that is safe to send now; from a match on, the stop string and the rest are dropped."""
        if self.is_matched:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        # The stop string that is complete first wins, so chunks that hold several tokens change nothing.
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self.is_matched = True
            self._held = ""
            return text[:at]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """At the end of the stream: what was held back and turned out to be text."""
        held, self._held = self._held, ""
        return held


class ChatTemplate:
    """A model's Jinja chat template, in a sandbox that can neither reach Python nor change its input."""

    def __init__(self, source: str, named_tokens: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template is not valid Jinja: {error}") from None
        self._named_tokens = dict(named_tokens)

    @classmethod
    def load(cls, path: Path) -> "ChatTemplate | None":
        """The template in `chat_template.jinja`, else in `tokenizer_config.json`; None without either."""
        config: dict[str, Any] = {}
        if (file := path / "tokenizer_config.json").is_file():
            config = json.loads(file.read_text(encoding="utf-8"))
        if (file := path / "chat_template.jinja").is_file():
            source = file.read_text(encoding="utf-8")
        else:
            source = config.get("chat_template")
        if isinstance(source, list):  # several by name
            source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
        if source is None:
            return None
        named = {name: config[name] for name in _NAMED_TOKENS if config.get(name)}
        return cls(source, {k: v if isinstance(v, str) else v["content"] for k, v in named.items()})

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._named_tokens)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}",
                code="invalid_messages",
                param="messages",
            ) from None


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; for serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # Jinja's own escapes HTML


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper start of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _token_bytes(tokenizer: tokenizers.Tokenizer, special: Mapping[int, str]) -> tuple[list[bytes], bool]:
    """Bytes by token id, and whether a decoded text drops its first space."""
    decoders = _decoder_steps(tokenizer)
    names = {step["type"] for step in decoders}
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values()) + 1)
    if "ByteLevel" in names:
        alphabet = _byte_alphabet()
        for token, token_id in vocab.items():
            try:
                table[token_id] = bytes(alphabet[character] for character in token)
            except KeyError:  # an added token outside the alphabet stands for itself
                table[token_id] = token.encode()
        strips = False
    elif "ByteFallback" in names or "Metaspace" in names:
        for token, token_id in vocab.items():
            byte = _BYTE_TOKEN.fullmatch(token)
            table[token_id] = bytes.fromhex(byte[1]) if byte else token.replace(_SPACE, " ").encode()
        strips = any(
            step["type"] == "Strip" or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in decoders
        )
    else:
        raise ModelError(
            f"the tokenizer decodes with {sorted(names) or 'nothing'}; supported are "
            "ByteLevel, ByteFallback and Metaspace"
        )
    for token_id in special:
        table[token_id] = b""
    return table, strips


def _decoder_steps(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    state = json.loads(tokenizer.decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the others count up from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
