"""The OpenAI requests we accept: names, types, bounds. What depends on the model is checked in `validate.py`.

Types are strict: `"true"` and `1` are not booleans. Fields we do not know are ignored, as other servers do;
fields we know but cannot honour are refused unless they carry a value that changes nothing.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from .tools import MAX_CALLS, ToolCall, ToolChoiceField, ToolsField, check_tools

MAX_CHOICES = 8
MAX_PROMPTS = 64
MAX_MESSAGES = 2048
MAX_TIMEOUT_S = 86400.0

# What a field may hold although we do not have the feature.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "repetition_detection": (),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "store": (False,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}


class Strict(BaseModel):
    """No coercion, no NaN; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


def _stop_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _not_zero(value: int | None) -> int | None:
    if value == 0:
        raise PydanticCustomError("integer_below_min_value", "must be -1 (as much as fits) or above 0")
    return value


StopString = Annotated[str, Field(min_length=1, max_length=256)]


class StreamOptions(Strict):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: every chunk tells the usage so far
    include_obfuscation: bool | None = None  # OpenAI's padding against who listens in; we send none


class Speculation(Strict):
    """Ours: how this request is drafted for. Its tokens are the same whatever it says."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool | None = None
    max_draft_tokens: int | None = Field(None, ge=0, le=2**31 - 1)  # per step
    report: bool | None = None  # None: as the server is configured
    steps: bool | None = None  # a stream says of each step what was drafted and what stood


class SamplingRequest(Strict):
    """What chat and text completions share. None stands for "not given" throughout."""

    model: str = Field(max_length=1024)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)  # -1 and 0: off
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=300)
    bad_words: list[StopString] | None = Field(None, max_length=128)
    allowed_token_ids: list[int] | None = Field(None, min_length=1)
    stop: Annotated[list[StopString] | None, BeforeValidator(_stop_list)] = Field(
        None, min_length=1, max_length=4
    )
    include_stop_str_in_output: bool | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=128)
    ignore_eos: bool | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    prompt_logprobs: int | None = Field(None, ge=0, le=20)  # alternatives to each token of the prompt
    truncate_prompt_tokens: Annotated[int | None, AfterValidator(_not_zero)] = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None  # which end of a prompt is cut; None: left
    return_token_ids: bool | None = None
    timeout: float | None = Field(None, gt=0, le=MAX_TIMEOUT_S)  # seconds until the answer must be whole
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: int | None = Field(None, ge=-1000, le=1000)  # lower runs first
    speculation: Speculation | None = None
    cache_salt: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$")  # who shares cached prefixes
    user: str | None = None
    metadata: dict[str, str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_we_lack(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for name, harmless in _HARMLESS.items():
                given = value.get(name)
                if given is not None and given not in harmless:
                    raise PydanticCustomError(
                        "unsupported_parameter", "{name} is not supported by this server", {"name": name}
                    )
        return value

    @model_validator(mode="after")
    def _agree(self) -> "SamplingRequest":
        if self.stream_options is not None and not self.stream:
            raise conflict("stream_options", "is only allowed with stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise conflict("prompt_logprobs", "is told with whole answers only, not with stream: true")
        return self


def _content_text(value: Any) -> str:
    """A message's content: a string, or text parts, which are joined by newlines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("invalid_type", "must be a string or an array of text parts")
    if not value:
        raise PydanticCustomError("empty_array", "must hold at least one part")
    texts: list[str] = []
    for part in value:
        if not isinstance(part, dict):
            raise PydanticCustomError("invalid_type", "every part must be an object")
        if part.get("type") != "text":
            raise PydanticCustomError(
                "unsupported_content_type", "only parts of type 'text' are supported by this model"
            )
        if not isinstance(part.get("text"), str):
            raise PydanticCustomError("invalid_type", "a text part needs a string 'text'")
        texts.append(part["text"])
    return "\n".join(texts)


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_content_text)]
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_CALLS)
    tool_call_id: str | None = Field(None, max_length=256)
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _say_nothing(cls, value: Any) -> Any:
        """Who calls need not say anything."""
        if isinstance(value, dict) and value.get("tool_calls") and value.get("content") is None:
            return {**value, "content": ""}
        return value

    @model_validator(mode="after")
    def _agree_message(self) -> "ChatMessage":
        if self.tool_calls and self.role != "assistant":
            raise conflict("tool_calls", "are an assistant's")
        if self.role == "tool" and self.tool_call_id is None:
            raise conflict("tool_call_id", "is required in a message of role 'tool'")
        return self

    def as_template(self) -> dict[str, Any]:
        """As chat templates take it."""
        shown: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        shown["content"] = self.content
        if self.reasoning_content:
            shown["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            shown["tool_calls"] = [call.as_template() for call in self.tool_calls]
        if self.role == "tool":
            shown["tool_call_id"] = self.tool_call_id
        return shown


def _check_calls(messages: list[ChatMessage], *, opens_turn: bool) -> None:
    """Every call of a tool has its result before anyone else speaks, and no result is without its call."""
    called: set[str] = set()
    unanswered: set[str] = set()
    for message in messages:
        if message.role == "tool":
            if message.tool_call_id not in called:
                raise conflict("messages", "answer a tool call that no message before made")
            unanswered.discard(message.tool_call_id)
        elif unanswered:
            break
        ids = {call.id for call in message.tool_calls or []}
        called |= ids
        unanswered |= ids
    else:
        if not opens_turn:
            return
    if unanswered:
        raise conflict("messages", f"leave the tool call {min(unanswered)[:100]!r} without a result")


class ChatRequest(SamplingRequest):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: ToolsField = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=16)
    add_generation_prompt: bool | None = None  # False: the prompt ends with the last message
    continue_final_message: bool | None = None  # the answer goes on with the last message

    @model_validator(mode="after")
    def _agree_chat(self) -> "ChatRequest":
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise conflict("max_completion_tokens", "and max_tokens mean the same; give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise conflict("top_logprobs", "is only allowed with logprobs: true")
        if self.continue_final_message and self.add_generation_prompt:
            raise conflict("add_generation_prompt", "and continue_final_message exclude each other")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise conflict("continue_final_message", "needs a last message of role 'assistant'")
        check_tools(self.tools, self.tool_choice)
        _check_calls(self.messages, opens_turn=self.add_generation_prompt is not False)
        return self


def _prompt_list(value: Any) -> list[str | list[int]]:
    """A string, strings, token ids, or lists of token ids, as a list of prompts."""
    if isinstance(value, str):
        value = [value]
    if value is None:
        raise PydanticCustomError("missing_required_parameter", "must be given")
    if not isinstance(value, list):
        raise PydanticCustomError("invalid_type", "must be a string or an array")
    if value and not isinstance(value[0], str | list):
        value = [value]
    if len(value) > MAX_PROMPTS:
        raise PydanticCustomError(
            "array_above_max_length", "must hold at most {limit} prompts", {"limit": MAX_PROMPTS}
        )
    if not value or not all(value):
        raise PydanticCustomError("empty_array", "must hold at least one token")
    for prompt in value:
        if isinstance(prompt, str):
            continue
        if not isinstance(prompt, list):
            raise PydanticCustomError("invalid_type", "must hold strings only, or token ids only")
        if not all(type(token_id) is int for token_id in prompt):
            raise PydanticCustomError("invalid_token_id", "token ids must be integers")
    return value


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompt_list)]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=5)
    best_of: int | None = Field(None, ge=1)
    add_special_tokens: bool | None = None  # None: True, with what the model begins texts with

    @model_validator(mode="after")
    def _agree_completion(self) -> "CompletionRequest":
        if self.best_of not in (None, self.n or 1):
            raise PydanticCustomError("unsupported_parameter", "{name} must equal n", {"name": "best_of"})
        if self.echo and self.logprobs is not None and self.stream:
            raise conflict("echo", "with logprobs is told with whole answers only, not with stream: true")
        return self


def conflict(name: str, problem: str) -> PydanticCustomError:
    """What a validator raises when `name` does not go with another field."""
    return PydanticCustomError(
        "conflicting_parameters", "{name} {problem}", {"name": name, "problem": problem}
    )
