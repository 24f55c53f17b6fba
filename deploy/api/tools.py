"""Tools in a chat request: what may be called, what must be, and what was called before.

Only names, types and bounds; how a model is told of them and answers is a matter of its `ToolFormat`.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from .structured import check_schema

MAX_TOOLS = 128
MAX_CALLS = 128  # of one assistant message

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class FunctionDefinition(_Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema of an object; None: no parameters
    strict: bool | None = None

    @property
    def schema_(self) -> dict[str, Any]:
        """What its arguments must match."""
        return self.parameters or {"type": "object", "properties": {}}


class Tool(_Strict):
    type: Literal["function"]
    function: FunctionDefinition

    def as_template(self) -> dict[str, Any]:
        return {"type": "function", "function": self.function.model_dump(exclude_none=True)}


class ToolChoice(_Strict):
    """The many forms of `tool_choice` as one."""

    mode: Literal["none", "auto", "required"]
    names: list[str] | None = None  # the only ones that may be called


class CalledFunction(_Strict):
    name: str = Field(max_length=256)
    arguments: str = ""

    def as_template(self) -> dict[str, Any]:
        """Templates write arguments as JSON, so they want the object; what is no object stays text."""
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        return {"name": self.name, "arguments": arguments if isinstance(arguments, dict) else self.arguments}


class ToolCall(_Strict):
    id: str = Field(min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_template(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": self.function.as_template()}


def _choice(value: Any) -> Any:
    """A string, a named function, or a list of allowed tools."""
    if value is None or isinstance(value, ToolChoice):
        return value
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise PydanticCustomError("literal_error", "must be 'none', 'auto', 'required' or a function")
        return {"mode": value}
    if not isinstance(value, dict):
        raise PydanticCustomError("invalid_type", "must be a string or an object")
    match value.get("type"):
        case "function":
            return {"mode": "required", "names": [_function_name(value)]}
        case "allowed_tools":
            allowed = value.get("allowed_tools")
            if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list):
                raise PydanticCustomError("invalid_type", "'allowed_tools' needs a list of 'tools'")
            return {
                "mode": allowed.get("mode", "auto"),
                "names": [_function_name(t) for t in allowed["tools"]],
            }
        case _:
            raise PydanticCustomError("unsupported_parameter", "only tools of type 'function' can be chosen")


def _function_name(value: Any) -> str:
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise PydanticCustomError("invalid_type", "a function is named by {'function': {'name': ...}}")
    return name


def _tool_list(value: Any) -> Any:
    for tool in value if isinstance(value, list) else []:
        if isinstance(tool, dict) and tool.get("type", "function") != "function":
            raise PydanticCustomError("unsupported_parameter", "only tools of type 'function' are supported")
    return value


_CHOICES = {"type": "string", "enum": ["none", "auto", "required"]}
ToolChoiceField = Annotated[
    ToolChoice | None,
    BeforeValidator(_choice),
    WithJsonSchema({"anyOf": [_CHOICES, {"type": "object"}, {"type": "null"}]}),
]
ToolsField = Annotated[Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None, BeforeValidator(_tool_list)]


def check_tools(tools: list[Tool] | None, choice: ToolChoice | None) -> None:
    """What a type cannot say. Raises PydanticCustomError, and RequestError for a schema."""
    names = [tool.function.name for tool in tools or []]
    for index, tool in enumerate(tools or []):
        name = tool.function.name
        if name in names[:index]:
            raise _conflict("tools", f"name the function {name!r} twice")
        if tool.function.parameters:
            param = f"tools[{index}].function.parameters"
            check_schema(tool.function.parameters, param, is_strict=bool(tool.function.strict))
    if choice is None:
        return
    if not names and (choice.mode == "required" or choice.names):
        raise _conflict("tool_choice", "is only allowed with tools")
    if missing := [name for name in choice.names or [] if name not in names]:
        raise _conflict("tool_choice", f"names {missing[0]!r}, which is not among the tools")


def _conflict(name: str, problem: str) -> PydanticCustomError:
    return PydanticCustomError(
        "conflicting_parameters", "{name} {problem}", {"name": name, "problem": problem}
    )
