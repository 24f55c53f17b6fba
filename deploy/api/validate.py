"""From the bytes of a request to what the engine is asked for; every mistake becomes a RequestError here.

One order for all front doors: JSON, then types and bounds (`openai_protocol`), then what only the model can
say: its name, its vocabulary, its length.
"""

import json
import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import msgspec
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ...cluster.config import ReportLevel
from ...cluster.errors import RequestError
from ...cluster.messages import SamplingParams
from .openai_protocol import ChatRequest, CompletionRequest, SamplingRequest
from .text import Tokenizer

_CODES = {
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_required_parameter",
    "too_short": "empty_array",
    "too_long": "array_above_max_length",
    "string_too_short": "empty_string",
    "string_too_long": "string_above_max_length",
    "literal_error": "invalid_value",
}
_OUR_CODES = {
    "array_above_max_length",
    "conflicting_parameters",
    "empty_array",
    "invalid_token_id",
    "invalid_type",
    "unsupported_content_type",
    "unsupported_parameter",
}

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

Request = TypeVar("Request", bound=SamplingRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model as requests see it."""

    name: str  # the `model` of requests
    tokenizer: Tokenizer
    vocab_size: int  # of the model's head; the tokenizer may know fewer
    max_model_len: int  # prompt and output together
    eos_token_ids: tuple[int, ...]
    report: ReportLevel = "none"  # what an answer tells of its drafts unless its request says otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One stream of tokens of a request."""

    index: int
    prompt_ids: list[int]
    params: SamplingParams
    stops: list[str]
    priority: int
    cache_salt: str
    max_draft_tokens: int | None
    has_steps: bool = False  # its stream tells the text of every token and which of them were drafted
    echoed: str = ""  # text that goes before the output


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A valid request: its choices, and how the answer is to look."""

    choices: list[Choice]
    num_per_prompt: int  # choices of the first prompt come first
    num_prompt_tokens: int
    is_stream: bool
    has_usage: bool  # a stream ends with a usage chunk
    report: ReportLevel  # on drafts; not "none" only if there is one choice


def prepare_chat(body: bytes, served: ServedModel) -> Job:
    """A chat completion's choices. Raises RequestError."""
    request = _validated(ChatRequest, body)
    _check_model(request.model, served)
    messages = [
        {"role": "system" if m.role == "developer" else m.role, "content": m.content}
        for m in request.messages
    ]
    prompt_ids = served.tokenizer.render_chat(messages)
    num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    max_tokens = request.max_completion_tokens or request.max_tokens
    choices = _choices(request, served, [(prompt_ids, "")], "messages", max_tokens, num_logprobs)
    return _job(request, served, choices, len(prompt_ids))


def prepare_completion(body: bytes, served: ServedModel) -> Job:
    """A text completion's choices: all of the first prompt, then all of the next. Raises RequestError."""
    request = _validated(CompletionRequest, body)
    _check_model(request.model, served)
    prompts: list[tuple[list[int], str]] = []
    for prompt in request.prompt:
        if isinstance(prompt, str):
            ids, text = served.tokenizer.encode(prompt), prompt
        else:
            _check_token_ids(prompt, served, "prompt")
            ids, text = prompt, served.tokenizer.decode(prompt)
        prompts.append((ids, text if request.echo else ""))
    choices = _choices(request, served, prompts, "prompt", request.max_tokens, request.logprobs)
    return _job(request, served, choices, sum(len(ids) for ids, _ in prompts))


def _job(request: SamplingRequest, served: ServedModel, choices: list[Choice], num_prompt_tokens: int) -> Job:
    options = request.stream_options
    is_stream, has_usage = bool(request.stream), options is not None and bool(options.include_usage)
    # Only a client that asked for something may be sent a chunk without choices.
    has_place = len(choices) == 1 and (has_usage or not is_stream)
    return Job(
        choices=choices,
        num_per_prompt=request.n or 1,
        num_prompt_tokens=num_prompt_tokens,
        is_stream=is_stream,
        has_usage=has_usage,
        report=_report(request, served, len(choices), has_place),
    )


def _report(request: SamplingRequest, served: ServedModel, num_choices: int, has_place: bool) -> ReportLevel:
    match None if request.speculation is None else request.speculation.report:
        case None:
            return served.report if has_place else "none"
        case False:
            return "none"
        case True:
            if num_choices > 1:
                raise RequestError(
                    f"'speculation.report' is about one choice, and this request has {num_choices}",
                    code="conflicting_parameters",
                    param="speculation.report",
                )
            return "detailed" if served.report == "detailed" else "summary"


def _choices(
    request: SamplingRequest,
    served: ServedModel,
    prompts: Sequence[tuple[list[int], str]],
    param: str,
    max_tokens: int | None,
    num_logprobs: int | None,
) -> list[Choice]:
    base = _sampling_params(request, served, num_logprobs)
    seed = secrets.randbits(64) if request.seed is None else request.seed % 2**64
    num_per_prompt = request.n or 1
    choices: list[Choice] = []
    for prompt_ids, echoed in prompts:
        room = _room(prompt_ids, served, param, max_tokens)
        if base.min_tokens > room:
            raise RequestError(
                f"min_tokens is {base.min_tokens}, above the {room} tokens of this answer",
                code="integer_above_max_value",
                param="min_tokens",
            )
        for _ in range(num_per_prompt):
            index = len(choices)
            params = msgspec.structs.replace(base, max_tokens=room, seed=_seed_of(seed, index))
            choices.append(
                Choice(
                    index=index,
                    prompt_ids=prompt_ids,
                    params=params,
                    stops=request.stop or [],
                    priority=request.priority or 0,
                    cache_salt=request.cache_salt or "",
                    max_draft_tokens=_max_draft_tokens(request),
                    has_steps=_has_steps(request),
                    echoed=echoed,
                )
            )
    return choices


def _max_draft_tokens(request: SamplingRequest) -> int | None:
    """Per step; None: no limit of its own, 0: no drafts at all."""
    if request.speculation is None:
        return None
    return 0 if request.speculation.enabled is False else request.speculation.max_draft_tokens


def _has_steps(request: SamplingRequest) -> bool:
    """Whether the stream has a chunk for each step, without choices, that tells what drafting gave it."""
    if request.speculation is None or not request.speculation.steps:
        return False
    if not request.stream:
        raise RequestError(
            "'speculation.steps' is only allowed with stream: true",
            code="conflicting_parameters",
            param="speculation.steps",
        )
    return True


def _room(prompt_ids: list[int], served: ServedModel, param: str, max_tokens: int | None) -> int:
    """How many tokens the answer may have: what was asked, or what the context leaves."""
    left = served.max_model_len - len(prompt_ids)
    if not prompt_ids:
        raise RequestError(f"'{param}' has no tokens", code="empty_array", param=param)
    if left < max(max_tokens or 1, 1):
        asked = f" and {max_tokens} tokens of output were asked for" if max_tokens else ""
        raise RequestError(
            f"This model's maximum context length is {served.max_model_len} tokens; "
            f"'{param}' has {len(prompt_ids)}{asked}. Shorten one of them.",
            code="context_length_exceeded",
            param=param,
        )
    return max_tokens or left


def _sampling_params(
    request: SamplingRequest, served: ServedModel, num_logprobs: int | None
) -> SamplingParams:
    for name in ("stop_token_ids", "allowed_token_ids"):
        _check_token_ids(getattr(request, name) or [], served, name)
    stop_token_ids = list(request.stop_token_ids or [])
    if not request.ignore_eos:
        stop_token_ids += [i for i in served.eos_token_ids if i not in stop_token_ids]
    return SamplingParams(
        max_tokens=1,  # set for each prompt, with the room it leaves
        temperature=_given(request.temperature, 1.0),
        top_k=max(_given(request.top_k, 0), 0),
        top_p=_given(request.top_p, 1.0),
        min_p=_given(request.min_p, 0.0),
        repetition_penalty=_given(request.repetition_penalty, 1.0),
        presence_penalty=_given(request.presence_penalty, 0.0),
        frequency_penalty=_given(request.frequency_penalty, 0.0),
        logit_bias=_logit_bias(request.logit_bias or {}, served),
        bad_words=_bad_words(request.bad_words or [], served.tokenizer),
        allowed_token_ids=request.allowed_token_ids,
        stop_token_ids=stop_token_ids,
        min_tokens=request.min_tokens or 0,
        logprobs=num_logprobs,
    )


_Value = TypeVar("_Value")


def _given(value: _Value | None, default: _Value) -> _Value:
    return default if value is None else value


def _logit_bias(bias: dict[str, float], served: ServedModel) -> dict[int, float]:
    if not all(key.isascii() and key.isdigit() for key in bias):
        raise RequestError(
            "the keys of 'logit_bias' must be token ids", code="invalid_token_id", param="logit_bias"
        )
    by_id = {int(key): value for key, value in bias.items()}
    _check_token_ids(list(by_id), served, "logit_bias")
    return by_id


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Token sequences of each word at the start of a text and after a space."""
    spelled = [tokenizer.encode_word(start + word.lstrip()) for word in words for start in ("", " ")]
    distinct = dict.fromkeys(tuple(ids) for ids in spelled if ids)
    return [list(ids) for ids in distinct]


def _seed_of(seed: int, index: int) -> int:
    """The seed of one choice: the request's own for the first, then SplitMix64's (Steele et al., 2014)."""
    if index == 0:
        return seed
    mask = 2**64 - 1
    z = (seed + index * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def _check_model(name: str, served: ServedModel) -> None:
    if name != served.name:
        raise unknown_model(name, served)


def unknown_model(name: str, served: ServedModel) -> RequestError:
    shown = name if len(name) <= 100 else name[:100] + "..."
    return RequestError(
        f"The model {shown!r} does not exist; this server serves {served.name!r}.",
        status=404,
        code="model_not_found",
        param="model",
    )


def _check_token_ids(ids: Sequence[int], served: ServedModel, param: str) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < served.vocab_size):
        raise RequestError(
            f"token ids in '{param}' must be between 0 and {served.vocab_size - 1}",
            code="invalid_token_id",
            param=param,
        )


def _validated(kind: type[Request], body: bytes) -> Request:
    try:
        return kind.model_validate(_parsed(body))
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_input=False)[0]) from None


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(
            body.decode(), object_pairs_hook=_unique, parse_constant=_not_a_number, parse_float=_finite
        )
        if _SURROGATE.search(body):
            json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError("the body has half of a surrogate pair", code="invalid_encoding") from None
    except UnicodeDecodeError:
        raise RequestError("the body is not UTF-8", code="invalid_encoding") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply", code="json_too_deep") from None
    except ValueError as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(document, dict):
        raise RequestError("the body must be a JSON object", code="invalid_type")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise RequestError("the body has a key twice in one object", code="duplicate_key")
    return document


def _finite(literal: str) -> float:
    value = float(literal)
    return value if math.isfinite(value) else _not_a_number(literal)


def _not_a_number(literal: str) -> NoReturn:
    raise RequestError(f"the body holds {literal[:20]}; numbers must be finite", code="invalid_json")


def _refusal(detail: ErrorDetails) -> RequestError:
    """The first of pydantic's complaints, in OpenAI's words."""
    kind, context = detail["type"], detail.get("ctx", {})
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"])
    path = path.removeprefix(".") or context.get("name", "")
    if kind in _OUR_CODES:
        code = kind
    elif kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        bound = next(value for name, value in context.items() if name in ("ge", "gt", "le", "lt"))
        number = "integer" if isinstance(bound, int) else "decimal"
        code = f"{number}_{'below_min' if kind.startswith('greater') else 'above_max'}_value"
    elif kind.endswith("_type") or kind == "int_from_float":
        code = "invalid_type"
    else:
        code = _CODES.get(kind, "invalid_value")
    if kind == "missing":
        message = f"Missing required parameter: '{path}'."
    else:
        problem = detail["msg"].removeprefix(f"{context.get('name', '')} ")
        message = f"Invalid '{path}': {problem}."
    return RequestError(message, code=code, param=path or None)
