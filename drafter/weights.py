"""A drafter's tensors under one set of names, checked before anything is built.

Names are those of the published DFlash checkpoints. Other writers' names are translated: a leading `model.`,
`midlayer.`, `encoder.fc`, `encoder.output_norm_enc`, and a fused `qkv_proj`.
"""

from pathlib import Path

import torch
from torch import Tensor

from ..cluster.checkpoint import Checkpoint
from ..cluster.errors import ModelError
from .spec import DrafterSpec
from .target import Target

_RENAMED = (
    ("model.", ""),
    ("midlayer.", "layers.0."),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
)
_CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
_UNUSED = ("rotary_emb.inv_freq", "t2d")  # computed here; t2d follows from d2t


def load_weights(
    path: Path, spec: DrafterSpec, target: Target, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Every tensor of the drafter by name, cast to `dtype`; `d2t` stays int64.

    `embed_tokens.weight` and `lm_head.weight` are present only if the checkpoint brings its own.
    Raises ModelError for files that are absent or damaged, and for tensors that are missing, unexpected, of a
    wrong shape, or not finite.
    """
    if (path / "mask_embedding.pt").exists():
        raise ModelError(f"{path}: a learned mask vector (mask_embedding.pt) is not supported")
    weights: dict[str, Tensor] = {}
    with Checkpoint(path, _rename) as checkpoint:
        required = _as_stored(expected_shapes(spec), checkpoint.names, spec)
        optional = _optional_shapes(spec, target)
        checkpoint.check(required, optional=optional, integers=("d2t",), ignored=_UNUSED)
        for name in sorted(checkpoint.names & (required.keys() | optional.keys())):
            cast = torch.int64 if name == "d2t" else dtype
            weights |= _split(name, checkpoint.tensor(name).to(device, cast), spec)
    _check_values(path, weights, spec, target)
    return weights


def expected_shapes(spec: DrafterSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint must have."""
    hidden, inner, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    q_len, kv_len = spec.num_heads * dim, spec.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(spec.tap_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(spec.num_layers):
        prefix = f"layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_norm.weight": (dim,),
            f"{prefix}.self_attn.k_norm.weight": (dim,),
            f"{prefix}.self_attn.q_proj.weight": (q_len, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv_len, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv_len, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, q_len),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
        if spec.has_bias:
            lengths = {"q_proj": q_len, "k_proj": kv_len, "v_proj": kv_len, "o_proj": hidden}
            for name, length in lengths.items():
                shapes[f"{prefix}.self_attn.{name}.bias"] = (length,)
        if spec.generation == 2:
            num_kernels = 2 * spec.conv_kernel_size * hidden // spec.conv_group_size
            for conv in ("attention_conv", "mlp_conv"):
                shapes[f"{prefix}.{conv}.base_kernel"] = (2, spec.conv_kernel_size, hidden)
                shapes[f"{prefix}.{conv}.kernel_projection.weight"] = (num_kernels, hidden)
    if spec.generation == 2:
        shapes |= dict.fromkeys(_CODEBOOKS, (spec.vocab_size, spec.selector_rank))
        shapes["candidate_selector.hidden_projection.weight"] = (spec.selector_rank, hidden)
    if spec.has_own_vocab:
        shapes |= {"lm_head.weight": (spec.vocab_size, hidden), "d2t": (spec.vocab_size,)}
    return shapes


def _optional_shapes(spec: DrafterSpec, target: Target) -> dict[str, tuple[int, ...]]:
    """Tables a checkpoint may bring instead of the target's."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (target.vocab_size, spec.hidden_size)}
    if not spec.has_own_vocab:
        shapes |= {"lm_head.weight": (spec.vocab_size, spec.hidden_size), "d2t": (spec.vocab_size,)}
    return shapes


def _rename(name: str) -> str:
    for prefix, replacement in _RENAMED:
        if name.startswith(prefix):
            name = replacement + name.removeprefix(prefix)
    return name.removesuffix(".weight") if name.removesuffix(".weight") in _CODEBOOKS else name


def _as_stored(
    shapes: dict[str, tuple[int, ...]], stored: set[str], spec: DrafterSpec
) -> dict[str, tuple[int, ...]]:
    """`shapes` with a fused qkv in place of its three parts where that is what is stored."""
    shapes = dict(shapes)
    for name in stored:
        parts = _parts(name, spec)
        if parts and parts.keys() <= shapes.keys():
            first, *_ = [shapes.pop(part) for part in parts]
            shapes[name] = (sum(parts.values()), *first[1:])
    return shapes


def _split(name: str, weight: Tensor, spec: DrafterSpec) -> dict[str, Tensor]:
    """A fused qkv as its three parts; anything else as it is."""
    if not (parts := _parts(name, spec)):
        return {name: weight}
    return dict(zip(parts, weight.split(list(parts.values())), strict=True))


def _parts(name: str, spec: DrafterSpec) -> dict[str, int]:
    """Names and rows of the three tensors in a fused one; none in any other."""
    if ".qkv_proj." not in name:
        return {}
    num_heads = {"q": spec.num_heads, "k": spec.num_kv_heads, "v": spec.num_kv_heads}
    return {name.replace("qkv_proj", f"{part}_proj"): num * spec.head_dim for part, num in num_heads.items()}


def _check_values(path: Path, weights: dict[str, Tensor], spec: DrafterSpec, target: Target) -> None:
    """Raise ModelError for what would draft nonsense in silence."""
    damaged = [name for name, weight in weights.items() if name != "d2t" and not weight.isfinite().all()]
    if damaged:
        raise ModelError(
            f"{path}: {len(damaged)} tensors are not finite, {damaged[0]} first; download the drafter again"
        )
    if "d2t" in weights:
        ids = torch.arange(spec.vocab_size, device=weights["d2t"].device) + weights["d2t"]
        if not bool(((ids >= 0) & (ids < target.vocab_size)).all()):
            raise ModelError(
                f"{path}: d2t names tokens the target does not have; use the drafter made for it"
            )
