"""The keyed noise: fixed values, bounds, distribution, and independence of whatever differs in its key."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from paceline.kernels import noise

NUM_DRAWS = 200_000
MASK = 0xFFFFFFFF


def scalar_bits(seed: int, position: int, token_id: int) -> int:
    """The hash of one token in plain integers: what another device's kernel has to reproduce."""

    def step(x: int, shift: int, factor: int) -> int:
        return (x ^ (x >> shift)) * factor & MASK

    def tail(x: int) -> int:
        x = step(step(x, 11, 0xAC4C1B51), 15, 0x31848BAB)
        return x ^ (x >> 14)

    def mix(x: int) -> int:
        return tail(step(x & MASK, 17, 0xED5AD4BB))

    low, high = seed & MASK, seed >> 32
    k0 = mix(mix(mix(low + 0x243F6A88) ^ high) ^ position)
    k1 = mix(mix(mix(position + 0x85A308D3) ^ low) ^ high)
    first = step((token_id * 0x9E3779B9 + k0) & MASK, 17, 0xED5AD4BB)
    return max(tail((first + k1) & MASK) >> 8, 1)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63, 2**64 - 1, 0x0123456789ABCDEF])
def test_bits_are_those_of_the_integer_formula(seed: int) -> None:
    positions, token_ids = [0, 1, 2, 131_071, 2**31 - 1], [0, 1, 49_151, 262_143]
    k0, k1 = noise.row_keys(noise.pack_seeds([seed] * len(positions)), torch.tensor(positions))
    bits = noise.uniform_bits(k0.unsqueeze(1), k1.unsqueeze(1), torch.tensor(token_ids))
    assert bits.tolist() == [[scalar_bits(seed, p, t) for t in token_ids] for p in positions]


def test_noise_does_not_change_between_releases() -> None:
    """A resumed stream meets the same noise after an upgrade, so these values may never change."""
    bits = [scalar_bits(7, position, 11) for position in range(3)]
    assert bits == [16743939, 2789615, 16389741]


def test_noise_is_bounded_and_the_same_wherever_an_element_lies() -> None:
    extremes = noise.from_bits(torch.tensor([1, 2**24 - 1], dtype=torch.int32))
    assert extremes.tolist() == pytest.approx([noise.MIN_NOISE, noise.MAX_NOISE], abs=1e-6)
    bits = torch.arange(1, 5000, dtype=torch.int32) * 3331
    whole = noise.from_bits(bits)
    for start in range(40):
        assert torch.equal(noise.from_bits(bits[start : start + 37]), whole[start : start + 37])


def test_noise_is_standard_gumbel() -> None:
    drawn = noise.gumbel(noise.pack_seeds([3]), torch.tensor([5]), torch.arange(NUM_DRAWS)).view(-1)
    assert stats.kstest(drawn.numpy(), "gumbel_r")[1] > 1e-3


def bucket(bits: Tensor) -> np.ndarray:
    return (bits.view(-1) >> 20).numpy()  # 16 buckets


def independence(first: np.ndarray, second: np.ndarray) -> float:
    """The p-value of a chi-square test of independence of two paired series of small integers."""
    table = np.zeros((first.max() + 1, second.max() + 1))
    np.add.at(table, (first, second), 1)
    table = table[table.sum(axis=1) > 0][:, table.sum(axis=0) > 0]
    return float(stats.chi2_contingency(table)[1])  # pyright: ignore[reportArgumentType]


def bits_of(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> np.ndarray:
    return bucket(noise.uniform_bits(*noise.row_keys(seeds, positions), token_ids))


SERIES = torch.arange(NUM_DRAWS)
ZERO = torch.zeros_like(SERIES)
PAIRS = {
    "next position": (lambda: bits_of(ZERO, SERIES, ZERO), lambda: bits_of(ZERO, SERIES + 1, ZERO)),
    "next position, over seeds": (
        lambda: bits_of(SERIES, ZERO, ZERO),
        lambda: bits_of(SERIES, ZERO + 1, ZERO),
    ),
    "next seed": (lambda: bits_of(SERIES, ZERO, ZERO), lambda: bits_of(SERIES + 1, ZERO, ZERO)),
    "high word of the seed": (
        lambda: bits_of(SERIES, ZERO, ZERO),
        lambda: bits_of(SERIES + (1 << 32), ZERO, ZERO),
    ),
    "next token": (lambda: bits_of(ZERO, ZERO, SERIES), lambda: bits_of(ZERO, ZERO, SERIES + 1)),
    "seed and position exchanged": (
        lambda: bits_of(SERIES, ZERO + 1, ZERO),
        lambda: bits_of(ZERO + 1, SERIES, ZERO),
    ),
    "token and position exchanged": (
        lambda: bits_of(ZERO, SERIES, ZERO + 1),
        lambda: bits_of(ZERO, ZERO + 1, SERIES),
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_different_keys_give_independent_noise(pair: str) -> None:
    first, second = PAIRS[pair]
    assert independence(first(), second()) > 1e-4


def test_the_independence_check_sees_a_shared_key() -> None:
    """Positive control: the same noise at two positions, and noise that leaks 5 percent, are both found."""
    first = bits_of(ZERO, SERIES, ZERO)
    assert independence(first, first) < 1e-12
    leaky = np.where(SERIES.numpy() % 20 == 0, first, bits_of(ZERO, SERIES + 1, ZERO))
    assert independence(first, leaky) < 1e-12
