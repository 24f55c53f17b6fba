"""The real model with any drafter says, token for token, what it says without: float32, all of the settings.

Each setting is an engine with a drafter and some want: of rows, of pages, of context. All cases run in it at
once, through the text layer of the front door, and are compared with an engine that never drafts.
"""

import asyncio
import json
import math
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from lockstep import Answer
from proposers import Continuations, Known, Rule, ScriptedProposer, mixed, right, wrong
from tiny_drafter import config_of, make_drafter

from paceline.cluster.config import Config, EngineConfig, ModelConfig
from paceline.cluster.messages import Output, SamplingParams, Stats, TokenLogprobs
from paceline.deploy.api.streaming import stream_choice
from paceline.deploy.api.text import Tokenizer
from paceline.deploy.api.validate import Choice, ServedModel, prepare_completion
from paceline.deploy.assemble import start_local_engine
from paceline.deploy.engine import Engine
from paceline.deploy.metrics import Metrics
from paceline.workers.spec import ModelSpec

MODEL = "real"
SHIPPED = Path(__file__).parents[2] / "drafter" / "pretrained" / "smollm2-135m"
MAX_LEN = 144
TOKEN_BYTES = 2 * 30 * 3 * 64 * 4  # of K/V: two, layers, K/V heads, head dim, float32
TAP_LAYER_IDS = (3, 20)

PARIS = "The capital of France is"
COUNT = "1, 2, 3, 4, 5, 6, 7,"
STORY = "Once upon a time, in a village by the sea, there lived an old fisherman who had three daughters. The"
LIST = "Here is a list of the planets of the solar system, from the sun outwards:\n\n1. Mercury\n2."
CODE = "def fibonacci(n):\n    if n < 2:\n        return n\n    return"
LONG = (
    "The history of the lighthouse begins in antiquity, when fires were lit on hilltops to guide ships home. "
    "Later the fire was placed on a platform, and in the end on a tower, so that it could be seen from far "
    "away. The most famous of these towers stood on the island of Pharos, at the harbour of Alexandria, and "
    "counted among the seven wonders of the world. Today most lighthouses are automatic, and their keepers"
)

PERSON = {
    "type": "json_schema",
    "json_schema": {
        "name": "person",
        "schema": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
            "required": ["name", "age"],
        },
    },
}

