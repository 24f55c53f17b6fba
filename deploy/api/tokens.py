"""/tokenize, /detokenize: what a text is to the model, as vLLM's endpoints of these names say it."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from .bodies import parse_request, validated
from .openai_protocol import MAX_MESSAGES, ChatRequest, Strict, conflict
from .validate import ServedModel, chat_prompt, check_chars, check_model, check_token_ids

_OWN = {"model", "add_special_tokens", "return_token_strs"}  # no fields of a chat
MAX_TOKENS = 1 << 20  # of one /detokenize


class TokenizeRequest(Strict):
    """POST /tokenize: of a `prompt` as /v1/completions reads it, or of `messages` as the chat does."""

    model: str | None = Field(None, max_length=1024)
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None  # None: True
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _agree(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise conflict("prompt", "and messages: give exactly one of them")
        return self


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = Field(None, max_length=1024)
    tokens: list[Annotated[int, Field(ge=0)]] = Field(max_length=MAX_TOKENS)


def tokenize(body: bytes, served: ServedModel) -> dict[str, Any]:
    """The answer to /tokenize. Raises RequestError."""
    request = parse_request(TokenizeRequest, body)
    _check_model(request.model, served)
    tokenizer = served.tokenizer
    if request.messages is not None:
        chat = request.model_dump(exclude={"prompt", *_OWN}, exclude_none=True)
        ids = chat_prompt(validated(ChatRequest, {**chat, "model": served.name}), served)
    else:
        assert request.prompt is not None
        check_chars(len(request.prompt), served, "prompt")
        is_plain = request.add_special_tokens is False
        ids = tokenizer.encode(request.prompt, add_special_tokens=not is_plain)
    strings = [tokenizer.spell(i).decode("utf-8", "replace") for i in ids]
    return {
        "count": len(ids),
        "max_model_len": served.max_model_len,
        "tokens": ids,
        "token_strs": strings if request.return_token_strs else None,
    }


def detokenize(body: bytes, served: ServedModel) -> dict[str, Any]:
    """The answer to /detokenize. Raises RequestError."""
    request = parse_request(DetokenizeRequest, body)
    _check_model(request.model, served)
    check_token_ids(request.tokens, served, "tokens")
    return {"prompt": served.tokenizer.decode(request.tokens)}


def _check_model(name: str | None, served: ServedModel) -> None:
    if name is not None:
        check_model(name, served)
