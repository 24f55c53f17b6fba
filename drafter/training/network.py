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
        self, x: Tensor, num_asking: int, context: Tensor, mask: Tensor, at: Tensor, context_at: Tensor
    ) -> Tensor:
        """x [n, A, B, H], of whose blocks the last rows ask, context [n, S, H] -> [n, A, num_asking, H].

        mask [n, 1, A * num_asking, S + Q]; `at` [n, 1, A, B, D] and `context_at` [S, D] as of `rotate`.
        """
        asking = slice(x.shape[2] - num_asking, None)
        q = rotate(
            self.q_norm(self._split(self.q_proj(x[:, :, asking]), self._heads)),
            at[:, :, :, asking].flatten(2, 3),
        )
        parts = [(context, context_at), (x, at.flatten(2, 3))]
        k = torch.cat(
            [rotate(self.k_norm(self._split(self.k_proj(part), self._kv_heads)), to) for part, to in parts], 2
        )
        v = torch.cat([self._split(self.v_proj(part), self._kv_heads) for part, _ in parts], 2)
        repeat = self._heads // self._kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        out = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(2).unflatten(1, (-1, num_asking)))

    def _split(self, x: Tensor, heads: int) -> Tensor:
        rows = x.flatten(1, -2)
        return rows.unflatten(-1, (heads, self._dim)).transpose(1, 2)  # [n, heads, rows, D]


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

    def forward(
        self, x: Tensor, num_asking: int, context: Tensor, mask: Tensor, at: Tensor, context_at: Tensor
    ) -> Tensor:
        """x [n, A, B, H] -> [n, A, num_asking, H]: of every block the last rows."""
        answer = self.self_attn(self.input_layernorm(x), num_asking, context, mask, at, context_at)
        x = x[:, :, x.shape[2] - num_asking :] + answer
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
        shape = (-1, blocks.block_len)
        at = self.cos_sin[blocks.positions.unflatten(1, shape)].unsqueeze(1)  # [n, 1, A, B, D]
        x = F.embedding(blocks.token_ids(spec.mask_token_id).unflatten(1, shape), embedding)
        x = x * spec.input_embedding_scale
        mask = blocks.mask(taps.shape[1])
        *layers, last = self.layers
        for layer in layers:
            x = layer(x, blocks.block_len, context, mask, at, context_at)
        # Nobody reads the last layer's output at the anchors.
        num_drafts = blocks.block_len - 1
        drafting = mask.unflatten(2, shape)[:, :, :, -num_drafts:].flatten(2, 3)
        x = last(x, num_drafts, context, drafting, at, context_at)
        return self.norm(x)

    def logits(self, states: Tensor, head: Tensor) -> Tensor:
        """[R, H] over a head [V, H], float32: the whole of the target's, or the rows that are trained on."""
        return self.scaled(F.linear(states, head).float())

    def scaled(self, logits: Tensor) -> Tensor:
        """Raw products, as the target scales and caps its logits."""
        if self.spec.output_multiplier != 1:  # a pass over the largest tensor of a step
            logits = logits * self.spec.output_multiplier
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
