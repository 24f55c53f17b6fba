"""The decoder: one definition for Llama, Mistral, Qwen2 and Qwen3, driven by the spec.

Shapes: N rows of the flat batch, H hidden, D head dimension; heads and channels are this rank's part.
Between blocks the residual stream is kept beside the output that is still to be added to it, so that every
addition is fused with the norm that follows.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..cluster.checkpoint import Checkpoint
from ..kernels.backend import AttentionPlan, Backend
from ..kernels.rope import cos_sin_table
from ..kernels.rows import Rows
from .collectives import Collectives
from .kv_cache import KvCache
from .layers import Embedding, Linear, Loader, Partition, expected_shapes
from .taps import TapScratch


@dataclass(frozen=True, slots=True)
class Layer:
    """The operations of one block."""

    window: int | None
    input_norm: Tensor
    qkv: Linear
    qk_norms: tuple[Tensor, Tensor] | None
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """One rank of the model: weights and forward. Holds no state of any sequence."""

    def __init__(
        self,
        model_path: Path,
        partition: Partition,
        backend: Backend,
        collectives: Collectives,
        *,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.spec = partition.spec
        self.partition = partition
        self._backend = backend
        self._collectives = collectives
        self._cos_sin = cos_sin_table(self.spec.rope, self.spec.head_dim, max_len, device)
        with Checkpoint(model_path) as checkpoint:
            ignored = (
                ("rotary_emb.inv_freq", "lm_head.weight") if self.spec.is_tied else ("rotary_emb.inv_freq",)
            )
            checkpoint.check(expected_shapes(self.spec), ignored=ignored)
            loader = Loader(checkpoint, partition, backend, dtype, device)
            embedding = loader.vocabulary("model.embed_tokens.weight")
            head = embedding if self.spec.is_tied else loader.vocabulary("lm_head.weight")
            self._embedding = Embedding(embedding, partition, collectives)
            self._head = backend.linear(head, None)
            self._layers = [self._load_layer(loader, index) for index in range(self.spec.num_layers)]
            self._final_norm = loader.vector("model.norm.weight")

    def _load_layer(self, loader: Loader, index: int) -> Layer:
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return Layer(
            window=self.spec.windows[index],
            input_norm=loader.vector(f"{prefix}.input_layernorm.weight"),
            qkv=loader.qkv(attention),
            qk_norms=(
                (loader.vector(f"{attention}.q_norm.weight"), loader.vector(f"{attention}.k_norm.weight"))
                if self.spec.has_qk_norm
                else None
            ),
            output=loader.output(attention),
            post_norm=loader.vector(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=loader.gate_up(mlp),
            down=loader.down(mlp),
        )

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        rows: Rows,
        kv_cache: KvCache,
        taps: TapScratch | None,
        decided: Tensor | None,
    ) -> Tensor:
        """Run all rows, write their K/V and tap rows, return the normed states of the rows that decide.

        `token_ids` is [N]; `decided` holds row indices [R], or None for all rows. Returns [R, H].
        """
        backend, eps, reduce = self._backend, self.spec.rms_norm_eps, self._collectives.all_reduce
        plans = {
            window: backend.plan_attention(
                rows,
                num_heads=self.partition.num_heads,
                num_kv_heads=self.partition.num_kv_heads,
                head_dim=self.spec.head_dim,
                page_size=kv_cache.page_size,
                window=window,
            )
            for window in set(self.spec.windows)
        }
        residual = self._embedding(token_ids)  # [N, H]
        hidden = backend.rms_norm(residual, self._layers[0].input_norm, eps)
        for index, layer in enumerate(self._layers):
            if index > 0:
                hidden, residual = backend.add_rms_norm(hidden, residual, layer.input_norm, eps)
                if taps is not None:
                    taps.write(index - 1, residual)
            attended = self._attend(index, hidden, rows, plans[layer.window], kv_cache)
            hidden = reduce(layer.output(attended))
            hidden, residual = backend.add_rms_norm(hidden, residual, layer.post_norm, eps)
            hidden = reduce(layer.down(backend.silu_and_mul(layer.gate_up(hidden))))
        last = self.spec.num_layers - 1
        if taps is not None and taps.has(last):
            taps.write(last, hidden + residual)
        if decided is not None:
            hidden, residual = hidden[decided], residual[decided]
        return backend.add_rms_norm(hidden, residual, self._final_norm, eps)[0]

    def _attend(
        self, index: int, hidden: Tensor, rows: Rows, plan: AttentionPlan, kv_cache: KvCache
    ) -> Tensor:
        """[N, H] -> [N, heads * D]."""
        layer = self._layers[index]
        k_pages, v_pages = kv_cache.k_pages[index], kv_cache.v_pages[index]
        q = self._backend.place_qkv(
            layer.qkv(hidden),
            rows,
            self._cos_sin,
            k_pages,
            v_pages,
            layer.qk_norms,
            self.spec.rms_norm_eps,
        )
        return plan.run(q, k_pages, v_pages).flatten(1)

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """[R, H] -> [R, num_ids] float32: this rank's part of the vocabulary, from `partition.first_id`."""
        return self._head(states).float()
