"""What a chat answer is made of, and how a stream of text becomes it: thoughts, words, calls of tools.

A reader takes text as it comes, in whatever chunks, and says the same in the end: it decides character by
character. Nothing a model wrote is lost: what turns out to be no call is words.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

SPACES = " \t\r\n"


@dataclass(slots=True)
class CallDelta:
    """Part of one call. The first of a call has its id and name."""

    index: int
    arguments: str  # JSON, as far as it came
    call_id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class Said:
    """What some text added to an answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def add(self, other: "Said") -> None:
        self.reasoning += other.reasoning
        self.content += other.content
        for call in other.calls:
            self.add_call(call)

    def add_call(self, call: CallDelta) -> None:
        """One delta per call, however many pieces it came in."""
        last = self.calls[-1] if self.calls else None
        if call.name is None and last is not None and last.index == call.index:
            last.arguments += call.arguments
        else:
            self.calls.append(call)


class AnswerReader(Protocol):
    """Of one choice; used once."""

    def push(self, text: str) -> Said: ...

    def finish(self) -> Said:
        """At the end of the text: what was held back."""
        ...


MakeReader = Callable[[], AnswerReader]
MakeId = Callable[[], str]


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ThoughtReader:
    """Splits off what stands between think tags at the beginning; the rest goes to another reader, if any.

    Blank space around a thought belongs to the tags.
    """

    OPENING = "<think>"
    CLOSING = "</think>"

    def __init__(self, rest: AnswerReader | None, *, is_open: bool) -> None:
        """`is_open`: the prompt has written the opening tag already."""
        self._rest = rest
        self._state = "thinking" if is_open else "before"
        self._held = ""
        self._has_begun = False  # a thought, or the words behind it: leading blank space is dropped
        self.has_thought = is_open

    @property
    def is_past_thoughts(self) -> bool:
        """Whether what comes now is words or calls."""
        return self._state == "rest"

    def push(self, text: str) -> Said:
        said = Said()
        for place, character in enumerate(text):
            if self._state == "rest":
                said.add(self._pass_on(text[place:]))
                break
            # What is held is a proper start of a tag, or blank space that may come before one.
            self._held += character
            if self._state == "before":
                self._before(said)
            else:
                self._thinking(said)
        return said

    def finish(self) -> Said:
        said = Said()
        held, self._held = self._held, ""
        if self._state == "thinking":
            said.reasoning = held.rstrip(SPACES) if held.strip(SPACES) else ""
        elif held:
            self._state = "rest"
            said.add(self._pass_on(held))
        if self._rest is not None:
            said.add(self._rest.finish())
        return said

    def _before(self, said: Said) -> None:
        seen = self._held.lstrip(SPACES)
        if seen == self.OPENING:
            self._held, self._state, self.has_thought = "", "thinking", True
        elif not self.OPENING.startswith(seen):
            held, self._held, self._state, self._has_begun = self._held, "", "rest", True
            said.add(self._pass_on(held))

    def _thinking(self, said: Said) -> None:
        if not self._has_begun:
            self._held = self._held.lstrip(SPACES)
        if self._held.endswith(self.CLOSING):
            said.reasoning += self._held[: -len(self.CLOSING)].rstrip(SPACES)
            self._held, self._state, self._has_begun = "", "rest", False
            return
        keep = held_len(self._held, self.CLOSING)
        ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        if ready:
            said.reasoning += ready
            self._has_begun = True

    def _pass_on(self, text: str) -> Said:
        if not self._has_begun:
            text = text.lstrip(SPACES)
            self._has_begun = bool(text)
        if not text:
            return Said()
        return Said(content=text) if self._rest is None else self._rest.push(text)


def held_len(text: str, marker: str) -> int:
    """Length of the end of `text` that is blank space and then the start of a marker, or only one of them."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            break
    else:
        length = 0
    before = text[: len(text) - length]
    return length + len(before) - len(before.rstrip(SPACES))


def read_whole(reader: AnswerReader, chunks: Sequence[str]) -> Said:
    """Everything a reader makes of some chunks."""
    said = Said()
    for chunk in chunks:
        said.add(reader.push(chunk))
    said.add(reader.finish())
    return said
