"""Each sampling parameter through a rank, and rows that went wrong."""

import itertools
from pathlib import Path

import pytest
import torch
from drive import Driver, make_config, start_group
from tiny import VOCAB_SIZE, make_checkpoint

from paceline.cluster.messages import Admit, Chunk, SamplingParams
from paceline.kernels.grammar import Grammars
from paceline.workers.collectives import Solo
from paceline.workers.layers import Partition
from paceline.workers.runner import Runner
from paceline.workers.sampler import Sampler
from paceline.workers.sequences import Sequences
from paceline.workers.spec import ModelSpec

PROMPT = [11, 12, 13, 14, 15, 16, 17]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "llama", "llama")


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def driver(path: Path, request: pytest.FixtureRequest) -> Driver:
    return Driver(*start_group(path, make_config(), request.param))


def run(driver: Driver, **options: object) -> list[int]:
    params = SamplingParams(**({"max_tokens": NUM_TOKENS, "seed": 5} | options))  # pyright: ignore[reportArgumentType]
    return driver.generate([PROMPT], params)[0].output


def test_seed_decides(driver: Driver) -> None:
    assert run(driver) == run(driver)
    assert run(driver) != run(driver, seed=6)
    assert run(driver, seed=2**64 - 1) != run(driver, seed=2**63 - 1)


def test_top_k_of_one_and_tiny_top_p_and_full_min_p_are_greedy(driver: Driver) -> None:
    greedy = run(driver, temperature=0)
    assert run(driver, top_k=1) == greedy
    assert run(driver, top_p=1e-9) == greedy
    assert run(driver, min_p=1.0) == greedy
    assert run(driver, temperature=1e-6) == greedy
    assert run(driver, top_k=VOCAB_SIZE, top_p=1.0) == run(driver)


def test_allowed_ids_and_bias_choose_tokens(driver: Driver) -> None:
    assert set(run(driver, allowed_token_ids=[3, 400])) == {3, 400}
    assert set(run(driver, logit_bias={77: 1000.0})) == {77}
    assert 3 not in run(driver, allowed_token_ids=[3, 4, 400], logit_bias={3: -1000.0})


def test_bad_words_are_not_completed(driver: Driver) -> None:
    options = {"allowed_token_ids": [3, 4, 5, 400], "temperature": 50.0}  # nearly uniform
    output = run(driver, bad_words=[[3, 4], [400]], **options)
    assert set(output) == {3, 4, 5}
    assert (3, 4) not in itertools.pairwise(output)
    assert any((3, 4) in itertools.pairwise(run(driver, seed=seed, **options)) for seed in range(4))


def test_stop_tokens_are_masked_until_min_tokens(driver: Driver) -> None:
    options = {"allowed_token_ids": [2, 9], "stop_token_ids": [2]}
    assert 2 in run(driver, **options)[:12]
    output = run(driver, min_tokens=12, **options)
    assert 2 not in output[:12]
    assert 2 in output[12:]


def test_penalties_act_on_what_they_name(driver: Driver) -> None:
    """Overwhelming ones forbid repeats: of output (presence, frequency), of prompt too (repetition)."""
    assert run(driver, temperature=0, logit_bias={77: 500.0}, presence_penalty=600.0).count(77) == 1
    assert run(driver, temperature=0, logit_bias={77: 500.0}, frequency_penalty=251.0).count(77) == 2
    unique = run(driver, temperature=0, repetition_penalty=1e6)
    assert not set(unique[:20]) & set(PROMPT)


def test_logprobs_are_of_the_unprocessed_distribution(path: Path, driver: Driver) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.5, top_k=3, logit_bias={9: 4.0}, logprobs=4, seed=1)
    stream = driver.generate([PROMPT], params)[0]
    runner = Runner(path, make_config())
    Driver(runner).admit(stream.tokens, params)
    logits = runner.logits([Chunk(0, 0, len(stream.tokens), [], [0], len(stream.tokens))])
    expected = logits.log_softmax(-1)[len(PROMPT) - 1 : -1]
    entries = [entry for decision in stream.decisions for entry in decision.logprobs or []]
    assert len(entries) == 6
    for row, token_id, entry in zip(expected, stream.output, entries, strict=True):
        assert entry.logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        assert [token_id for token_id, _ in entry.top] == row.topk(4).indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)


def test_no_alternatives_still_gives_the_chosen_logprob(driver: Driver) -> None:
    stream = driver.generate([PROMPT], SamplingParams(max_tokens=2, logprobs=0))[0]
    for decision in stream.decisions:
        assert decision.logprobs is not None
        assert decision.logprobs[0].top == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_rows_are_flagged_and_harm_no_other(path: Path, bad: float, temperature: float) -> None:
    spec = ModelSpec.load(path)
    sampler = Sampler(Partition(spec, 0, 1), Solo())
    sequences = Sequences(64, 16, Grammars(path, spec.vocab_size, spec.eos_token_ids))
    chunks = [Chunk(0, 0, 2, [], [0], 2), Chunk(1, 0, 3, [], [1], 1), Chunk(2, 0, 1, [], [2], 0)]
    deciders = []
    for chunk in chunks:
        params = SamplingParams(max_tokens=4, temperature=temperature, seed=chunk.sequence_id)
        sequences.admit(Admit(chunk.sequence_id, [5] * chunk.num_rows, 1, params))
        sequence = sequences.extend(chunk)
        deciders += [(sequence, chunk.num_rows - chunk.num_decided + i) for i in range(chunk.num_decided)]
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    clean = sampler.decide(chunks, deciders, logits.clone())
    spoiled = logits.clone()
    spoiled[1, 17] = bad
    first, second = sampler.decide(chunks, deciders, spoiled)
    assert [decision.is_finite for decision in clean] == [True, True]
    assert (first.is_finite, second.is_finite) == (False, True)
    assert second == clean[1]
    assert first.token_ids[0] == clean[0].token_ids[0]
