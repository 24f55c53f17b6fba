"""Every operation in its most obvious form, for tests: float64 inside, one row at a time."""

import math

import torch
from torch import Tensor

from .rows import Rows


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.double() @ weight.double().T
    return (y if bias is None else y + bias.double()).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.double()
    return (y / torch.sqrt((y * y).mean(-1, keepdim=True) + eps) * weight.double()).to(x.dtype)


def rope(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate x [N, H, D] pair by pair as complex numbers: (x[i], x[i + D/2]) times exp(i * angle)."""
    half = x.shape[-1] // 2
    rotated = x.double().clone()
    for row, position in enumerate(positions.tolist()):
        cos, sin = cos_sin[position, :half].double(), cos_sin[position, half:].double()
        first, second = x[row, :, :half].double(), x[row, :, half:].double()
        rotated[row, :, :half] = first * cos - second * sin
        rotated[row, :, half:] = second * cos + first * sin
    return rotated.to(x.dtype)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)


def write_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    page_size = k_pages.shape[1]
    for row, slot in enumerate(slots.tolist()):
        k_pages[slot // page_size, slot % page_size] = k[row]
        v_pages[slot // page_size, slot % page_size] = v[row]


def attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, rows: Rows, *, causal: bool = True, window: int | None = None
) -> Tensor:
    """Attention of q [N, Hq, D], one row and one head at a time."""
    page_size, num_kv_heads, head_dim = k_pages.shape[1:]
    group = q.shape[1] // num_kv_heads
    out = torch.empty_like(q)
    row = 0
    for chunk, (query_len, context_len) in enumerate(zip(rows.query_lens, rows.context_lens, strict=True)):
        hidden_len = 0 if rows.hidden_lens is None else rows.hidden_lens[chunk]
        table = rows.page_tables[chunk].tolist()
        for query in range(context_len - query_len, context_len):
            keys = [key for key in range(hidden_len, context_len) if _is_visible(query, key, causal, window)]
            pages = [table[key // page_size] for key in keys]
            offsets = [key % page_size for key in keys]
            for head in range(q.shape[1]):
                k = k_pages[pages, offsets, head // group].double()
                v = v_pages[pages, offsets, head // group].double()
                weights = torch.softmax(k @ q[row, head].double() / math.sqrt(head_dim), dim=0)
                out[row, head] = (weights @ v).to(q.dtype)
            row += 1
    return out


def _is_visible(query: int, key: int, causal: bool, window: int | None) -> bool:
    if causal and key > query:
        return False
    return window is None or abs(query - key) < window