CASES: dict[str, dict[str, Any]] = {
    "greedy paris": {"prompt": PARIS, "temperature": 0, "max_tokens": 32},
    "greedy count": {"prompt": COUNT, "temperature": 0, "max_tokens": 33},
    "greedy story": {"prompt": STORY, "temperature": 0, "max_tokens": 24},
    "greedy list": {"prompt": LIST, "temperature": 0, "max_tokens": 28},
    "greedy long": {"prompt": LONG, "temperature": 0, "max_tokens": 24},
    "greedy code": {"prompt": CODE, "temperature": 0, "max_tokens": 20},
    "one token": {"prompt": PARIS, "temperature": 0, "max_tokens": 1},
    "two tokens": {"prompt": COUNT, "seed": 4, "max_tokens": 2},
    "nucleus story": {"prompt": STORY, "temperature": 0.7, "top_p": 0.9, "seed": 1, "max_tokens": 28},
    "nucleus long": {"prompt": LONG, "temperature": 0.7, "top_p": 0.9, "seed": 2, "max_tokens": 20},
    "nucleus hot": {"prompt": LIST, "temperature": 1.0, "top_p": 0.95, "seed": 3, "max_tokens": 24},
    "nucleus paris": {"prompt": PARIS, "temperature": 1.0, "top_p": 0.8, "seed": 4, "max_tokens": 24},
    "hot": {"prompt": STORY, "temperature": 1.0, "seed": 5, "max_tokens": 20},
    "top-k": {"prompt": CODE, "temperature": 0.7, "top_k": 20, "seed": 6, "max_tokens": 20},
    "min-p": {"prompt": STORY, "temperature": 1.3, "min_p": 0.1, "seed": 7, "max_tokens": 20},
    "stop token": {"prompt": STORY, "temperature": 0, "stop_token_ids": [30, 28], "max_tokens": 30},
    "stop token hot": {
        "prompt": LIST,
        "temperature": 0.7,
        "seed": 8,
        "stop_token_ids": [198],
        "max_tokens": 30,
    },
    "min tokens": {
        "prompt": STORY,
        "temperature": 0,
        "stop_token_ids": [30, 28],
        "min_tokens": 19,
        "max_tokens": 30,
    },
    "stop string": {"prompt": LIST, "temperature": 0, "stop": ["4.", "Jupiter"], "max_tokens": 40},
    "stop string hot": {
        "prompt": STORY,
        "temperature": 0.7,
        "seed": 9,
        "stop": [". ", "and"],
        "max_tokens": 40,
    },
    "stop over tokens": {"prompt": COUNT, "temperature": 0, "stop": ["1, 12, 1"], "max_tokens": 40},
    "repetition": {"prompt": COUNT, "temperature": 0, "repetition_penalty": 1.3, "max_tokens": 24},
    "presence": {"prompt": COUNT, "temperature": 0, "presence_penalty": 1.5, "max_tokens": 24},
    "frequency": {"prompt": LIST, "temperature": 0.7, "seed": 10, "frequency_penalty": 1.0, "max_tokens": 24},
    "all penalties": {
        "prompt": STORY,
        "temperature": 1.0,
        "top_p": 0.9,
        "seed": 11,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "max_tokens": 24,
    },
    "bias": {"prompt": PARIS, "temperature": 0, "logit_bias": {"28": 5, "30": -100}, "max_tokens": 24},
    "bad words": {"prompt": COUNT, "temperature": 0, "bad_words": ["10", "1"], "max_tokens": 20},
    "allowed": {
        "prompt": STORY,
        "temperature": 1.0,
        "seed": 12,
        "allowed_token_ids": list(range(260, 700)),
        "max_tokens": 20,
    },
    "logprobs": {"prompt": PARIS, "temperature": 0, "logprobs": 4, "max_tokens": 20},
    "logprobs hot": {
        "prompt": CODE,
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 13,
        "logprobs": 1,
        "max_tokens": 20,
    },
    "two choices": {"prompt": STORY, "temperature": 1.0, "top_p": 0.95, "seed": 14, "n": 2, "max_tokens": 20},
    "two choices stopped": {
        "prompt": LIST,
        "seed": 15,
        "n": 2,
        "stop": "\n",
        "logprobs": 0,
        "max_tokens": 20,
    },
    "json schema": {"prompt": STORY, "temperature": 0, "response_format": PERSON, "max_tokens": 40},
    "json schema hot": {
        "prompt": PARIS,
        "temperature": 1.0,
        "top_p": 0.95,
        "seed": 17,
        "n": 2,
        "logprobs": 2,
        "response_format": PERSON,
        "max_tokens": 32,
    },
    "json object": {
        "prompt": LIST,
        "temperature": 0.7,
        "seed": 18,
        "response_format": {"type": "json_object"},
        "stop": ["}"],
        "max_tokens": 28,
    },
    "regex": {
        "prompt": COUNT,
        "temperature": 0,
        "structured_outputs": {"regex": "([0-9]{2}, ){3}ok"},
        "max_tokens": 24,
    },
    "choice": {
        "prompt": PARIS,
        "temperature": 1.0,
        "seed": 19,
        "structured_outputs": {"choice": ["Lyon", "Paris, of course"]},
        "ignore_eos": True,
        "max_tokens": 16,
    },
    "two prompts": {"prompt": [LONG, PARIS], "temperature": 0.7, "seed": 16, "max_tokens": 16},
}


@dataclass(frozen=True)
class Setting:
    """An engine to be compared; `rule` is of a test double, without it `drafter` is the engine's own."""

    rule: Rule | None = None
    drafter: str = "ngram"
    taps: bool = True
    k: int = 7
    page_size: int = 16
    cache_len: int = 4096  # tokens that the pages hold
    engine: dict[str, Any] = field(default_factory=dict)
    shown: tuple[str, ...] = ()  # numbers of Stats that must not be 0, or it did not happen


