"""The drafter as a trainable module: the formulas of `drafter/dflash.py`, over whole sequences at once.

Parameters carry the names of the published checkpoints. Embedding and head are the target's and stay frozen;
they are no part of the module.

Shapes: n sequences of S context rows, A blocks of B rows each (Q = A * B), H hidden, D head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.rope import cos_sin_table
from ..spec import DrafterSpec
from .blocks import Blocks


class Norm(nn.Module):
    """RMS norm over the last axis, accumulated in float32, in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self._eps).to(x.dtype)


class Attention(nn.Module):
    """Block rows ask; context rows and the rows of their own block answer."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        hidden, dim, has_bias = spec.hidden_size, spec.head_dim, spec.has_bias
        self._heads, self._kv_heads, self._dim = spec.num_heads, spec.num_kv_heads, dim
        self.q_proj = nn.Linear(hidden, spec.num_heads * dim, bias=has_bias)
        self.k_proj = nn.Linear(hidden, spec.num_kv_heads * dim, bias=has_bias)
        self.v_proj = nn.Linear(hidden, spec.num_kv_heads * dim, bias=has_bias)
        self.o_proj = nn.Linear(spec.num_heads * dim, hidden, bias=has_bias)
        self.q_norm = Norm(dim, spec.rms_norm_eps)
        self.k_norm = Norm(dim, spec.rms_norm_eps)

    def forward(
        self, x: Tensor, context: Tensor, mask: Tensor, cos_sin: Tensor, context_cos_sin: Tensor
    ) -> Tensor:
        """x [n, Q, H], context [n, S, H], mask [n, 1, Q, S + Q] -> [n, Q, H]; tables as of `rotate`."""
        q = self._split(self.q_proj(x), self._heads)
        q = rotate(self.q_norm(q), cos_sin)
        parts = [(context, context_cos_sin), (x, cos_sin)]
        k = torch.cat(
            [rotate(self.k_norm(self._split(self.k_proj(part), self._kv_heads)), at) for part, at in parts], 2
        )
        v = torch.cat([self._split(self.v_proj(part), self._kv_heads) for part, _ in parts], 2)
        repeat = self._heads // self._kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        out = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self._dim)).transpose(1, 2)  # [n, heads, rows, D]


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A pre-norm decoder layer over block rows; context rows enter its attention as they are."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.input_layernorm = Norm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = Norm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = Mlp(spec)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor, at: Tensor, context_at: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, mask, at, context_at)
        return x + self.mlp(self.post_attention_layernorm(x))


class DrafterNetwork(nn.Module):
    """A DFlash 1 drafter of full attention. `tap_scale` [taps * H] multiplies its inputs; see `folded`."""

    tap_scale: Tensor
    cos_sin: Tensor

    def __init__(self, spec: DrafterSpec, max_len: int) -> None:
        super().__init__()
        assert spec.generation == 1, "DFlash 2 has no training road"
        assert not spec.has_own_vocab, "a drafter serves the target's whole head"
        assert not any((*spec.windows, *spec.causal)), "trained drafters see all of their context"
        self.spec = spec
        num_inputs = len(spec.tap_layer_ids) * spec.hidden_size
        self.fc = nn.Linear(num_inputs, spec.hidden_size, bias=False)
        self.hidden_norm = Norm(spec.hidden_size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(spec) for _ in range(spec.num_layers))
        self.norm = Norm(spec.hidden_size, spec.rms_norm_eps)
        self.register_buffer("tap_scale", torch.ones(num_inputs), persistent=False)
        table = cos_sin_table(spec.rope, spec.head_dim, max_len + spec.block_size, torch.device("cpu"))
        self.register_buffer("cos_sin", table, persistent=False)

    def forward(self, taps: Tensor, blocks: Blocks, embedding: Tensor) -> Tensor:
        """taps [n, S, taps, H] of positions 0 .. S - 1 -> normed states, drafted rows [n, A, B - 1, H]."""
        spec = self.spec
        context = self.hidden_norm(self.fc(taps.flatten(2).float() * self.tap_scale))
        context_at = self.cos_sin[: taps.shape[1]]
        at = self.cos_sin[blocks.positions].unsqueeze(1)  # [n, 1, Q, D]
        x = F.embedding(blocks.token_ids(spec.mask_token_id), embedding) * spec.input_embedding_scale
        mask = blocks.mask(taps.shape[1])
        for layer in self.layers:
            x = layer(x, context, mask, at, context_at)
        rows = x.unflatten(1, (-1, blocks.block_len))[:, :, 1:]
        return self.norm(rows)

    def logits(self, states: Tensor, head: Tensor) -> Tensor:
        """[R, H] over a head [V, H], float32: the whole of the target's, or the rows that are trained on."""
        logits = F.linear(states, head).float() * self.spec.output_multiplier
        cap = self.spec.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def folded(self) -> dict[str, Tensor]:
        """The weights as published: `fc` with the scale of its inputs in it."""
        weights = {name: weight.detach() for name, weight in self.state_dict().items()}
        return weights | {"fc.weight": weights["fc.weight"] * self.tap_scale}

    @torch.no_grad()
    def take(self, weights: dict[str, Tensor]) -> None:
        """Load published weights; the inverse of `folded`."""
        self.load_state_dict(weights | {"fc.weight": weights["fc.weight"].float() / self.tap_scale})


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate x [.., rows, D] by a table [.., rows, D]: cosines of D / 2 angles, then their sines."""
    cos, sin = cos_sin.chunk(2, -1)
    one, two = x.float().chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1).to(x.dtype)
