"""Log-probabilities of a prompt's own tokens: the model's, whatever the chunks, the cache and the load."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from streams import tiny_config
from tiny import make_checkpoint
from transformers import AutoModelForCausalLM

from paceline.cluster.messages import SamplingParams, TokenLogprobs
from paceline.deploy.assemble import start_local_engine
from paceline.deploy.engine import Engine

NUM_TOP = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture
async def engine(model: Path) -> AsyncIterator[Engine]:
    """Prompts are read in chunks, and there are fewer pages than the requests of a test want at once."""
    config = tiny_config(max_num_batched_tokens=40, max_num_seqs=8, kv_cache_gib=0.0004)
    started = await start_local_engine(config, model)
    yield started
    await started.close()


def expected(model: Path, ids: list[int]) -> torch.Tensor:
    """[T - 1, vocab] log-probabilities of what follows each token."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        return reference(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)


async def asked(
    engine: Engine,
    name: str,
    ids: list[int],
    num: int | None,
    max_tokens: int = 4,
    preempted: list[str] | None = None,
) -> tuple[dict[int, TokenLogprobs], list[int]]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, prompt_logprobs=num)
    scores: dict[int, TokenLogprobs] = {}
    tokens: list[int] = []
    async for output in engine.stream(name, ids, params):
        scores |= dict(enumerate(output.prompt_logprobs, output.first_scored))
        tokens += output.token_ids
        if preempted is not None and output.num_preemptions:
            preempted.append(name)
    return scores, tokens


async def test_they_are_the_model_s(engine: Engine, model: Path) -> None:
    numbers = random.Random(3)
    ids = [numbers.randrange(3, 512) for _ in range(130)]
    plain, tokens = await asked(engine, "plain", ids, None)
    assert plain == {}
    for attempt in range(2):  # the second time all of the prompt is in the prefix cache
        scores, again = await asked(engine, f"scored-{attempt}", ids, NUM_TOP)
        assert again == tokens
        assert sorted(scores) == list(range(1, len(ids)))
        for position, row in enumerate(expected(model, ids), 1):
            at = scores[position]
            assert at.logprob == pytest.approx(row[ids[position]].item(), abs=1e-4)
            top = row.topk(NUM_TOP)
            assert [i for i, _ in at.top] == top.indices.tolist()
            assert [logprob for _, logprob in at.top] == pytest.approx(top.values.tolist(), abs=1e-4)


async def test_a_prompt_of_one_token_has_none(engine: Engine) -> None:
    scores, tokens = await asked(engine, "one", [5], NUM_TOP)

    assert scores == {}
    assert len(tokens) == 4


async def test_load_and_preemption_change_nothing(engine: Engine) -> None:
    numbers = random.Random(4)
    prompts = [[numbers.randrange(3, 512) for _ in range(numbers.randrange(2, 90))] for _ in range(10)]
    alone = [await asked(engine, f"alone-{i}", ids, NUM_TOP, 40) for i, ids in enumerate(prompts)]
    preempted: list[str] = []
    together = await asyncio.gather(
        *(asked(engine, f"together-{i}", ids, NUM_TOP, 40, preempted) for i, ids in enumerate(prompts))
    )

    assert together == alone
    assert preempted
