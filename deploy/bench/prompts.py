"""Prompts to measure with: from a file, or cut from the manual that Python brings along."""

from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import msgspec
from tokenizers import Tokenizer

from ...cluster.errors import UserError
from ...drafter.training.prompts import Frame
from ..api.text import Tokenizer as ChatTokenizer
from .client import Query

_QUESTION = "Explain this in simple words:\n\n"


def read_queries(file: Path) -> list[Query]:
    """JSON lines, each a Query. Raises UserError that names the line."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); check --prompts") from None
    queries: list[Query] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            queries.append(msgspec.json.decode(line, type=Query))
        except msgspec.DecodeError as error:
            raise UserError(
                f'{file}, line {number}: {error}; write {{"prompt": text}} or {{"messages": [...]}}'
            ) from None
    if not queries:
        raise UserError(f"{file} holds no prompt; give one a line")
    return queries


def make_prompts(tokenizer_file: Path, num_prompts: int, prompt_len: int) -> list[list[int]]:
    """`num_prompts` different prompts of `prompt_len` ids: windows of the manual.

    Raises UserError when the manual is too short for so many.
    """
    ids = _manual(tokenizer_file)
    if num_prompts * prompt_len > len(ids):
        raise UserError(
            f"{num_prompts} prompts of {prompt_len} tokens are more than the {len(ids)} tokens of text at "
            "hand; lower the number of requests or the prompt length"
        )
    return [ids[start : start + prompt_len] for start in range(0, num_prompts * prompt_len, prompt_len)]


def make_chat_prompts(model_path: Path, num_prompts: int, prompt_len: int) -> list[list[int]]:
    """The same as a user's first turn: each asks for an explanation of its part of the manual.

    Raises UserError when the chat template leaves no room in `prompt_len` for that.
    """
    tokenizer = ChatTokenizer.load(model_path)
    frame = Frame.of(tokenizer)
    before = frame.before + tokenizer.encode_word(_QUESTION)
    own_len = prompt_len - len(before) - len(frame.after)
    if own_len < 1:
        least = prompt_len - own_len + 1
        raise UserError(f"a chat takes more than {prompt_len} tokens; give --prompt-len {least} or more")
    windows = make_prompts(model_path / "tokenizer.json", num_prompts, own_len)
    return [before + window + frame.after for window in windows]


def make_queries(
    tokenizer_file: Path, num_queries: int, prompt_len: int, *, shared_len: int = 0, num_shared: int = 1
) -> list[Query]:
    """Prompts of which the first `shared_len` ids are one of `num_shared` beginnings, taken in turn."""
    if not 0 <= shared_len < prompt_len:
        raise UserError(f"a shared prefix of {shared_len} tokens leaves nothing of {prompt_len} to differ in")
    if shared_len == 0:
        return [Query(prompt=ids) for ids in make_prompts(tokenizer_file, num_queries, prompt_len)]
    own_len = prompt_len - shared_len
    ids = _manual(tokenizer_file)
    first = num_shared * shared_len
    if first + num_queries * own_len > len(ids):
        raise UserError(
            f"{num_queries} prompts of {prompt_len} tokens are more than the text at hand; ask for fewer"
        )
    beginnings = [ids[index * shared_len : (index + 1) * shared_len] for index in range(num_shared)]
    return [
        Query(prompt=beginnings[index % num_shared] + _window(ids, first + index * own_len, own_len))
        for index in range(num_queries)
    ]


def _window(ids: Sequence[int], start: int, length: int) -> list[int]:
    return list(ids[start : start + length])


def _manual(tokenizer_file: Path) -> list[int]:
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return Tokenizer.from_file(str(tokenizer_file)).encode(text, add_special_tokens=False).ids
