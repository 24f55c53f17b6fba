"""One call written as a JSON object, read character by character: its arguments leave as they come."""

import json
from collections.abc import Callable
from typing import Literal

from .answer import SPACES, CallDelta, Said

Status = Literal["more", "done", "refused", "broken"]

_ARGUMENTS = ("arguments", "parameters")
MAX_HELD_CHARS = 1 << 16  # before its name is known


class JsonCall:
    """`{"name": ..., "arguments": {...}}`, keys in any order; `parameters` is another word for `arguments`.

    Until a known name and the beginning of the arguments were read it may turn out to be no call: `raw` is
    then what was read. From there on whatever the model writes belongs to the call.
    """

    def __init__(self, names: frozenset[str], index: int, make_id: Callable[[], str]) -> None:
        self.raw = ""
        self.has_begun = False
        self._names = names
        self._index = index
        self._make_id = make_id
        self._name: str | None = None
        self._arguments: str | None = None  # read whole before the name was
        self._state: Literal["open", "key", "in key", "colon", "value", "in value"] = "open"
        self._key = ""
        self._text = ""  # of the key or value that is being read
        self._depth = 0
        self._is_string = self._is_escaped = False  # where the last character stands
        self._is_sent = False  # the value that is being read leaves as it comes
        self._ends_with_value = False

    @classmethod
    def of_name(cls, name: str, names: frozenset[str], index: int, make_id: Callable[[], str]) -> "JsonCall":
        """Only the arguments are still to come."""
        call = cls(names, index, make_id)
        call._name, call._key, call._state, call._ends_with_value = name, "arguments", "value", True
        return call

    def take(self, character: str, said: Said) -> Status:
        """Read on; what became known is added to `said`.

        "refused": this is no call, and never was. "broken": it ended before this character, which is not its.
        """
        if not self.has_begun:
            self.raw += character
            if len(self.raw) > MAX_HELD_CHARS:
                return "refused"
        match self._state:
            case "open":
                return self._expect(character, "{", "key")
            case "key":
                if character == '"':
                    self._state, self._text = "in key", character
                elif character == "}":
                    return self._end(said)
                elif character not in SPACES and character != ",":
                    return self._unfit()
            case "in key":
                self._text += character
                if self._ends_string(character):
                    self._key, self._state = _loaded(self._text, ""), "colon"
            case "colon":
                return self._expect(character, ":", "value")
            case "value":
                if character not in SPACES:
                    return self._begin_value(character, said)
            case "in value":
                return self._value(character, said)
        return "more"

    def _expect(self, character: str, wanted: str, state: Literal["key", "value"]) -> Status:
        if character == wanted:
            self._state = state
        elif character not in SPACES:
            return self._unfit()
        return "more"

    def _begin_value(self, character: str, said: Said) -> Status:
        self._state, self._text, self._depth, self._is_string = "in value", "", 0, False
        self._is_sent = self._key in _ARGUMENTS and self._name is not None and character == "{"
        if self._key in _ARGUMENTS and (self.has_begun or character not in '{"n'):
            return self._unfit()
        if self._is_sent:
            self._begin(said)
        return self._value(character, said)

    def _value(self, character: str, said: Said) -> Status:
        is_scalar = self._depth == 0 and not self._is_string and character not in '{["'
        if is_scalar and (character in ",}" or character in SPACES):
            status = self._end_value(said)
            return status if status != "more" else self.take_again(character, said)
        if self._is_sent:
            said.add_call(CallDelta(self._index, character))
        else:
            self._text += character
        if self._is_string:
            self._is_string = not self._ends_string(character)
        elif character == '"':
            self._is_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        if self._depth == 0 and not self._is_string and not is_scalar:
            return self._end_value(said)
        return "more"

    def take_again(self, character: str, said: Said) -> Status:
        """A character that ended a value and is no part of it."""
        if not self.has_begun:
            self.raw = self.raw[:-1]
        return self.take(character, said)

    def _end_value(self, said: Said) -> Status:
        self._state = "key"
        if self._is_sent:
            self._is_sent = False
        elif self._key == "name":
            name = _loaded(self._text, "")
            if name not in self._names or self._name is not None:
                return self._unfit()
            self._name = name
        elif self._key in _ARGUMENTS:
            self._arguments = self._text
            if not self._text.startswith("{"):
                self._arguments = _loaded(self._text, "" if self._text.startswith('"') else "{}")
        if not self.has_begun and self._name is not None and self._arguments is not None:
            self._begin(said)
            said.add_call(CallDelta(self._index, self._arguments))
        return "done" if self._ends_with_value else "more"

    def _end(self, said: Said) -> Status:
        if self._name is None:
            return self._unfit()
        if not self.has_begun:  # a function without arguments
            self._begin(said)
            said.add_call(CallDelta(self._index, "{}"))
        return "done"

    def _begin(self, said: Said) -> None:
        assert self._name is not None
        self.has_begun = True
        said.add_call(CallDelta(self._index, "", self._make_id(), self._name))

    def _unfit(self) -> Status:
        return "broken" if self.has_begun else "refused"

    def _ends_string(self, character: str) -> bool:
        """Whether this character of a string is its closing quote."""
        if self._is_escaped:
            self._is_escaped = False
            return False
        self._is_escaped = character == "\\"
        return character == '"'


def _loaded(text: str, default: str) -> str:
    """The string that a JSON literal stands for."""
    try:
        value = json.loads(text)
    except ValueError:
        return default
    return value if isinstance(value, str) else default