TIGHT: dict[str, Any] = {"page_size": 8, "cache_len": MAX_LEN}  # the longest case alone takes most of it
SETTINGS = {
    "oracle": Setting(right, engine={"max_num_batched_tokens": 256}, shown=("num_prefix_hits",)),
    "oracle, no taps, few pages": Setting(
        right, taps=False, k=5, **TIGHT, shown=("num_preemptions", "num_accepted_tokens")
    ),
    "adversary, slides, few pages": Setting(
        wrong, k=2, **TIGHT, engine={"context_cap": 32}, shown=("num_slides", "num_preemptions")
    ),
    "mixed, slides, few rows and pages": Setting(
        mixed,
        k=4,
        **TIGHT,
        engine={"context_cap": 48, "max_num_batched_tokens": 24, "prefix_cache": False},
        shown=("num_slides", "num_preemptions", "num_accepted_tokens"),
    ),
    "random network, slides, few rows": Setting(
        drafter="dflash",
        k=3,
        engine={"context_cap": 64, "max_num_batched_tokens": 40},
        shown=("num_slides", "num_prefix_hits", "num_commit_rows"),
    ),
    "shipped drafter beside prompt lookup": Setting(
        drafter="shipped", k=3, engine={"max_num_batched_tokens": 96}, shown=("num_accepted_tokens",)
    ),
    "prompt lookup, as far as it pays": Setting(
        k=4, engine={"prefix_cache": False, "draft_budget": True}, shown=("num_accepted_tokens",)
    ),
}


@dataclass
class Told(Answer):
    """What one choice was sent, also as text."""

    text: str = ""
    num_tokens: int = 0  # up to a stop string
    reason: str | None = None  # the client's


class Recorder:
    """A source of tokens that keeps what passes through."""

    def __init__(self, engine: Engine) -> None:
        self.told: dict[str, Told] = {}
        self._engine = engine

    async def stream(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, *rest: Any, **options: Any
    ) -> AsyncGenerator[Output, None]:
        told = self.told[request_id] = Told()
        async with aclosing(self._engine.stream(request_id, prompt_ids, params, *rest, **options)) as outputs:
            async for output in outputs:
                told.take(output)
                yield output


class Real:
    """The real model, its cases, and what they say without a drafter."""

    def __init__(self, path: Path, drafter: Path) -> None:
        self.path = path
        self.drafter = drafter
        spec = ModelSpec.load(path)
        self.served = ServedModel(
            name=MODEL,
            tokenizer=Tokenizer.load(path),
            vocab_size=spec.vocab_size,
            max_model_len=MAX_LEN,
            eos_token_ids=spec.eos_token_ids,
        )
        self.choices: dict[str, Choice] = {}
        self.expected: dict[str, Told] = {}
        self.known = Continuations()
        self._metrics = Metrics(MODEL, "0", Stats)

    def config(self, setting: Setting | None) -> Config:
        plain: dict[str, Any] = {"drafter": "none", "prefix_cache": False}
        if setting is not None:
            paths = {"dflash": str(self.drafter), "shipped": str(SHIPPED)}
            drafter = paths.get(setting.drafter, setting.drafter)
            plain = {"drafter": drafter, "num_draft_tokens": setting.k, "drafter_cache_gib": 0.02}
            plain["draft_budget"] = False  # verify all, unless the setting says else
            plain |= setting.engine
            plain["page_size"] = setting.page_size
        cache_len = 4096 if setting is None else setting.cache_len
        plain["kv_cache_gib"] = (cache_len + 1) * TOKEN_BYTES / (1 << 30)
        return Config(
            model=ModelConfig(dtype="float32", max_model_len=MAX_LEN),
            engine=EngineConfig(num_threads=1, max_num_seqs=12, check_invariants=True, **plain),
        )

    async def run(
        self, choices: dict[str, Choice], setting: Setting | None = None
    ) -> tuple[dict[str, Told], Stats]:
        """All choices at once, in some order."""
        options: dict[str, Any] = {}
        if setting is not None and setting.rule is not None:
            taps = TAP_LAYER_IDS if setting.taps else ()
            rule = setting.rule
            options["tap_layer_ids"] = taps
            options["make_proposer"] = lambda _: ScriptedProposer(
                rule,
                self.known,
                max_drafts=setting.k,
                tap_layer_ids=taps,
                num_pages=100,
                page_size=setting.page_size,
            )
        engine = await start_local_engine(self.config(setting), self.path, **options)
        try:
            recorder = Recorder(engine)
            names = list(choices)
            random.Random(len(names)).shuffle(names)
            await asyncio.gather(*(self._tell(recorder, name, choices[name]) for name in names))
            async with asyncio.timeout(10):
                while engine.stats.has_work or engine.stats.num_steps == 0:
                    await asyncio.sleep(0.05)
            return recorder.told, engine.stats
        finally:
            await engine.close()

    async def prepare(self) -> None:
        """Learn what the model says without a drafter, and what it would say if no stop ended it."""
        for name, body in CASES.items():
            job = prepare_completion(json.dumps({"model": MODEL, **body}).encode(), self.served)
            for choice in job.choices:
                self.choices[f"{name} {choice.index}"] = choice
        self.expected, _ = await self.run(self.choices)
        ended_early = {
            name: _endless(choice)
            for name, choice in self.choices.items()
            if self.expected[name].reason == "stop"
            and not choice.params.min_tokens
            and choice.params.grammar is None  # its end is a stop token
        }
        endless, _ = await self.run(ended_early)
        for name, choice in self.choices.items():
            told = endless.get(name, self.expected[name])
            self.known.learn(choice.prompt_ids, choice.params, Known(told.token_ids))

    async def _tell(self, recorder: Recorder, name: str, choice: Choice) -> None:
        timer = self._metrics.start()
        stream = stream_choice(recorder, self.served.tokenizer, name, choice, timer)
        pieces = [piece async for piece in stream]
        told = recorder.told[name]
        told.text = "".join(piece.text for piece in pieces)
        told.num_tokens = sum(piece.num_tokens for piece in pieces)
        told.reason = pieces[-1].finish_reason


