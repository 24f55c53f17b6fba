"""The bytes of every token: what a tokenizer's vocabulary says once it is joined.

Text is made of them, and so are grammar masks: the two must never disagree.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from .errors import ModelError

_SPACE = "\u2581"  # how SentencePiece vocabularies write a space
# Special tokens that models write around calls and thoughts: whoever parses those must see them as text.
MARKERS = frozenset(
    {
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
    }
)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def load_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """`tokenizer.json` of a model directory; ModelError when there is none, or it is not a tokenizer."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{path} has no tokenizer.json; copy it there from the model's publisher")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{file} is not a tokenizer: {error}") from None


def token_bytes(tokenizer: tokenizers.Tokenizer, special: Iterable[int]) -> tuple[list[bytes], bool]:
    """Bytes by token id, none for the special ones, and whether a decoded text drops its first space."""
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


def vocabulary(tokenizer: tokenizers.Tokenizer) -> list[bytes]:
    """The bytes of every token as a grammar sees them: none for special tokens, but for MARKERS."""
    added = tokenizer.get_added_tokens_decoder()
    special = {token_id: token.content for token_id, token in added.items() if token.special}
    table, _ = token_bytes(tokenizer, special)
    for token_id, text in special.items():
        if text in MARKERS:
            table[token_id] = text.encode()
    return table
