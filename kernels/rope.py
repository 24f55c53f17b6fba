"""The rotary table: cos and sin for every position, computed once at start.

Formulas: RoFormer (arXiv 2104.09864); linear: position interpolation (arXiv 2306.15595); llama3: the
frequency bands of the Llama 3.1 release; yarn: arXiv 2309.00071, sections 3.2 (bands) and 3.4 (the factor).
"""

import math

import torch
from torch import Tensor

from ..cluster.rope_spec import RopeSpec


def cos_sin_table(rope: RopeSpec, head_dim: int, max_len: int, device: torch.device) -> Tensor:
    """[max_len, head_dim] float32: cos of the head_dim/2 angles, then their sin."""
    frequencies = _frequencies(rope, head_dim)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies[None, :]
    return (torch.cat([angles.cos(), angles.sin()], dim=-1) * _attention_factor(rope)).to(device)


def _frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """[head_dim/2] float32, radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    match rope.kind:
        case "default":
            return frequencies
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            return _llama3(rope, frequencies)
        case "yarn":
            return _yarn(rope, frequencies, head_dim)


def _llama3(rope: RopeSpec, frequencies: Tensor) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between are blended."""
    turns = rope.original_max_len * frequencies / (2 * math.pi)  # within the original length
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies / rope.factor * (1 - kept) + frequencies * kept


def _yarn(rope: RopeSpec, frequencies: Tensor, head_dim: int) -> Tensor:
    """Dimensions that turn more than beta_fast times are kept, fewer than beta_slow stretched."""

    def dimension(num_turns: float) -> float:
        length_per_turn = rope.original_max_len / (num_turns * 2 * math.pi)
        return head_dim * math.log(length_per_turn) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, head_dim - 1.0)
    if low == high:
        high += 0.001
    stretched = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    stretched = stretched.clamp(0.0, 1.0)
    return frequencies / rope.factor * stretched + frequencies * (1 - stretched)


def _attention_factor(rope: RopeSpec) -> float:
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