def _endless(choice: Choice) -> Choice:
    params = msgspec.structs.replace(choice.params, stop_token_ids=[])
    return replace(choice, params=params, stops=[])


def _difference(got: Told, expected: Told) -> str | None:
    """What is not the same, if anything; behind a stop string nothing is compared."""
    if (got.text, got.reason, got.num_tokens) != (expected.text, expected.reason, expected.num_tokens):
        return (
            f"{got.text!r} ({got.reason}, {got.num_tokens} tokens), "
            f"not {expected.text!r} ({expected.reason}, {expected.num_tokens})"
        )
    num = expected.num_tokens
    if got.token_ids[:num] != expected.token_ids[:num]:
        return f"tokens {got.token_ids[:num]}, not {expected.token_ids[:num]}"
    for mine, theirs in zip(got.logprobs[:num], expected.logprobs[:num], strict=True):
        pairs = zip(_values(mine), _values(theirs), strict=True)
        if any(abs(a - b) > 1e-4 for a, b in pairs):
            return f"logprobs {mine}, not {theirs}"
    return None


def _values(logprobs: TokenLogprobs) -> list[float]:
    return [logprobs.logprob, *(value for _, value in logprobs.top)]


@pytest.fixture(scope="module")
def real(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Real:
    config = config_of(
        layer_types=("sliding_attention", "full_attention"),
        hidden_size=576,
        vocab_size=49152,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        intermediate_size=256,
        num_target_layers=30,
        options={"target_layer_ids": [2, 14, 27], "mask_token_id": 0},
    )
    prepared = Real(default_model, make_drafter(tmp_path_factory.mktemp("drafter") / "random", config))
    asyncio.run(prepared.prepare())
    return prepared


def test_there_are_enough_cases(real: Real) -> None:
    assert len(real.choices) * len(SETTINGS) >= 200
    reasons = [real.expected[name].reason for name in real.choices]
    assert reasons.count("stop") >= 6


@pytest.mark.parametrize("name", SETTINGS)
def test_same_as_without_a_drafter(real: Real, name: str) -> None:
    setting = SETTINGS[name]
    told, stats = asyncio.run(real.run(real.choices, setting))
    differences = {
        case: difference
        for case in real.choices
        if (difference := _difference(told[case], real.expected[case])) is not None
    }
    assert not differences, json.dumps(differences, indent=1)
    assert stats.num_drafts > 0
    assert [(shard.peer, shard.state) for shard in stats.shards] == [("shard0.0", "ready")]
    assert {number: getattr(stats, number) for number in setting.shown if not getattr(stats, number)} == {}
    if setting.rule is wrong:
        assert stats.num_accepted_tokens == 0
    if setting.rule is right and "num_preemptions" not in setting.shown:
        _check_blocks_stand_whole(real, told, setting.k + 1)


def _check_blocks_stand_whole(real: Real, told: dict[str, Told], block_len: int) -> None:
    """One token from the prompt, then a block from each verify, but for the last."""
    for name, choice in real.choices.items():
        if not choice.stops:
            num_tokens = len(told[name].token_ids)
            num_verifies = sum(bool(output.token_ids) for output in told[name].outputs) - 1
            assert num_verifies == math.ceil((num_tokens - 1) / block_len), name
