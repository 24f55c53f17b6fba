"""Calls among words, for every way of writing them as JSON: one machine, told by a syntax what is one."""

from dataclasses import dataclass
from typing import Literal

from .answer import SPACES, MakeId, Said, held_len
from .json_call import JsonCall, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """How a family of models writes calls."""

    marker: str  # begins calls
    closing: str = ""  # stands behind each
    separator: str = ""  # stands between two of them
    is_list: bool = False  # they stand in brackets, or without them
    is_bare: bool = False  # an answer may begin with a call, without the marker
    name_end: str = ""  # a call may be written as its name, this, and its arguments


class CallReader:
    """Words until a marker, then calls; what looks like a call and is none is words.

    Implements `answer.AnswerReader`. Blank space around calls belongs to them.
    """

    def __init__(self, syntax: CallSyntax, names: frozenset[str], make_id: MakeId) -> None:
        self._syntax = syntax
        self._names = names
        self._make_id = make_id
        self._num_calls = 0
        self._state: Literal["words", "opening", "name", "call", "between"] = "words"
        self._held = (
            ""  # in words: what may be a marker; else: what was read since the words or the last call
        )
        self._in_list = False
        self._call: JsonCall | None = None
        self._is_first = syntax.is_bare  # nothing but blank space came yet

    def push(self, text: str) -> Said:
        said = Said()
        for character in text:
            self._take(character, said)
        return said

    def finish(self) -> Said:
        said = Said()
        if self._state == "call":
            assert self._call is not None
            if not self._call.has_begun:
                said.content = self._held + self._call.raw
        elif self._state != "between" and not (self._num_calls and not self._held.strip(SPACES)):
            said.content = self._held
        return said

    def _take(self, character: str, said: Said) -> None:
        match self._state:
            case "words":
                self._words(character, said)
            case "opening":
                self._opening(character, said)
            case "name":
                self._read_name(character, said)
            case "call":
                assert self._call is not None
                self._after(self._call.take(character, said), character, said)
            case "between":
                self._between(character, said)

    def _words(self, character: str, said: Said) -> None:
        self._held += character
        if self._is_first and character not in SPACES:
            self._is_first = False
            if character == "{":
                self._held = self._held[:-1]
                self._begin_call(JsonCall(self._names, self._num_calls, self._make_id), "{", said)
                return
        marker = self._syntax.marker
        if self._held.endswith(marker):
            words = self._held[: -len(marker)]
            said.content += words.rstrip(SPACES)
            self._held = self._held[len(words.rstrip(SPACES)) :]
            self._state = "opening"
            return
        num_ready = len(self._held) - held_len(self._held, marker)
        said.content += self._held[:num_ready]
        self._held = self._held[num_ready:]

    def _opening(self, character: str, said: Said) -> None:
        """Behind a marker or a separator."""
        if character == "{":
            self._begin_call(JsonCall(self._names, self._num_calls, self._make_id), character, said)
        elif character == "[" and self._syntax.is_list and not self._in_list:
            self._in_list = True
            self._held += character
        elif self._syntax.name_end and not self._in_list and (character.isalnum() or character in "_-"):
            self._state = "name"
            self._held += character
        elif character in SPACES:
            self._held += character
        else:
            self._refuse(character, said)

    def _read_name(self, character: str, said: Said) -> None:
        name_end = self._syntax.name_end
        self._held += character
        name = self._held.rpartition(self._syntax.marker)[2].strip(SPACES)
        if name.endswith(name_end) or character == "{":
            name = name.removesuffix("{").removesuffix(name_end)
            if name not in self._names:
                self._held = self._held[:-1]
                self._refuse(character, said)
                return
            call = JsonCall.of_name(name, self._names, self._num_calls, self._make_id)
            if character == "{":
                self._held = self._held[:-1]
                self._begin_call(call, character, said)
            else:
                self._call, self._state = call, "call"
        elif not (character.isalnum() or character in "_-" or character in name_end):
            self._held = self._held[:-1]
            self._refuse(character, said)

    def _begin_call(self, call: JsonCall, character: str, said: Said) -> None:
        self._call, self._state = call, "call"
        self._after(call.take(character, said), character, said)

    def _after(self, status: Status, character: str, said: Said) -> None:
        """What a call made of a character."""
        call = self._call
        assert call is not None
        if status == "more":
            return
        self._call = None
        if status == "refused":
            self._held += call.raw[:-1]
            self._refuse(character, said)
            return
        self._num_calls += 1
        self._held = ""
        self._state = "between"
        if status == "broken":
            self._leave(character, said)

    def _between(self, character: str, said: Said) -> None:
        """Behind a call."""
        syntax = self._syntax
        self._held += character
        seen = self._held.lstrip(SPACES)
        if syntax.closing and seen == syntax.closing:
            self._held, self._state = "", "words"
        elif self._in_list and seen == "]":
            self._held, self._state, self._in_list = "", "words", False
        elif seen and seen in (syntax.separator, "," if self._in_list else ""):
            self._state = "opening"
        elif syntax.is_bare and seen == "{":
            self._held = self._held[:-1]
            self._state = "opening"
            self._opening(character, said)
        elif seen and not syntax.closing.startswith(seen):
            self._held = self._held[:-1]
            self._leave(character, said)

    def _refuse(self, character: str, said: Said) -> None:
        """What was read since the words is words too, and this character may begin something new."""
        said.content += self._held
        self._held = ""
        self._leave(character, said)

    def _leave(self, character: str, said: Said) -> None:
        held, self._held = self._held, ""
        self._state, self._in_list, self._call = "words", False, None
        for earlier in held + character:
            self._words(earlier, said) if self._state == "words" else self._take(earlier, said)
