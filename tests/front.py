"""A front door for tests: a small tokenizer, an engine that says what a script says, and a real socket."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers, trainers

from paceline.cluster.messages import Output, SamplingParams, Stats, TokenLogprobs
from paceline.deploy.api.app import create_app
from paceline.deploy.api.front import Front
from paceline.deploy.api.text import Tokenizer
from paceline.deploy.api.validate import ServedModel
from paceline.deploy.metrics import Metrics

MODEL = "org/scripted"
MAX_MODEL_LEN = 256

CORPUS = ["the quick brown fox, über 12 cafés; 日本語 🦊🦊 <|x|>", "and so it goes\n\ton and on"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}<|im_start|>"
    "{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<think>", "two words"])
    return tokenizer


def token_of(raw: tokenizers.Tokenizer, token: str) -> int:
    token_id = raw.token_to_id(token)
    assert token_id is not None
    return token_id


def loaded(raw: tokenizers.Tokenizer, path: Path, template: str | None = TEMPLATE) -> Tokenizer:
    raw.save(str(path / "tokenizer.json"))
    config = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>"}
    if template is not None:
        config["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(path)


class ScriptedEngine:
    """A TokenSource that answers every request with `script`, then the end token, a few tokens a step."""

    def __init__(
        self, tokenizer: Tokenizer, end_id: int, script: str = "the fox says 🦊 and goes on"
    ) -> None:
        self.script = script
        self.step_s = 0.0
        self.tokens_per_step = 1  # all but the last of a step are drafts that stood
        self.num_rejected = 0  # further drafts of every step but the first
        self.num_cached_tokens = 0
        self.fails_at: int | None = None  # index of the token that raises `failure`
        self.failure: Exception = RuntimeError("scripted")
        self.params: list[SamplingParams] = []
        self.prompts: list[list[int]] = []
        self.salts: list[str] = []
        self.draft_limits: list[int | None] = []
        self.live: set[str] = set()
        self.cancelled: list[str] = []
        self.health: Exception | None = None
        self._tokenizer = tokenizer
        self._end_id = end_id

    async def stream(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        *,
        cache_salt: str = "",
        max_draft_tokens: int | None = None,
        is_traced: bool = False,
    ) -> AsyncGenerator[Output, None]:
        del priority
        assert request_id not in self.live
        self.live.add(request_id)
        self.params.append(params)
        self.salts.append(cache_salt)
        self.draft_limits.append(max_draft_tokens)
        self.prompts.append(list(prompt_ids))
        is_finished = False
        try:
            ids = self._tokenizer.encode_word(self.script)
            ends = self._end_id in params.stop_token_ids
            ids = [*ids, self._end_id] if ends else ids * -(-params.max_tokens // len(ids))
            reason = "stop" if ends and len(ids) <= params.max_tokens else "length"
            ids = ids[: params.max_tokens]
            if params.prompt_logprobs is not None:
                scores = [_logprobs(i, params.prompt_logprobs) for i in prompt_ids[1:]]
                for first in range(0, len(scores), 3):  # as the chunks of a prompt come
                    part = scores[first : first + 3]
                    yield Output(
                        request_id=request_id, first_index=0, prompt_logprobs=part, first_scored=1 + first
                    )
            for first in range(0, len(ids), self.tokens_per_step):
                await asyncio.sleep(self.step_s)
                if self.fails_at is not None and first >= self.fails_at:
                    is_finished = True
                    raise self.failure
                chunk = ids[first : first + self.tokens_per_step]
                is_finished = first + len(chunk) == len(ids)
                yield Output(
                    request_id=request_id,
                    first_index=first,
                    token_ids=chunk,
                    logprobs=None
                    if params.logprobs is None
                    else [_logprobs(i, params.logprobs) for i in chunk],
                    finish_reason=reason if is_finished else None,
                    num_drafts=len(chunk) - 1 + self.num_rejected if first else 0,
                    num_accepted=len(chunk) - 1 if first else 0,
                    num_cached_tokens=0 if first else self.num_cached_tokens,
                    queue_s=0.0 if first else 0.001,
                    draft_s=0.002 if is_traced else 0.0,
                    verify_s=0.01 if is_traced else 0.0,
                )
        finally:
            self.live.remove(request_id)
            if not is_finished:
                self.cancelled.append(request_id)

    def check_health(self) -> None:
        if self.health is not None:
            raise self.health


def _logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    return TokenLogprobs(-0.5, [(token_id if i == 0 else 10 + i, -0.5 - i) for i in range(num_top)])


def scripted_front(path: Path, **further: Any) -> tuple[Front, ScriptedEngine]:
    """`further` are fields of Front."""
    raw = byte_level()
    tokenizer = loaded(raw, path)
    end_id = token_of(raw, "<|im_end|>")
    engine = ScriptedEngine(tokenizer, end_id)
    served = ServedModel(
        name=MODEL,
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=(end_id,),
    )
    stats = Stats(num_running=2, num_pages=64, num_free_pages=48, num_steps=7, plan_s=0.25)
    front = Front(
        source=engine,
        check_health=engine.check_health,
        served=served,
        metrics=Metrics(MODEL, "0", lambda: stats),
        max_body_bytes=1 << 20,
        **further,
    )
    return front, engine


@contextmanager
def listening(front: Front, loop: asyncio.AbstractEventLoop | None = None) -> Iterator[str]:
    """The application on a port of its own, in `loop` or a thread of its own; gives its URL."""
    server = uvicorn.Server(uvicorn.Config(create_app(front), port=0, log_level="warning"))
    if loop is None:
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        wait = thread.join
    else:
        wait = asyncio.run_coroutine_threadsafe(server.serve(), loop).result
    deadline = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        wait(10)


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream that has ended."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
