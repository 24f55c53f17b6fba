"""Norms, rotary embedding and activation, in as few torch calls as possible.

A decode step is some six hundred small calls whose cost is the call, not the arithmetic.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q [N, Hq, D] and k [N, Hkv, D]; computed in float32 whatever their dtype."""
    num_heads, head_dim = q.shape[1:]
    half = head_dim // 2
    cos, sin = cos_sin.index_select(0, positions).view(-1, 1, 2, half).unbind(2)  # each [N, 1, D/2]
    x = torch.cat((q, k), dim=1).float().view(q.shape[0], -1, 2, half)
    first, second = x.unbind(2)
    out = x * cos.unsqueeze(2)
    out_first, out_second = out.unbind(2)
    out_first.addcmul_(second, sin, value=-1)
    out_second.addcmul_(first, sin)
    out = out.view(q.shape[0], -1, head_dim).to(q.dtype)
    return out[:, :num_heads], out[:, num_heads:]


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [N, 2I] = gate | up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
