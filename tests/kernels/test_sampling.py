"""The draw: marginals, exact pruning, shards, ties, independence between positions."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from paceline.cluster.messages import SamplingParams
from paceline.kernels import filters, noise, sampling

NUM_DRAWS = 200_000
CHUNK = 50_000


def spread_logits(num_rows: int, vocab: int, scale: float, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def draw_many(row: Tensor, temperature: float, *, by_seed: bool) -> np.ndarray:
    """NUM_DRAWS ids drawn from one row of logits, each under the next seed or the next position."""
    drawn = []
    for start in range(0, NUM_DRAWS, CHUNK):
        keys = torch.arange(start, start + CHUNK)
        fixed = torch.full_like(keys, 12345)
        seeds, positions = (keys, fixed) if by_seed else (fixed, keys)
        logits = row.expand(CHUNK, -1).contiguous()
        drawn.append(sampling.draw(logits, torch.full((CHUNK,), temperature), seeds, positions)[1])
    return torch.cat(drawn).numpy()


def goodness_of_fit(ids: np.ndarray, probabilities: np.ndarray) -> float:
    """Chi-square p-value; 0 if an impossible id was drawn."""
    counts = np.bincount(ids, minlength=len(probabilities))
    is_possible = probabilities > 0
    if counts[~is_possible].any():
        return 0.0
    expected = probabilities[is_possible] * len(ids)
    assert expected.min() > 5
    return float(stats.chisquare(counts[is_possible], expected)[1])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=1, temperature=0.7),
        SamplingParams(max_tokens=1, temperature=1.0),
        SamplingParams(max_tokens=1, temperature=1.5),
        SamplingParams(max_tokens=1, temperature=1.0, top_k=5),
        SamplingParams(max_tokens=1, temperature=1.5, top_p=0.8),
        SamplingParams(max_tokens=1, temperature=0.7, min_p=0.05),
        SamplingParams(max_tokens=1, temperature=1.2, top_k=12, top_p=0.9, min_p=0.02),
    ],
    ids=lambda p: f"t{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}",
)
def test_marginals_match_the_softmax(params: SamplingParams) -> None:
    row = spread_logits(1, 16, 1.0)
    expected = torch.softmax(row[0].double() / params.temperature, dim=0)
    filters.apply(row, [params])
    expected[row[0].isinf()] = 0
    expected /= expected.sum()
    assert (expected > 0).sum() >= 4
    drawn = draw_many(row, params.temperature, by_seed=params.top_k == 0)
    assert goodness_of_fit(drawn, expected.numpy()) > 1e-4


def test_the_marginal_check_sees_a_wrong_temperature() -> None:
    row = spread_logits(1, 16, 1.0)
    expected = torch.softmax(row[0].double(), dim=0).numpy()
    assert goodness_of_fit(draw_many(row, 1.03, by_seed=True), expected) < 1e-6


def independence(first: np.ndarray, second: np.ndarray) -> float:
    """The p-value of a chi-square test of independence of two paired series of ids."""
    table = np.zeros((6, 6))
    np.add.at(table, (first, second), 1)
    return float(stats.chi2_contingency(table)[1])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("by_seed", [True, False])
def test_draws_at_different_positions_and_seeds_are_independent(by_seed: bool) -> None:
    drawn = draw_many(spread_logits(1, 6, 0.7), 1.0, by_seed=by_seed)
    for distance in (1, 2, 3, 16, 256):
        assert independence(drawn[:-distance], drawn[distance:]) > 1e-4


def test_the_independence_check_sees_noise_shared_by_two_positions() -> None:
    """Positive control: a sampler that keys its noise by position // 2 is found out."""
    keys = torch.arange(NUM_DRAWS // 4)
    logits = spread_logits(1, 6, 0.7).expand(len(keys), -1).contiguous()
    seeds, temperature = torch.zeros_like(keys), torch.ones(len(keys))
    drawn = sampling.draw(logits, temperature, seeds, keys // 2)[1].numpy()
    assert independence(drawn[:-1], drawn[1:]) < 1e-12


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 12.0])
@pytest.mark.parametrize("vocab", [1, 7, 255, 256, 1000, 5000])
def test_pruned_equals_unpruned_bit_for_bit(vocab: int, scale: float) -> None:
    logits = spread_logits(64, vocab, scale, seed=vocab)
    logits[::7, vocab // 2 :] = float("-inf")
    if vocab == 1:
        logits = spread_logits(64, vocab, scale)
    temperature = torch.tensor([0.0, 0.01, 0.3, 0.7, 1.0, 1.5, 3.0, 100.0]).repeat(8)
    seeds, positions = noise.pack_seeds(range(2**64 - 64, 2**64)), torch.arange(64) * 1000
    for pruned, whole in zip(
        sampling.draw(logits, temperature, seeds, positions),
        sampling.draw_all(logits, temperature, seeds, positions),
        strict=True,
    ):
        assert torch.equal(pruned, whole)


@pytest.mark.parametrize("num_shards", [2, 3, 8])
def test_shards_give_the_draw_of_the_whole(num_shards: int) -> None:
    logits = spread_logits(40, 1200, 2.0).round(decimals=1)  # with ties
    logits[3, :900] = float("-inf")
    temperature = torch.tensor([0.0, 0.5, 1.0, 2.0]).repeat(10)
    seeds, positions = noise.pack_seeds([5] * 40), torch.arange(40)
    size = 1200 // num_shards
    draws = [
        sampling.draw(part.contiguous(), temperature, seeds, positions, shard * size)
        for shard, part in enumerate(logits.split(size, dim=1))
    ]
    values, ids = (torch.stack(parts) for parts in zip(*draws, strict=True))
    whole = sampling.draw(logits, temperature, seeds, positions)[1]
    assert torch.equal(sampling.best_of_shards(values, ids), whole)


def test_temperature_zero_is_argmax_and_the_lowest_id_wins_ties() -> None:
    logits = torch.zeros(3, 1000)
    logits[0, [300, 999]] = 5.0
    logits[1, [0, 255, 256]] = 1.0
    logits[2, 998:] = 7.0
    nothing = torch.zeros(3, dtype=torch.int64)
    for temperature in (None, torch.zeros(3)):
        values, ids = sampling.draw(logits, temperature, nothing, nothing, first_id=100)
        assert ids.tolist() == [400, 100, 1098]
        assert values.tolist() == [5.0, 1.0, 7.0]


def test_a_row_without_a_finite_logit_harms_nobody() -> None:
    logits = spread_logits(4, 600, 1.0)
    temperature, seeds, positions = torch.ones(4), noise.pack_seeds([1] * 4), torch.arange(4)
    expected = sampling.draw(logits, temperature, seeds, positions)[1]
    logits[0] = float("nan")
    logits[1] = float("-inf")
    logits[2, 100] = float("inf")
    ids = sampling.draw(logits, temperature, seeds, positions)[1]
    assert ids[3] == expected[3]
    assert ((ids >= 0) & (ids < 600)).all()


def test_top_logprobs() -> None:
    logits = spread_logits(3, 100, 2.0)
    chosen = torch.tensor([4, 50, 99])
    expected = torch.log_softmax(logits.double(), dim=1)
    logprobs, top_ids, top = sampling.top_logprobs(logits, chosen, 5)
    torch.testing.assert_close(logprobs.double(), expected[[0, 1, 2], chosen], atol=1e-5, rtol=0)
    torch.testing.assert_close(top.double(), expected.sort(descending=True).values[:, :5], atol=1e-5, rtol=0)
    assert torch.equal(top_ids, expected.argsort(descending=True)[:, :5])
    assert sampling.top_logprobs(logits, chosen, 0)[1].shape == (3, 0)
