"""From the bytes of a request to what the engine is asked for; every mistake becomes a RequestError here.

One order for all front doors: JSON, then types and bounds (`openai_protocol`), then what only the model can
say: its name, its vocabulary, its length.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from ...cluster.config import ReportLevel
from ...cluster.errors import RequestError
from ...cluster.messages import Grammar, SamplingParams
from .answer import MakeReader
from .bodies import parse_request
from .conversation import ONLY_WORDS, ChatFormat, Conversation, prepare_conversation
from .openai_protocol import ChatRequest, CompletionRequest, SamplingRequest
from .structured import response_grammar, structured_grammar
from .text import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model as requests see it."""

    name: str  # the `model` of requests
    tokenizer: Tokenizer
    vocab_size: int  # of the model's head; the tokenizer may know fewer
    max_model_len: int  # prompt and output together
    eos_token_ids: tuple[int, ...]
    chat_format: ChatFormat = ONLY_WORDS
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
    shows_stop: bool = False  # the stop string that ends its text is part of it
    has_token_ids: bool = False  # its answer tells the ids of its tokens
    has_steps: bool = False  # its stream tells the text of every token and which of them were drafted
    echoed: str = ""  # text that goes before the output
    make_reader: MakeReader | None = None  # tells words, thoughts and calls apart; None: all is words


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A valid request: its choices, and how the answer is to look."""

    choices: list[Choice]
    num_per_prompt: int  # choices of the first prompt come first
    num_prompt_tokens: int
    is_stream: bool
    has_usage: bool  # a stream ends with a usage chunk
    has_running_usage: bool = False  # and every chunk before it tells the usage so far
    timeout_s: float | None = None  # the answer is given up when it is not whole by then
    report: ReportLevel  # on drafts; not "none" only if there is one choice
    num_prompt_logprobs: int | None = (
        None  # alternatives to tell with each token of the prompts, if asked for
    )


def prepare_chat(body: bytes, served: ServedModel) -> Job:
    """A chat completion's choices. Raises RequestError."""
    return chat_job(parse_request(ChatRequest, body), served)


def chat_prompt(request: ChatRequest, served: ServedModel) -> list[int]:
    """The tokens that the model answers to. Raises RequestError."""
    return _conversation(request, served).prompt_ids


def _conversation(request: ChatRequest, served: ServedModel) -> Conversation:
    check_model(request.model, served)
    check_chars(sum(len(message.content) for message in request.messages), served, "messages")
    return prepare_conversation(request, served.tokenizer, served.chat_format, _grammar(request))


def chat_job(request: ChatRequest, served: ServedModel) -> Job:
    """The choices of a chat completion; other endpoints turn their requests into one. Raises RequestError."""
    chat = _conversation(request, served)
    prompt_ids, _ = _truncated(chat.prompt_ids, request, served, _max_tokens(request))
    num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    choices = _choices(
        request, served, [(prompt_ids, "")], "messages", _max_tokens(request), num_logprobs, chat.grammar
    )
    choices = [replace(choice, make_reader=chat.make_reader) for choice in choices]
    return _job(request, served, choices, len(prompt_ids))


def _max_tokens(request: ChatRequest) -> int | None:
    return request.max_completion_tokens or request.max_tokens


def prepare_completion(body: bytes, served: ServedModel) -> Job:
    """A text completion's choices: all of the first prompt, then all of the next. Raises RequestError."""
    request = parse_request(CompletionRequest, body)
    check_model(request.model, served)
    prompts: list[tuple[list[int], str]] = []
    for prompt in request.prompt:
        if isinstance(prompt, str):
            check_chars(len(prompt), served, "prompt")
            has_special = request.add_special_tokens is not False
            ids, text = served.tokenizer.encode(prompt, add_special_tokens=has_special), prompt
        else:
            check_token_ids(prompt, served, "prompt")
            ids, text = prompt, served.tokenizer.decode(prompt)
        ids, is_cut = _truncated(ids, request, served, request.max_tokens)
        if is_cut:
            text = served.tokenizer.decode(ids)
        prompts.append((ids, text if request.echo else ""))
    choices = _choices(
        request, served, prompts, "prompt", request.max_tokens, request.logprobs, _grammar(request)
    )
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
        has_running_usage=has_usage and options is not None and bool(options.continuous_usage_stats),
        timeout_s=request.timeout,
        report=_report(request, served, len(choices), has_place),
        num_prompt_logprobs=request.prompt_logprobs,
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
    grammar: Grammar | None,
) -> list[Choice]:
    base = _sampling_params(request, served, num_logprobs)
    if grammar is not None:
        base = _constrained(request, base, served, grammar)
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
                    shows_stop=bool(request.include_stop_str_in_output),
                    has_token_ids=bool(request.return_token_ids),
                    has_steps=_has_steps(request),
                    echoed=echoed,
                )
            )
    return choices


