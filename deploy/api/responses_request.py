"""POST /v1/responses as a chat completion: the same validator, the same job. Nothing is stored.

What an earlier answer would be needed for (`previous_response_id`, `conversation`, `background`, item
references) is refused by name: a client that keeps the items itself sends them all as `input`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from ...cluster.errors import RequestError
from .bodies import parse_request, validated
from .openai_protocol import MAX_MESSAGES, ChatRequest, SamplingRequest, Strict, conflict
from .validate import Job, ServedModel, chat_job

# What a field may hold although we do not have the feature.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": (),
    "conversation": (),
    "max_tokens": (),
    "moderation": (),
    "n": (1,),
    "previous_response_id": (),
    "prompt": (),
    "return_token_ids": (False,),
    "truncation": ("disabled",),
}
_INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")  # of the second we have none
_RENAMED = (
    ("messages", "input"),
    ("max_completion_tokens", "max_output_tokens"),
    ("reasoning_effort", "reasoning.effort"),
)
_TEXT_PARTS = ("input_text", "output_text", "text")


class TextFormat(Strict):
    """`text`: what the answer's text has to look like."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(SamplingRequest):
    """POST /v1/responses. Beyond OpenAI's fields it takes the chat completion's that set the sampling."""

    input: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    include: list[str] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    text: TextFormat | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_needs_a_store(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for name, harmless in _HARMLESS.items():
                given = value.get(name)
                if given is not None and given not in harmless:
                    raise PydanticCustomError(
                        "unsupported_parameter",
                        "{name} is not supported: /v1/responses of this server",
                        {"name": name},
                    )
        return value

    @model_validator(mode="after")
    def _agree_responses(self) -> "ResponsesRequest":
        for name in self.include or []:
            if name not in _INCLUDED:
                raise conflict("include", f"may hold {', '.join(_INCLUDED)}")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseJob(Job):
    """A job, and what its answer repeats of the request."""

    request: ResponsesRequest


def prepare_response(body: bytes, served: ServedModel) -> ResponseJob:
    """The one choice of a response. Raises RequestError."""
    request = parse_request(ResponsesRequest, body)
    try:
        job = chat_job(validated(ChatRequest, _chat_document(request)), served)
    except RequestError as error:
        _rename_param(error)
        raise
    parts = {field.name: getattr(job, field.name) for field in fields(job)}
    return ResponseJob(**parts, request=request)


def _chat_document(request: ResponsesRequest) -> dict[str, Any]:
    """The body of the chat completion that answers this request."""
    shared = request.model_dump(include=set(SamplingRequest.model_fields), exclude_none=True)
    messages = [{"role": "system", "content": request.instructions}] if request.instructions else []
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
    else:
        messages += _messages(request.input)
    document: dict[str, Any] = {**shared, "messages": messages}
    document["stream_options"] = {"include_usage": True} if request.stream else None
    document["max_completion_tokens"] = request.max_output_tokens
    if "message.output_text.logprobs" in (request.include or []) or request.top_logprobs:
        document |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    if request.reasoning is not None:
        document["reasoning_effort"] = request.reasoning.get("effort")
    if request.text is not None and request.text.format is not None:
        document["response_format"] = _response_format(request.text.format)
    if request.tools:
        document["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools)]
        document["tool_choice"] = _tool_choice(request.tool_choice)
        document["parallel_tool_calls"] = request.parallel_tool_calls
    return document


def _messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Input items as messages; calls that follow each other belong to one turn of the assistant."""
    read: dict[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
        "message": _message,
        "function_call": _call,
        "function_call_output": _call_output,
    }
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        kind, path = item.get("type", "message"), f"input[{index}]"
        if kind == "reasoning":
            continue  # the model's own, which it does not read again
        if not isinstance(kind, str) or kind not in read:
            raise _refused(f"items of type {str(kind)[:100]!r} are not supported", f"{path}.type")
        message = read[kind](item, path)
        last = messages[-1] if messages else {}
        if kind == "function_call" and last.get("role") == "assistant":
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            messages.append(message)
    return messages


def _message(item: dict[str, Any], path: str) -> dict[str, Any]:
    return {"role": item.get("role"), "content": _content(item.get("content"), f"{path}.content")}


def _call(item: dict[str, Any], path: str) -> dict[str, Any]:
    name, arguments, call_id = (_string(item, key, path) for key in ("name", "arguments", "call_id"))
    function = {"name": name, "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _call_output(item: dict[str, Any], path: str) -> dict[str, Any]:
    content = _content(item.get("output"), f"{path}.output")
    return {"role": "tool", "tool_call_id": _string(item, "call_id", path), "content": content}


def _content(content: Any, path: str) -> Any:
    """Parts in the chat's spelling; what is no list of parts is left to the chat's validator."""
    if not isinstance(content, list):
        return content
    parts: list[Any] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal":
            parts.append({"type": "text", "text": part.get("refusal")})
        elif kind in _TEXT_PARTS:
            parts.append({"type": "text", "text": part.get("text")})
        else:
            problem = "only parts of type 'input_text' and 'output_text' are supported by this model"
            raise _refused(problem, f"{path}[{index}]", "unsupported_content_type")
    return parts


def _response_format(text_format: dict[str, Any]) -> dict[str, Any]:
    if text_format.get("type") != "json_schema":
        return text_format
    inner = {key: value for key, value in text_format.items() if key != "type"}
    return {"type": "json_schema", "json_schema": inner}


def _tool(tool: dict[str, Any], path: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise _refused("only tools of type 'function' are supported", f"{path}.type")
    function = {key: tool[key] for key in ("name", "description", "parameters", "strict") if key in tool}
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _string(item: dict[str, Any], key: str, path: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise RequestError(f"'{path}.{key}' must be a string", code="invalid_type", param=f"{path}.{key}")
    return value


def _refused(message: str, param: str, code: str = "unsupported_parameter") -> RequestError:
    return RequestError(message, code=code, param=param)


def _rename_param(error: RequestError) -> None:
    """A complaint about the chat's fields, in the words of this endpoint."""
    for ours, theirs in _RENAMED:
        if error.param is not None and error.param.startswith(ours):
            # an item may have become no message, or part of one: its number would mislead
            error.param = theirs
            error.message = error.message.replace(f"'{ours}'", f"'{theirs}'")
