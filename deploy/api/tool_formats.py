"""The ways models write calls of tools: how each is read, how it is enforced, and which one a model uses."""

import json
import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...cluster.config import ToolCallParser
from ...kernels.grammar import MAX_WHITESPACE
from .answer import AnswerReader, MakeId, call_id
from .call_reader import CallReader, CallSyntax
from .pythonic import PythonicReader
from .tools import FunctionDefinition

Form = dict[str, Any]  # a structural tag of xgrammar

HERMES = CallSyntax(marker="<tool_call>", closing="</tool_call>")
LLAMA3 = CallSyntax(marker="<|python_tag|>", separator=";", is_bare=True)
MISTRAL = CallSyntax(marker="[TOOL_CALLS]", is_list=True, name_end="[ARGS]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way of writing calls."""

    read: Callable[[frozenset[str], MakeId], AnswerReader]
    enforce: Callable[
        [Sequence[FunctionDefinition], bool], Form
    ]  # calls of these, several or one, and no words
    trigger: str | None  # what a call begins with among words, if anything does
    make_id: MakeId = call_id


def _tag(begin: str, function: FunctionDefinition, end: str) -> Form:
    return {"type": "tag", "begin": begin, "content": schema_form(function.schema_), "end": end}


def schema_form(schema: dict[str, Any]) -> Form:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE}


def _const(text: str) -> Form:
    return {"type": "const_string", "value": text}


def _sequence(*elements: Form) -> Form:
    return {"type": "sequence", "elements": list(elements)}


def _calls(tags: list[Form], separator: str, is_many: bool) -> Form:
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not is_many,
    }


def _hermes(functions: Sequence[FunctionDefinition], is_many: bool) -> Form:
    tags = [
        _tag(f'<tool_call>\n{{"name": "{f.name}", "arguments": ', f, "}\n</tool_call>") for f in functions
    ]
    return _calls(tags, "\n", is_many)


def _llama3(functions: Sequence[FunctionDefinition], is_many: bool) -> Form:
    tags = [_tag(f'{{"name": "{f.name}", "parameters": ', f, "}") for f in functions]
    return _calls(tags, "; ", is_many)


def _mistral_list(functions: Sequence[FunctionDefinition], is_many: bool) -> Form:
    tags = [_tag(f'{{"name": "{f.name}", "arguments": ', f, "}") for f in functions]
    return _sequence(_const("[TOOL_CALLS] ["), _calls(tags, ", ", is_many), _const("]"))


def _mistral_named(functions: Sequence[FunctionDefinition], is_many: bool) -> Form:
    return _calls([_tag(f"[TOOL_CALLS]{f.name}[ARGS]", f, "") for f in functions], "", is_many)


def _pythonic(functions: Sequence[FunctionDefinition], is_many: bool) -> Form:
    tags: list[Form] = []
    for function in functions:
        properties: dict[str, Any] = function.schema_.get("properties") or {}
        required = function.schema_.get("required") or []
        ordered = sorted(properties.items(), key=lambda item: item[0] not in required)
        definitions = {
            key: function.schema_[key] for key in ("$defs", "definitions") if key in function.schema_
        }
        arguments = [(name, {**schema, **definitions}, name in required) for name, schema in ordered]
        tags.append(
            {"type": "tag", "begin": f"{function.name}(", "content": _keywords(arguments, ""), "end": ")"}
        )
    return _sequence(_const("["), _calls(tags, ", ", is_many), _const("]"))


def _keywords(arguments: list[tuple[str, dict[str, Any], bool]], separator: str) -> Form:
    """`a=1, b=2`, where all that are required come before those that are not."""
    if not arguments:
        return _const("")
    (name, schema, is_required), *others = arguments
    given = _sequence(_const(f"{separator}{name}="), schema_form(schema), _keywords(others, ", "))
    return given if is_required else {"type": "or", "elements": [given, _keywords(others, separator)]}


def _mistral_id() -> str:
    """Mistral's templates take no other ids back."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def _reader(syntax: CallSyntax) -> Callable[[frozenset[str], MakeId], AnswerReader]:
    return lambda names, make_id: CallReader(syntax, names, make_id)


_HERMES = ToolFormat(read=_reader(HERMES), enforce=_hermes, trigger="<tool_call>")
_LLAMA3 = ToolFormat(read=_reader(LLAMA3), enforce=_llama3, trigger=None)
_PYTHONIC = ToolFormat(read=PythonicReader, enforce=_pythonic, trigger=None)


def choose_tool_format(parser: ToolCallParser, template: str) -> ToolFormat | None:
    """The format of a name, or of what a model's chat template says that it writes; None for no tools."""
    if parser == "auto":
        parser = _recognised(template)
    match parser:
        case "hermes":
            return _HERMES
        case "llama3_json":
            return _LLAMA3
        case "pythonic":
            return _PYTHONIC
        case "mistral":
            enforce = _mistral_named if "[ARGS]" in template else _mistral_list
            return ToolFormat(
                read=_reader(MISTRAL), enforce=enforce, trigger="[TOOL_CALLS]", make_id=_mistral_id
            )
        case _:
            return None


def _recognised(template: str) -> ToolCallParser:
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or '"parameters": dictionary of argument name' in template:
        return "llama3_json"
    if "func_name1(params_name1=" in template:
        return "pythonic"
    return "hermes"  # what we tell a model of which we know nothing


def tool_prompt(tools: Sequence[FunctionDefinition]) -> str:
    """What a model is told of its tools where its chat template has no place for them, in Hermes's form."""
    listed = "\n".join(
        json.dumps({"type": "function", "function": tool.model_dump(exclude_none=True)}, ensure_ascii=False)
        for tool in tools
    )
    return (
        "You may call one or more of these functions to help with the user's question.\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call a function, write its name and arguments as a JSON object inside tags:\n"
        '<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call>'
    )
