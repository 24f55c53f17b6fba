"""Keyed Gumbel noise: a pure function of (seed, position, token id), whatever the device and the batch.

The hash is counter based, in 32-bit lanes, from xorshift and multiplication only, so that a GPU kernel can
reproduce it bit for bit. Constants and structure of the mixer: `triple32` from Chris Wellons' hash-prospector
(public domain), a bijection of 32 bits whose avalanche bias is 0.02 %.

    k0, k1 = a 64-bit key of (seed, position)
    x      = triple32(id * GOLDEN + k0), with k1 added after its first round
    u      = max(x >> 8, 1) / 2**24          in {1 .. 2**24 - 1} / 2**24
    noise  = -log(-log(u))                   in [MIN_NOISE, MAX_NOISE]

Two keys give two different orders of ids, not two offsets in one stream, because k1 enters between rounds.
The logarithms are taken in float64 and rounded once to float32: vectorised and scalar float32 logarithms
differ in the last bit, and which one an element meets depends on its place in memory.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MIN_NOISE = -math.log(-math.log(2.0**-24))  # -2.811
MAX_NOISE = -math.log(-math.log(1.0 - 2.0**-24))  # 16.636

_GOLDEN = 0x9E3779B9


def pack_seeds(seeds: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Seeds 0 .. 2**64 - 1 as the int64 tensor [R] with the same bits."""
    return torch.tensor([seed - (seed >> 63 << 64) for seed in seeds], dtype=torch.int64, device=device)


def row_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The keys (k0, k1) of rows, int32 [R] each; seeds as made by `pack_seeds`, positions below 2**31."""
    low, high = _low32(seeds), _low32(seeds >> 32)
    place = _low32(positions)
    k0 = _triple32(_triple32(_triple32(low + _signed(0x243F6A88)) ^ high) ^ place)
    k1 = _triple32(_triple32(_triple32(place + _signed(0x85A308D3)) ^ low) ^ high)
    return k0, k1


def uniform_bits(k0: Tensor, k1: Tensor, token_ids: Tensor) -> Tensor:
    """k in 1 .. 2**24 - 1 (int32) of k / 2**24, for keys and ids of shapes that broadcast."""
    x = token_ids.to(torch.int32) * _signed(_GOLDEN) + k0
    x = _round(x, 17, 0xED5AD4BB)
    x += k1
    x = _finish(_round(_round(x, 11, 0xAC4C1B51), 15, 0x31848BAB))
    return _shift_right(x, 8).clamp_(min=1)


def from_bits(bits: Tensor) -> Tensor:
    """The float32 noise of uniform bits."""
    return bits.double().mul_(2.0**-24).log_().neg_().log_().neg_().float()


def gumbel(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Noise float32 [R, C] for seeds [R], positions [R] and token ids [C] (shared) or [R, C].

    `position` is the absolute position of the token that is being decided.
    """
    k0, k1 = row_keys(seeds, positions)
    return from_bits(uniform_bits(k0.unsqueeze(1), k1.unsqueeze(1), token_ids))


def _triple32(x: Tensor) -> Tensor:
    return _finish(_round(_round(_round(x, 17, 0xED5AD4BB), 11, 0xAC4C1B51), 15, 0x31848BAB))


def _round(x: Tensor, shift: int, factor: int) -> Tensor:
    return _shift_right(x, shift).bitwise_xor_(x).mul_(_signed(factor))


def _finish(x: Tensor) -> Tensor:
    return _shift_right(x, 14).bitwise_xor_(x)


def _shift_right(x: Tensor, shift: int) -> Tensor:
    """A logical shift of int32 lanes; torch's own is arithmetic."""
    return (x >> shift).bitwise_and_((1 << (32 - shift)) - 1)


def _low32(x: Tensor) -> Tensor:
    """The low 32 bits of int64 lanes as int32."""
    low = x & 0xFFFFFFFF
    return (low - (low >> 31 << 32)).to(torch.int32)


def _signed(constant: int) -> int:
    """A 32-bit constant as the int32 with the same bits."""
    return constant - (constant >> 31 << 32)
