"""A window that slides: 1,000 tokens under a cap of 256. Memory stays flat, and drafts stay as good."""

import asyncio
import random
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from drive import make_config
from lockstep import Answer, Lockstep
from proposers import Continuations, Known, ScriptedProposer, right
from streams import together
from tiny import VOCAB_SIZE, Family, make_checkpoint
from transformers import AutoModelForCausalLM

from paceline.cluster.config import Config, EngineConfig, ModelConfig
from paceline.cluster.messages import SamplingParams, Submit
from paceline.deploy.assemble import start_local_engine
from paceline.scheduler.limits import Limits
from paceline.workers.runner import Runner

NUM_TOKENS = 1000
CAP = 256
PAGE_SIZE = 16
MAX_LEN = 1152
NUM_RECENT = 64
BLOCK_LEN = 8
TAP_LAYER_IDS = (0, 1)
# A full window that begins within a page, the block behind it, and the page that a slide lets go only later.
MOST_PAGES = CAP // PAGE_SIZE + 1 + -(-BLOCK_LEN // PAGE_SIZE) + 1
# The allocator's noise. Windows that were copied instead of slid, 90 steps of 4 x 256 rows, are 47 MB.
MOST_GROWTH_BYTES = 24 << 20


def requests(count: int) -> list[Submit]:
    numbers = random.Random(11)
    return [
        Submit(
            request_id=f"r{index}",
            prompt_ids=[numbers.randrange(3, VOCAB_SIZE) for _ in range(30 + 40 * index)],
            params=SamplingParams(max_tokens=NUM_TOKENS, temperature=float(index % 2), seed=index),
        )
        for index in range(count)
    ]


def limits() -> Limits:
    return Limits(
        num_pages=4 * MAX_LEN // PAGE_SIZE,
        page_size=PAGE_SIZE,
        max_model_len=MAX_LEN,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_queued_requests=4,
        aging_s=1.0,
        context_cap=CAP,
        draft_budget=False,
    )


def runner(path: Path, tap_layer_ids: tuple[int, ...] = ()) -> Runner:
    config = make_config(max_len=MAX_LEN, max_num_batched_tokens=64, kv_cache_gib=0.1)
    return Runner(path, config, tap_layer_ids=tap_layer_ids)


def plain_answers(path: Path, submits: list[Submit]) -> dict[str, Answer]:
    engine = Lockstep(runner(path), limits())
    for submit in submits:
        engine.submit(submit)
    engine.run()
    return engine.answers


def learn(path: Path, submits: list[Submit], answers: dict[str, Answer]) -> Continuations:
    """The outputs, and the residual stream of all tokens as transformers computes it."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    known = Continuations()
    for submit in submits:
        token_ids = answers[submit.request_id].token_ids
        with torch.inference_mode():
            hidden = model(
                torch.tensor([submit.prompt_ids + token_ids]), output_hidden_states=True
            ).hidden_states
        taps = torch.stack([hidden[layer_id + 1][0] for layer_id in TAP_LAYER_IDS], dim=1)
        known.learn(submit.prompt_ids, submit.params, Known(token_ids, taps))
    return known


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_long_generation_slides(tmp_path: Path, family: Family) -> None:
    """Drafts are made only where the last rows of the window are what transformers computes for them."""
    path = make_checkpoint(tmp_path, family, max_position_embeddings=MAX_LEN)
    submits = requests(4)
    expected = plain_answers(path, submits)
    known = learn(path, submits, expected)
    engine = Lockstep(
        runner(path, TAP_LAYER_IDS),
        limits(),
        lambda: ScriptedProposer(
            right, known, tap_layer_ids=TAP_LAYER_IDS, num_pages=4 * MOST_PAGES, num_recent=NUM_RECENT
        ),
    )
    for submit in submits:
        engine.submit(submit)
    process = psutil.Process()
    memory_bytes: dict[int, int] = {}
    while engine.advance():
        (shard,) = engine.stats.shards
        assert shard.num_context_tokens <= 4 * CAP
        assert shard.num_pages - shard.num_free_pages <= 4 * MOST_PAGES
        num_out = len(engine.answers["r0"].token_ids)
        memory_bytes[num_out] = process.memory_info().rss
    for name, answer in engine.answers.items():
        assert answer.token_ids == expected[name].token_ids
        accepted = [output.num_accepted for output in answer.outputs]
        assert set(accepted[1:-1]) == {BLOCK_LEN - 1}, "before a slide as after it every block stands"
    assert engine.stats.num_slides >= 4 * (NUM_TOKENS - CAP) // PAGE_SIZE
    assert engine.stats.num_context_restarts == 0
    at_cap = next(size for num_out, size in sorted(memory_bytes.items()) if num_out > CAP + 50)
    assert max(memory_bytes.values()) - at_cap < MOST_GROWTH_BYTES


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_model_slides(default_model: Path) -> None:
    """The same through the engine's threads; `settle` shows that no page is held in the end."""
    prompts = [[504, 1050, 282, 260], [19, 28, 216, 34, 28]]
    wanted = [
        (prompt, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8 * index, seed=index))
        for index, prompt in enumerate(prompts)
    ]

    def config(drafter: str) -> Config:
        engine = EngineConfig(
            num_threads=1, drafter=drafter, context_cap=CAP, kv_cache_gib=0.2, draft_budget=False
        )
        return Config(model=ModelConfig(dtype="float32", max_model_len=MAX_LEN), engine=engine)

    async def generate(drafter: str, known: Continuations | None) -> tuple[list[list[int]], int, int]:
        options: dict[str, Any] = {}
        if known is not None:
            options["tap_layer_ids"] = TAP_LAYER_IDS
            options["make_proposer"] = lambda _: ScriptedProposer(
                right, known, tap_layer_ids=TAP_LAYER_IDS, num_pages=2 * MOST_PAGES
            )
        engine = await start_local_engine(config(drafter), default_model, **options)
        token_ids = await together(engine, wanted)
        async with asyncio.timeout(10):
            while engine.stats.has_work:
                await asyncio.sleep(0.05)
        stats = engine.stats
        await engine.close()
        return token_ids, stats.num_slides, stats.num_drafts

    expected, _, _ = asyncio.run(generate("none", None))
    known = Continuations()
    for (prompt, params), token_ids in zip(wanted, expected, strict=True):
        known.learn(prompt, params, Known(token_ids))
    got, num_slides, num_drafts = asyncio.run(generate("default", known))
    assert got == expected
    assert num_slides >= 2 * (NUM_TOKENS - CAP) // PAGE_SIZE - 2
    assert num_drafts == 2 * -(-(NUM_TOKENS - 1) // BLOCK_LEN)
