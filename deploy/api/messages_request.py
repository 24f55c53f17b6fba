"""POST /v1/messages, Anthropic's API, as a chat completion: the same validator, the same job."""

import json
from typing import Any, Literal

from pydantic import Field

from ...cluster.errors import RequestError
from .bodies import parse_request, validated
from .openai_protocol import MAX_MESSAGES, MAX_TIMEOUT_S, ChatRequest, Speculation, StopString, Strict
from .validate import Job, ServedModel, chat_job, chat_prompt

_IGNORED_BLOCKS = ("thinking", "redacted_thinking")  # the model's own, which it does not read again
_SAME_NAMES = {
    "model", "temperature", "top_k", "top_p", "stream", "seed", "priority", "cache_salt", "speculation",
    "timeout",
}  # fmt: skip


class AnthropicMessage(Strict):
    """One turn: text, or blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class CountRequest(Strict):
    """POST /v1/messages/count_tokens."""

    model: str = Field(max_length=1024)
    messages: list[AnthropicMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class MessagesRequest(CountRequest):
    """POST /v1/messages. Beyond Anthropic's fields it takes a few of ours."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[StopString] | None = Field(None, max_length=4)
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    top_p: float | None = Field(None, gt=0, le=1)
    metadata: dict[str, Any] | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    priority: int | None = Field(None, ge=-1000, le=1000)
    cache_salt: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    speculation: Speculation | None = None
    timeout: float | None = Field(None, gt=0, le=MAX_TIMEOUT_S)


def prepare_message(body: bytes, served: ServedModel) -> Job:
    """The one choice of a message. Raises RequestError."""
    request = parse_request(MessagesRequest, body)
    document = _chat_document(request) | request.model_dump(include=_SAME_NAMES, exclude_none=True)
    document |= {"max_completion_tokens": request.max_tokens, "stop": request.stop_sequences or None}
    if request.stream:
        document["stream_options"] = {"include_usage": True}
    return chat_job(validated(ChatRequest, document), served)


def count_tokens(body: bytes, served: ServedModel) -> dict[str, int]:
    """The answer to /v1/messages/count_tokens. Raises RequestError."""
    request = validated(ChatRequest, _chat_document(parse_request(CountRequest, body)))
    return {"input_tokens": len(chat_prompt(request, served))}


def _chat_document(request: CountRequest) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": _texts(request.system, "system")})
    for index, message in enumerate(request.messages):
        messages += _turn(message, f"messages[{index}].content")
    document: dict[str, Any] = {"model": request.model, "messages": messages}
    if request.tools:
        document["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools)]
        document |= _tool_choice(request.tool_choice)
    if request.thinking is not None and request.thinking.get("type") == "disabled":
        document["chat_template_kwargs"] = {"enable_thinking": False}
    return document


def _turn(message: AnthropicMessage, path: str) -> list[dict[str, Any]]:
    """A turn as messages: what tools said comes first, each as a message of its own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(message.content):
        where = f"{path}[{index}]"
        match block.get("type"):
            case "text":
                parts.append({"type": "text", "text": block.get("text")})
            case "tool_use":
                calls.append(_call(block, where))
            case "tool_result":
                content = _texts(block.get("content") or "", where)
                call_id = _string(block, "tool_use_id", where)
                results.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case kind if kind in _IGNORED_BLOCKS:
                pass
            case _:
                raise RequestError(
                    "only blocks of type text, tool_use and tool_result are supported by this model",
                    code="unsupported_content_type",
                    param=where,
                )
    if calls:
        return [*results, {"role": message.role, "content": parts or None, "tool_calls": calls}]
    return [*results, {"role": message.role, "content": parts}] if parts or not results else results


def _texts(content: Any, path: str) -> Any:
    """Text, or blocks of text as the chat's parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(
        isinstance(block, dict) and block.get("type") == "text" for block in content
    ):
        raise RequestError(
            f"'{path}' must be text, or blocks of type text", code="unsupported_content_type", param=path
        )
    return [{"type": "text", "text": block.get("text")} for block in content]


def _call(block: dict[str, Any], path: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise RequestError(f"'{path}.input' must be an object", code="invalid_type", param=f"{path}.input")
    function = {"name": _string(block, "name", path), "arguments": _json(arguments)}
    return {"id": _string(block, "id", path), "type": "function", "function": function}


def _tool(tool: dict[str, Any], path: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise RequestError(
            "tools that run at the server are not supported", code="unsupported_parameter", param=path
        )
    function = {"name": _string(tool, "name", path), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: dict[str, Any] | None) -> dict[str, Any]:
    if choice is None:
        return {}
    kinds: dict[Any, Any] = {
        "auto": "auto",
        "any": "required",
        "none": "none",
        "tool": {"type": "function", "function": {"name": choice.get("name")}},
    }
    if choice.get("type") not in kinds:
        raise RequestError(
            "'tool_choice.type' must be auto, any, tool or none",
            code="invalid_value",
            param="tool_choice.type",
        )
    parallel = {} if choice.get("disable_parallel_tool_use") is not True else {"parallel_tool_calls": False}
    return {"tool_choice": kinds[choice["type"]], **parallel}


def _string(item: dict[str, Any], key: str, path: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise RequestError(f"'{path}.{key}' must be a string", code="invalid_type", param=f"{path}.{key}")
    return value


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)
