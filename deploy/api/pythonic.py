"""Calls written as Python: `[weather(city="Paris", days=2), time()]`, the whole answer or its beginning."""

import ast
import json
import re
from typing import Any, Literal

from .answer import SPACES, CallDelta, MakeId, Said

MAX_CALL_CHARS = 1 << 16
_NAME = re.compile(r"\s*,?\s*([A-Za-z_][\w.-]*)\s*\(")
_CONSTANTS = {"true": True, "false": False, "null": None}


class PythonicReader:
    """Calls leave when they are complete; from the first piece that is no call on, all is words."""

    def __init__(self, names: frozenset[str], make_id: MakeId) -> None:
        self._names = names
        self._make_id = make_id
        self._num_calls = 0
        self._state: Literal["before", "call", "after"] = "before"
        self._held = ""
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def push(self, text: str) -> Said:
        said = Said()
        for place, character in enumerate(text):
            if self._state == "after":
                said.content += self._words(text[place:])
                break
            self._held += character
            if self._state == "before":
                self._before(said)
            else:
                self._read(character, said)
        return said

    def finish(self) -> Said:
        """What was held back is words, but for blank space behind calls."""
        held, self._held = self._held, ""
        return Said() if self._num_calls and not held.strip(SPACES) else Said(content=held)

    def _words(self, text: str) -> str:
        """Behind calls blank space may be all there is."""
        text = self._held + text
        self._held = text if self._num_calls and not text.strip(SPACES) else ""
        return "" if self._held else text

    def _before(self, said: Said) -> None:
        seen = self._held.lstrip(SPACES)
        if seen == "[":
            self._state = "call"
        elif seen:
            self._give_up(said)

    def _read(self, character: str, said: Said) -> None:
        """Inside the list; `held` begins behind the last call."""
        if self._quote:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == self._quote:
                self._quote = ""
        elif character in "\"'" and self._depth:
            self._quote = character
        elif character in "([{":
            if self._depth == 0 and not self._names_a_tool():
                self._give_up(said)
                return
            self._depth += 1
        elif character in ")]}":
            self._close(character, said)
        if len(self._held) > MAX_CALL_CHARS:
            self._give_up(said)

    def _close(self, character: str, said: Said) -> None:
        if self._depth > 1:
            self._depth -= 1
        elif self._depth == 1 and (call := self._parsed()) is not None:
            name, arguments = call
            said.calls.append(CallDelta(self._num_calls, arguments, self._make_id(), name))
            self._num_calls += 1
            self._held, self._depth = "", 0
        elif self._depth == 0 and character == "]" and self._num_calls and not self._held[:-1].strip(SPACES):
            self._held, self._state = "", "after"
        else:
            self._give_up(said)

    def _names_a_tool(self) -> bool:
        match = _NAME.fullmatch(
            self._held if self._num_calls else self._held.lstrip(SPACES).removeprefix("[")
        )
        return match is not None and match[1] in self._names

    def _parsed(self) -> tuple[str, str] | None:
        """Name and arguments, as JSON, of the call that is held."""
        text = self._held if self._num_calls else self._held.lstrip(SPACES).removeprefix("[")
        name, _, inner = text.lstrip(SPACES + ",").partition("(")
        try:
            call = ast.parse(f"f({inner}", mode="eval").body
            if not isinstance(call, ast.Call) or call.args:
                return None
            arguments = {keyword.arg: _value(keyword.value) for keyword in call.keywords}
            if None in arguments or len(arguments) != len(call.keywords):
                return None
            return name.strip(SPACES), json.dumps(arguments, ensure_ascii=False)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return None

    def _give_up(self, said: Said) -> None:
        said.content += self._held
        self._held, self._state = "", "after"


def _value(node: ast.expr) -> Any:
    """A literal, of Python or of JSON; ValueError for anything else."""
    match node:
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case _:
            value = ast.literal_eval(node)
            if not isinstance(value, str | int | float | bool | None):
                raise ValueError("not a value of JSON")
            return value


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("the keys of an object are strings")
