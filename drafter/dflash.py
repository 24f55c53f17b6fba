"""The DFlash network: context K/V from the target's tap rows, and a block of drafts in one forward.

    c        = hidden_norm(fc(taps))              one row per context token, shared by all layers
    K, V     = k_proj(c), v_proj(c)               of every layer in one product: no layer changes c
    block    = [anchor, mask, .. mask]            embedded by the target; row j fills position anchor + j
    layers   = Qwen3 decoder layers over the block, attending to context and block
    logits   = head(norm(block)) * output_multiplier, soft-capped

Source: DFlash (arXiv 2602.06036) and its reference implementation. K/V of context and block share the pages.
Shapes: R context rows, N rows of n blocks of B, H hidden, L layers, D head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.backend import AttentionPlan, Backend, Linear
from ..kernels.rope import cos_sin_table
from ..kernels.rows import Rows
from .dflash2 import BlockConv, Selector, load_conv, load_selector
from .spec import DrafterSpec
from .target import Target


@dataclass(frozen=True, slots=True)
class Layer:
    """The operations of one decoder layer on block rows; convolutions in DFlash 2 only."""

    window: int | None
    is_causal: bool
    input_norm: Tensor
    qkv: Linear
    qk_norms: tuple[Tensor, Tensor]
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    attention_conv: BlockConv | None
    mlp_conv: BlockConv | None


class DFlash:
    """Weights and forwards of one drafter, and the memory of its K/V pages. Knows no sequence."""

    def __init__(
        self,
        spec: DrafterSpec,
        target: Target,
        weights: dict[str, Tensor],
        backend: Backend,
        *,
        num_pages: int,
        page_size: int,
    ) -> None:
        """`weights` as `load_weights` gives them; emptied, so that packed weights have no copy."""
        self.spec = spec
        self._backend = backend
        self._page_size = page_size
        self._num_pages = num_pages
        fc = weights.pop("fc.weight")
        self.dtype, self.device = fc.dtype, fc.device
        max_len = target.max_model_len + spec.block_size
        self._cos_sin = cos_sin_table(spec.rope, spec.head_dim, max_len, self.device)
        self._fc = backend.linear(fc, None)
        self._hidden_norm = weights.pop("hidden_norm.weight")
        self._final_norm = weights.pop("norm.weight")
        embedding = weights.pop("embed_tokens.weight", target.embedding)
        self._embedding = embedding.to(self.device, self.dtype)
        head = weights.pop("lm_head.weight", target.embedding if target.head is None else target.head)
        self._head = backend.linear(head.to(self.device, self.dtype), None)
        self._token_ids: Tensor | None = None  # of the rows of a head that is not over the whole vocabulary
        if (offsets := weights.pop("d2t", None)) is not None:
            self._token_ids = torch.arange(spec.vocab_size, device=self.device) + offsets
        self._vocab_size = target.vocab_size
        self._context_kv, self._context_norms = self._stack_context(weights)
        self.selector: Selector | None = None
        if spec.generation == 2:
            self.selector = load_selector(weights, spec.selector_top_k, backend)
        self._layers = [self._load_layer(weights, index) for index in range(spec.num_layers)]
        assert not weights, f"not used: {sorted(weights)}"
        # Zeros: padding in page tables points at page 0, and 0 * NaN would not vanish.
        shape = (spec.num_layers * num_pages, page_size, spec.num_kv_heads, spec.head_dim)
        self._k_memory = torch.zeros(shape, dtype=self.dtype, device=self.device)  # layer after layer
        self._v_memory = torch.zeros_like(self._k_memory)

    def k_pages(self, layer: int) -> Tensor:
        """[pages, page, kv heads, D] of one layer."""
        return self._k_memory.view(self.spec.num_layers, self._num_pages, *self._k_memory.shape[1:])[layer]

    def v_pages(self, layer: int) -> Tensor:
        return self._v_memory.view(self.spec.num_layers, self._num_pages, *self._v_memory.shape[1:])[layer]

    @torch.inference_mode()
    def write_context(self, taps: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Project tap rows [R, taps, H] at positions [R] and write all layers' K and V to slots [R]."""
        spec = self.spec
        context = self._fc(taps.flatten(1).to(self.device, self.dtype))
        context = self._backend.rms_norm(context, self._hidden_norm, spec.rms_norm_eps)
        shape = (len(taps), spec.num_layers, 2, spec.num_kv_heads, spec.head_dim)
        k, v = self._context_kv(context).view(shape).unbind(2)  # each [R, L, kv heads, D]
        k = self._backend.rms_norm(k, self._k_norm_one, spec.rms_norm_eps) * self._context_norms
        k = k.flatten(1, 2)  # the layers' heads side by side: one rotation for all
        k, _ = self._backend.rope(k, k[:, :0], positions, self._cos_sin)
        k = k.unflatten(1, (spec.num_layers, spec.num_kv_heads))
        first_slots = torch.arange(spec.num_layers, device=self.device) * self._num_pages * self._page_size
        self._backend.write_kv(
            k.transpose(0, 1).flatten(0, 1),
            v.transpose(0, 1).flatten(0, 1),
            self._k_memory,
            self._v_memory,
            (first_slots[:, None] + slots).view(-1),
        )

    @torch.inference_mode()
    def forward(self, anchors: Tensor, rows: Rows) -> Tensor:
        """Run a block of B = N / n rows behind each of n contexts; anchors are token ids [n].

        The blocks' K/V is written to rows.slots. Returns normed states of the rows to draft [n, B - 1, H].
        """
        spec, num_blocks = self.spec, len(anchors)
        block_len = len(rows.positions) // num_blocks
        token_ids = anchors.new_full((num_blocks, block_len), spec.mask_token_id)
        token_ids[:, 0] = anchors
        plans = self._plan(rows)
        residual = self._embedding[token_ids.view(-1)] * spec.input_embedding_scale  # [N, H]
        hidden = self._backend.rms_norm(residual, self._layers[0].input_norm, spec.rms_norm_eps)
        for index, layer in enumerate(self._layers):
            if index > 0:
                hidden, residual = self._add_norm(hidden, residual, layer.input_norm)
            hidden = self._attention(index, hidden, rows, plans[layer.is_causal, layer.window], block_len)
            hidden, residual = self._add_norm(hidden, residual, layer.post_norm)
            hidden = self._mlp(layer, hidden, block_len)
        hidden = (hidden + residual).view(num_blocks, block_len, -1)[:, 1:]
        return self._backend.rms_norm(hidden.contiguous(), self._final_norm, spec.rms_norm_eps)

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """[R, H] -> [R, vocab] float32 over the target's vocabulary; -inf for what is never drafted."""
        logits = self._head(states).float() * self.spec.output_multiplier
        cap = self.spec.final_logit_softcapping
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        if self._token_ids is None:
            return logits
        whole = logits.new_full((len(logits), self._vocab_size), float("-inf"))
        return whole.index_copy_(1, self._token_ids, logits)

    def _plan(self, rows: Rows) -> dict[tuple[bool, int | None], AttentionPlan]:
        spec = self.spec
        return {
            (is_causal, window): self._backend.plan_attention(
                rows,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                page_size=self._page_size,
                causal=is_causal,
                window=window,
            )
            for is_causal, window in set(zip(spec.causal, spec.windows, strict=True))
        }

    def _add_norm(self, hidden: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self._backend.add_rms_norm(hidden, residual, weight, self.spec.rms_norm_eps)

    def _attention(self, index: int, x: Tensor, rows: Rows, plan: AttentionPlan, block_len: int) -> Tensor:
        """[N, H] -> [N, H]."""
        layer, spec, deltas = self._layers[index], self.spec, None
        if layer.attention_conv is not None:
            x, deltas = layer.attention_conv.before(x, block_len)
        k_pages, v_pages = self.k_pages(index), self.v_pages(index)
        q = self._backend.place_qkv(
            layer.qkv(x), rows, self._cos_sin, k_pages, v_pages, layer.qk_norms, spec.rms_norm_eps
        )
        out = layer.output(plan.run(q, k_pages, v_pages).flatten(1))
        if layer.attention_conv is not None and deltas is not None:
            return layer.attention_conv.after(out, deltas, block_len)
        return out

    def _mlp(self, layer: Layer, x: Tensor, block_len: int) -> Tensor:
        """[N, H] -> [N, H]."""
        if layer.mlp_conv is None:
            return layer.down(self._backend.silu_and_mul(layer.gate_up(x)))
        x, deltas = layer.mlp_conv.before(x, block_len)
        out = layer.down(self._backend.silu_and_mul(layer.gate_up(x)))
        return layer.mlp_conv.after(out, deltas, block_len)

    def _stack_context(self, weights: dict[str, Tensor]) -> tuple[Linear, Tensor]:
        """All layers' k_proj and v_proj as one linear, and their k_norms [L, 1, D]; `weights` keeps them."""
        prefixes = [f"layers.{layer}.self_attn" for layer in range(self.spec.num_layers)]
        names = [f"{prefix}.{part}" for prefix in prefixes for part in ("k_proj", "v_proj")]
        weight = torch.cat([weights[f"{name}.weight"] for name in names])
        bias = torch.cat([weights[f"{name}.bias"] for name in names]) if self.spec.has_bias else None
        norms = torch.stack([weights[f"{prefix}.k_norm.weight"] for prefix in prefixes])
        self._k_norm_one = torch.ones_like(norms[0])
        return self._backend.linear(weight, bias), norms.unsqueeze(1)

    def _load_layer(self, weights: dict[str, Tensor], index: int) -> Layer:
        prefix, spec, backend = f"layers.{index}", self.spec, self._backend
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"

        def linear(*names: str, has_bias: bool = False) -> Linear:
            weight = torch.cat([weights.pop(f"{name}.weight") for name in names])
            bias = torch.cat([weights.pop(f"{name}.bias") for name in names]) if has_bias else None
            return backend.linear(weight, bias)

        def conv(name: str) -> BlockConv | None:
            if spec.generation == 1:
                return None
            return load_conv(weights, f"{prefix}.{name}", spec.conv_group_size, backend)

        projections = [f"{attention}.{part}" for part in ("q_proj", "k_proj", "v_proj")]
        return Layer(
            window=spec.windows[index],
            is_causal=spec.causal[index],
            input_norm=weights.pop(f"{prefix}.input_layernorm.weight"),
            qkv=linear(*projections, has_bias=spec.has_bias),
            qk_norms=(
                weights.pop(f"{attention}.q_norm.weight"),
                weights.pop(f"{attention}.k_norm.weight"),
            ),
            output=linear(f"{attention}.o_proj", has_bias=spec.has_bias),
            post_norm=weights.pop(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            down=linear(f"{mlp}.down_proj"),
            attention_conv=conv("attention_conv"),
            mlp_conv=conv("mlp_conv"),
        )


def page_bytes(spec: DrafterSpec, page_size: int, dtype: torch.dtype) -> int:
    """Memory of one page, K and V of all layers."""
    return 2 * spec.num_layers * page_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize
