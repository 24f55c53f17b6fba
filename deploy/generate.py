"""`paceline generate`: prompts through an engine of this process's own, without a server.

All prompts run together, as many as the engine has places for, and are printed in the order they were given.
With one rank the engine is two threads here, and Ray is not started. With several it is Ray's gang; then
`serve.set_environment` must have run before this module was imported.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TextIO

import msgspec
import ray

from ..cluster.config import Config
from ..cluster.errors import ConfigError, EngineError, RequestError
from ..cluster.messages import FinishReason, SamplingParams, Submit
from ..workers.runner import max_model_len
from ..workers.spec import ModelSpec
from .acceptance import Acceptance
from .api.text import Detokenizer, Tokenizer
from .assemble import start_engine, start_local_engine
from .drafter_source import choose_drafter
from .engine import Engine
from .ray_session import start_ray
from .startup import StartupView


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str


class Prompt(msgspec.Struct, frozen=True):
    """Text to continue, or a conversation to answer: exactly one of the two."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("exactly one of `prompt` and `messages` is needed")


class Usage(msgspec.Struct, frozen=True):
    """Tokens in and out; an end-of-sequence token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Timings(msgspec.Struct, frozen=True):
    """`prefill_s` ends with the first token, `decode_s` runs from there to the last."""

    prefill_s: float
    decode_s: float
    tokens_per_s: float  # while decoding: tokens after the first per decode_s; 0 when there are none


class Speculation(msgspec.Struct, frozen=True):
    """What drafting bought. A verify is a forward of the target that decided tokens, drafted or not."""

    drafter: str  # what drafted: "ngram", or a checkpoint as it was named; "none"
    mean_tokens_per_verify: (
        float  # the prompt's own forward, which gives the first token, is none; 0: no verify
    )
    acceptance_per_slot: list[float]  # share of the drafts at this slot behind the anchor that stood


class Completion(msgspec.Struct, frozen=True):
    """One line of `--json`."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    speculation: Speculation


def read_prompts(texts: Sequence[str], chats: Sequence[str], file: Path | None) -> list[Prompt]:
    """Join the prompts of the command line and of a JSON lines file. Raises ConfigError, naming the line."""
    for text in (*texts, *chats):
        try:
            text.encode()
        except UnicodeEncodeError:  # the shell's bytes, which Python smuggles in as surrogates
            raise ConfigError(f"{text!r} is not UTF-8; write the prompt in that encoding") from None
    prompts = [Prompt(prompt=text) for text in texts]
    prompts += [Prompt(messages=[ChatMessage("user", text)]) for text in chats]
    if file is not None:
        try:
            lines = file.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(f"{file} cannot be read ({error.strerror}); check --prompts-file") from None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                prompts.append(msgspec.json.decode(line, type=Prompt))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f'{file}, line {number}: {error}; write {{"prompt": text}} or {{"messages": [...]}}'
                ) from None
    if not prompts:
        raise ConfigError("there is nothing to generate from; give --prompt, --chat or --prompts-file")
    return prompts


def run_generate(
    config: Config,
    model_path: Path,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    view: StartupView,
    *,
    as_json: bool,
) -> None:
    """Generate for every prompt and print; a prompt that cannot run is refused before the engine starts."""
    spec = ModelSpec.load(model_path)
    spec.check_tensor_parallel(config.engine.tensor_parallel_size)
    drafter = choose_drafter(config, model_path)
    tokenizer = Tokenizer.load(model_path)
    longest = max_model_len(spec, config.model.max_model_len)
    requests = [
        _request(index, _encode(tokenizer, prompt), params, spec, longest)
        for index, prompt in enumerate(prompts, 1)
    ]
    view.phase("starting the engine")
    name = "none" if drafter is None else drafter.name
    asyncio.run(_generate(config, model_path, requests, tokenizer, name, view, as_json=as_json))


