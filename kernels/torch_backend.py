"""The back end in plain torch: tuned on CPU, correct on any device."""

import torch
from torch import Tensor

from . import elementwise
from .attention import AttentionGroups, GatherScratch
from .linear import PackedLinear, PlainLinear, prepare_linear
from .rows import Rows


class TorchBackend:
    """Implements `backend.Backend`; see there for shapes and meaning."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._scratch = GatherScratch()

    def linear(self, weight: Tensor, bias: Tensor | None) -> PlainLinear | PackedLinear:
        return prepare_linear(weight, bias)

    def page_dtype(self, configured: torch.dtype, computed: torch.dtype) -> torch.dtype:
        del configured  # attention takes queries, keys and values of one dtype
        return computed

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return elementwise.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual = residual.add_(x)
        return elementwise.rms_norm(residual, weight, eps), residual

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        return elementwise.rope(q, k, positions, cos_sin)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return elementwise.silu_and_mul(gate_up)

    def write_kv(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
        shape = k.shape[1:]
        k_pages.view(-1, *shape).index_copy_(0, slots, k)
        v_pages.view(-1, *shape).index_copy_(0, slots, v)

    def place_qkv(
        self,
        qkv: Tensor,
        rows: Rows,
        cos_sin: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        norms: tuple[Tensor, Tensor] | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        num_kv_heads, head_dim = k_pages.shape[2:]
        heads = qkv.unflatten(1, (-1, head_dim))
        q, k, v = heads.split([heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
        if norms is not None:
            q, k = self.rms_norm(q, norms[0], eps), self.rms_norm(k, norms[1], eps)
        q, k = self.rope(q, k, rows.positions, cos_sin)
        self.write_kv(k, v, k_pages, v_pages, rows.slots)
        return q

    def plan_attention(
        self,
        rows: Rows,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = True,
        window: int | None = None,
    ) -> AttentionGroups:
        return AttentionGroups(
            rows,
            self._scratch,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            causal=causal,
            window=window,
        )
