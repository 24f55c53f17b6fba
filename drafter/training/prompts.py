"""What the target is asked: chats from a file, or questions it invents itself.

An invented question is sampled: the chat template's text up to the user's turn is the prompt, and what the
target writes there, to the end of the turn, is the question. Some begin with an opening of a chosen domain,
and some are whole questions about a topic. A prompt's identity is the hash of its messages; it decides, once
and for all, whether the prompt is held out and whether its answer is sampled.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from ...cluster.errors import ConfigError
from .topics import OPENINGS, QUESTIONS, TOPICS
from .writing import Task, Writer

Split = Literal["train", "heldout"]

MAX_QUESTION_TOKENS = 96
MIN_QUESTION_TOKENS = 4
_OPENED_SHARE, _TOPIC_SHARE = 0.3, 0.15  # of the invented; the others are free


class Text(Protocol):
    """The target's tokenizer and its chat template."""

    def render_chat(self, messages: list[dict[str, str]]) -> list[int]: ...

    def encode_word(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation that waits for an answer."""

    key: str  # hash of the messages
    domain: str
    split: Split
    messages: list[dict[str, str]]
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Frame:
    """The tokens a chat template writes around a user's first turn."""

    before: list[int]
    after: list[int]

    @classmethod
    def of(cls, text: Text) -> "Frame":
        """What two conversations with nothing in common share. Raises ConfigError when that is nothing."""
        one, two = (text.render_chat([{"role": "user", "content": content}]) for content in ("7 Q", "x"))
        before = _common(one, two)
        after = _common(one[::-1], two[::-1])[::-1]
        if not after:
            raise ConfigError(
                "the model's chat template does not mark the end of a user's turn, so questions cannot be "
                "invented; give --prompts FILE"
            )
        return cls(before, after)


def read_chats(path: Path) -> list[list[dict[str, str]]]:
    """The conversations of a JSON lines file, without a last turn of the assistant, which is to be written.

    Raises ConfigError, naming the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); check --prompts") from None
    chats: list[list[dict[str, str]]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            messages = [_message(message) for message in json.loads(line)["messages"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f'{path}, line {number}: {error!r}; write {{"messages": [{{"role": ..., "content": ...}}]}}'
            ) from None
        if messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if messages:
            chats.append(messages)
    if not chats:
        raise ConfigError(f"{path} holds no conversation; give one a line")
    return chats


def make_prompt(
    messages: list[dict[str, str]], domain: str, text: Text, heldout_share: float, max_len: int
) -> Prompt | None:
    """The prompt of a conversation; None when it is longer than `max_len` tokens."""
    token_ids = text.render_chat(messages)
    if len(token_ids) > max_len:
        return None
    key = hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:16]
    split: Split = "heldout" if share_of(key, "split") < heldout_share else "train"
    return Prompt(key, domain, split, messages, token_ids)


def share_of(key: str, purpose: str) -> float:
    """A number in [0, 1) that depends on the prompt alone; one for each purpose."""
    return int(hashlib.sha256(f"{purpose}:{key}".encode()).hexdigest()[:12], 16) / 16**12


def invent(writer: Writer, text: Text, count: int, seed: int) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """At most `count` (domain, conversation) pairs, in the same order for the same seed.

    A question that has no end after `MAX_QUESTION_TOKENS`, or next to no words, is dropped.
    """
    frame, draw = Frame.of(text), random.Random(seed)
    openings: list[tuple[str, str]] = []  # (domain, opening) of what the target is to finish
    whole: list[tuple[str, str]] = []
    for _ in range(count):
        kind = draw.random()
        if kind < _TOPIC_SHARE:
            domain, question = draw.choice(QUESTIONS)
            whole.append((domain, question.format(topic=draw.choice(TOPICS))))
        else:
            openings.append(draw.choice(OPENINGS) if kind < _TOPIC_SHARE + _OPENED_SHARE else ("chat", ""))
    stop_ids = frozenset({frame.after[0], *writer.stop_ids})
    tasks = [
        Task(
            prompt_ids=(prompt_ids := frame.before + (text.encode_word(opening) if opening else [])),
            max_tokens=min(MAX_QUESTION_TOKENS, writer.max_len - len(prompt_ids)),
            stop_ids=stop_ids,
            seed=draw.getrandbits(63),
            temperature=1.0,
            top_p=0.95,
        )
        for _, opening in openings
    ]
    finished = sorted(writer.write(iter(tasks), with_taps=False), key=lambda written: written.index)
    for written in finished:
        domain, opening = openings[written.index]
        question = (opening + text.decode(written.answer_ids)).strip()
        if written.is_stopped and len(written.answer_ids) >= MIN_QUESTION_TOKENS and "\ufffd" not in question:
            yield domain, [{"role": "user", "content": question}]
    for domain, question in whole:
        yield domain, [{"role": "user", "content": question}]


def save_prompts(path: Path, prompts: Sequence[Prompt]) -> None:
    path.write_text("".join(json.dumps(asdict(prompt)) + "\n" for prompt in prompts), encoding="utf-8")


def load_prompts(path: Path) -> list[Prompt]:
    return [Prompt(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def _message(value: Any) -> dict[str, str]:
    role, content = value["role"], value["content"]
    if not isinstance(role, str) or not isinstance(content, str):
        raise TypeError("role and content must be strings")
    return {"role": role, "content": content}


def _common(one: list[int], two: list[int]) -> list[int]:
    """The longest common beginning."""
    length = next(
        (i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two))
    )
    return one[:length]