def _grammar(request: SamplingRequest) -> Grammar | None:
    """What the request says of its output's form; one way of saying it is enough."""
    grammar, structured = (
        response_grammar(request.response_format),
        structured_grammar(request.structured_outputs),
    )
    if grammar is not None and structured is not None:
        raise RequestError(
            "'structured_outputs' and 'response_format' both say what the output must be; give one of them",
            code="conflicting_parameters",
            param="structured_outputs",
        )
    return grammar or structured


def _constrained(
    request: SamplingRequest, params: SamplingParams, served: ServedModel, grammar: Grammar
) -> SamplingParams:
    """With a grammar, whose end is an end-of-sequence token even for a request that ignores those."""
    for name in ("min_tokens", "bad_words", "allowed_token_ids"):
        if getattr(request, name):
            raise RequestError(
                f"'{name}' cannot be combined with a grammar: together they may leave no token",
                code="conflicting_parameters",
                param=name,
            )
    stop_token_ids = [
        *params.stop_token_ids,
        *(i for i in served.eos_token_ids if i not in params.stop_token_ids),
    ]
    return msgspec.structs.replace(params, grammar=grammar, stop_token_ids=stop_token_ids)


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


def check_chars(num_chars: int, served: ServedModel, param: str) -> None:
    """Refuse before it is tokenised what cannot fit, were all of it the longest token there is."""
    if num_chars > served.max_model_len * served.tokenizer.longest_token_len:
        raise RequestError(
            f"This model's maximum context length is {served.max_model_len} tokens; "
            f"'{param}' has {num_chars} characters, which are more. Shorten it.",
            code="context_length_exceeded",
            param=param,
        )


def _truncated(
    ids: list[int], request: SamplingRequest, served: ServedModel, max_tokens: int | None
) -> tuple[list[int], bool]:
    """The part of a prompt that the request wants kept, and whether that is less than all."""
    if request.truncate_prompt_tokens is None:
        return ids, False
    most = served.max_model_len - (max_tokens or 1)
    kept = most if request.truncate_prompt_tokens == -1 else request.truncate_prompt_tokens
    if kept > served.max_model_len:
        raise RequestError(
            f"'truncate_prompt_tokens' is {kept}, above the {served.max_model_len} tokens of the context",
            code="integer_above_max_value",
            param="truncate_prompt_tokens",
        )
    if kept <= 0 or len(ids) <= kept:
        return ids, False
    return (ids[:kept] if request.truncation_side == "right" else ids[-kept:]), True


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
        check_token_ids(getattr(request, name) or [], served, name)
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
        prompt_logprobs=_num_prompt_logprobs(request),
    )


def _num_prompt_logprobs(request: SamplingRequest) -> int | None:
    """Asked for by name, or by a completion that echoes its prompt with log-probabilities."""
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        return max(request.logprobs, request.prompt_logprobs or 0)
    return request.prompt_logprobs


_Value = TypeVar("_Value")


def _given(value: _Value | None, default: _Value) -> _Value:
    return default if value is None else value


def _logit_bias(bias: dict[str, float], served: ServedModel) -> dict[int, float]:
    if not all(key.isascii() and key.isdigit() for key in bias):
        raise RequestError(
            "the keys of 'logit_bias' must be token ids", code="invalid_token_id", param="logit_bias"
        )
    by_id = {int(key): value for key, value in bias.items()}
    check_token_ids(list(by_id), served, "logit_bias")
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


def check_model(name: str, served: ServedModel) -> None:
    """RequestError 404 unless `name` is the model that is served."""
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


def check_token_ids(ids: Sequence[int], served: ServedModel, param: str) -> None:
    """RequestError unless all are ids of the model's vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < served.vocab_size):
        raise RequestError(
            f"token ids in '{param}' must be between 0 and {served.vocab_size - 1}",
            code="invalid_token_id",
            param=param,
        )