def _encode(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    if prompt.prompt is not None:
        return tokenizer.encode(prompt.prompt)
    assert prompt.messages is not None
    return tokenizer.render_chat([msgspec.structs.asdict(message) for message in prompt.messages])


def _request(index: int, ids: list[int], params: SamplingParams, spec: ModelSpec, longest: int) -> Submit:
    if not ids:
        raise RequestError(f"prompt {index} has no tokens; give it some text")
    if len(ids) >= longest:
        raise RequestError(
            f"prompt {index} has {len(ids)} tokens, and prompt and output together may have {longest}; "
            "shorten it or raise --max-model-len"
        )
    fitting = msgspec.structs.replace(
        params,
        max_tokens=min(params.max_tokens, longest - len(ids)),
        stop_token_ids=list(spec.eos_token_ids),
    )
    return Submit(request_id=f"prompt-{index}", prompt_ids=ids, params=fitting)


async def _generate(
    config: Config,
    model_path: Path,
    requests: Sequence[Submit],
    tokenizer: Tokenizer,
    drafter: str,
    view: StartupView,
    *,
    as_json: bool,
) -> None:
    places = asyncio.Semaphore(config.engine.max_num_seqs)  # so that no timing counts a wait in the queue
    out = sys.stdout
    live = out if len(requests) == 1 and not as_json else None

    async def complete(engine: Engine, request: Submit) -> Completion:
        async with places:
            return await _complete(engine, tokenizer, request, drafter, live)

    async with running(config, model_path) as engine:
        view.close()
        tasks = [asyncio.create_task(complete(engine, request)) for request in requests]
        try:
            for task in tasks:
                completion = await task
                if as_json:
                    print(msgspec.json.encode(completion).decode(), file=out, flush=True)
                elif live is None:
                    print(f"{completion.text}\n", file=out, flush=True)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _complete(
    engine: Engine, tokenizer: Tokenizer, request: Submit, drafter: str, live: TextIO | None
) -> Completion:
    """Run one request; its text is printed to `live` as it comes."""
    detokenizer = Detokenizer(tokenizer)
    token_ids: list[int] = []
    pieces: list[str] = []
    arrivals_s: list[float] = []  # of outputs that carry tokens: each is what one step decided
    num_first = 0  # tokens of the first of them
    acceptance = Acceptance()
    finish_reason: FinishReason | None = None
    began_s = time.perf_counter()
    async for output in engine.stream(request.request_id, request.prompt_ids, request.params):
        if output.finish_reason == "error":
            raise EngineError(f"{request.request_id} ended: {output.error}")
        if output.token_ids:
            arrivals_s.append(time.perf_counter())
            num_first = num_first or len(output.token_ids)
        acceptance.add(output.num_drafts, output.num_accepted)
        token_ids += output.token_ids
        pieces.append(detokenizer.push(output.token_ids))
        if live is not None:
            print(pieces[-1], end="", file=live, flush=True)
        finish_reason = output.finish_reason
    assert finish_reason is not None, "a stream ends with a reason"
    pieces.append(detokenizer.flush())
    if live is not None:
        print(pieces[-1], file=live, flush=True)
    num_prompt, num_output = len(request.prompt_ids), len(token_ids)
    first_s, last_s = (arrivals_s[0], arrivals_s[-1]) if arrivals_s else (began_s, began_s)
    decode_s = last_s - first_s
    num_verifies = len(arrivals_s) - 1
    return Completion(
        text="".join(pieces),
        token_ids=token_ids,
        finish_reason=finish_reason,
        usage=Usage(num_prompt, num_output, num_prompt + num_output),
        timings=Timings(
            prefill_s=first_s - began_s,
            decode_s=decode_s,
            tokens_per_s=(num_output - 1) / decode_s if decode_s > 0 else 0.0,
        ),
        speculation=Speculation(
            drafter=drafter,
            mean_tokens_per_verify=(num_output - num_first) / num_verifies if num_verifies > 0 else 0.0,
            acceptance_per_slot=acceptance.per_slot(),
        ),
    )


@contextlib.asynccontextmanager
async def running(config: Config, model_path: Path) -> AsyncIterator[Engine]:
    """An engine for as long as the block lasts: of threads for one rank, of Ray actors for more."""
    is_local = config.engine.tensor_parallel_size == 1
    with contextlib.ExitStack() as stack:
        if not is_local:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # Ray prints what befalls its workers
            start_ray(config)
            stack.callback(ray.shutdown)
        engine = await (start_local_engine if is_local else start_engine)(config, model_path)
        try:
            yield engine
        finally:
            await engine.close()
