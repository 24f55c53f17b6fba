"""What a drafter's config.json says, checked against the target it is to draft for.

Read are DFlash and DFlash 2 checkpoints in the published layout (options in `dflash_config` or, in older
files, at the top) and in that of `speculators` (the decoder in `transformer_layer_config`, tap ids counted
from the embedding). Nothing is guessed: `target_layer_ids` in particular is required, because wrong taps load
cleanly and merely draft badly.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cluster.config_json import ConfigJson
from ..cluster.errors import ModelError
from ..cluster.rope_spec import RopeSpec
from .target import Target

_LAYER_TYPES = ("full_attention", "sliding_attention")
_ARCHITECTURES = {
    "DFlashDraftModel": 1,
    "DFlash2DraftModel": 2,
    "DFlashSpeculator": 1,
    "DFlash2Speculator": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSpec:
    """A DFlash drafter: a Qwen3 stack over projected tap rows and one block."""

    generation: int  # 1, or 2 with convolutions and a candidate selector
    vocab_size: int  # of the target, or smaller: `has_own_vocab`
    has_own_vocab: bool  # drafts a subset of the target's tokens, named by the checkpoint
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    has_bias: bool
    windows: tuple[int | None, ...]  # per layer; None: full attention
    causal: tuple[bool, ...]  # per layer: whether a block's rows see only those before
    max_len: int  # tokens of context it was made for
    tap_layer_ids: tuple[int, ...]  # target blocks after which the residual stream is tapped, in fc's order
    mask_token_id: int
    trained_block_size: int
    block_size: int  # anchor and drafts; at most the trained one
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    conv_kernel_size: int = 0  # generation 2 from here on
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0

    @classmethod
    def load(cls, path: Path, target: Target, block_size: int | None = None) -> "DrafterSpec":
        """Read and check `config.json` of a drafter's directory; `block_size` None: the trained one.

        Raises ModelError, saying what to do, for a config that is not a drafter's or not one of this target.
        """
        config = _read(path / "config.json")
        generation = _generation(config)
        num_layers = config.integer("num_hidden_layers")
        tap_layer_ids = _tap_layer_ids(config, target)
        num_heads = config.integer("num_attention_heads")
        rope = RopeSpec.of(config)
        trained = config.integer("block_size")
        spec = cls(
            generation=generation,
            vocab_size=config.integer("draft_vocab_size", config.integer("vocab_size")),
            has_own_vocab=config.integer("draft_vocab_size", target.vocab_size) != target.vocab_size,
            hidden_size=config.integer("hidden_size"),
            intermediate_size=config.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=config.integer("num_key_value_heads", num_heads),
            head_dim=config.integer("head_dim", 128),  # Qwen3's default
            rms_norm_eps=config.number("rms_norm_eps", 1e-6),
            rope=rope,
            has_bias=config.flag("attention_bias"),
            windows=(windows := _windows(config, num_layers)),
            causal=_causal(config, windows),
            max_len=rope.max_len(config.integer("max_position_embeddings")),
            tap_layer_ids=tap_layer_ids,
            mask_token_id=config.integer("mask_token_id", is_zero_fine=True),
            trained_block_size=trained,
            block_size=trained if block_size is None else block_size,
            input_embedding_scale=config.number("input_embedding_scale", 1.0),
            output_multiplier=config.number("output_multiplier", 1.0),
            final_logit_softcapping=config.number("final_logit_softcapping", 0.0, is_zero_fine=True) or None,
            **(_generation_2(config) if generation == 2 else {}),
        )
        _check(config.path, spec, config, target)
        return spec

    @property
    def max_context_len(self) -> int:
        """A longer context changes no draft: with a window, the anchor sees window - 1 rows before it."""
        windows = [window for window in self.windows if window is not None]
        if len(windows) < self.num_layers:
            return self.max_len
        return min(self.max_len, max(1, max(windows) - 1))


def _read(path: Path) -> ConfigJson:
    """The config's objects as one: draft options win over the top, the top over the decoder's."""
    top = ConfigJson.read(path)
    values: dict[str, Any] = {}
    for part in (top.object("transformer_layer_config"), top, top.object("dflash_config")):
        values |= {name: value for name, value in part.values.items() if value is not None}
    return ConfigJson(path, values)


def _generation(config: ConfigJson) -> int:
    names = config.get("architectures") or []
    known = (
        [_ARCHITECTURES[name] for name in names if name in _ARCHITECTURES] if isinstance(names, list) else []
    )
    if len(known) != 1 or len(names) != 1:
        named = ", ".join(map(str, names)) if isinstance(names, list) and names else "none"
        raise ModelError(
            f"{config.path}: architecture {named} is no drafter we have; have are {', '.join(_ARCHITECTURES)}"
        )
    if config.flag("sample_from_anchor") or config.get("projector_type") is not None:
        raise ModelError(
            f"{config.path}: this is a DSpark or Domino drafter; only DFlash and DFlash 2 are supported"
        )
    return known[0]


def _tap_layer_ids(config: ConfigJson, target: Target) -> tuple[int, ...]:
    """As "after block id", whichever way the checkpoint counts."""
    name, offset = "target_layer_ids", 0
    if config.get(name) is None and config.get("speculators_model_type") is not None:
        name, offset = "aux_hidden_state_layer_ids", 1
    ids = config.get(name)
    if ids is None:
        raise ModelError(
            f"{config.path}: target_layer_ids is missing, and the layers it was trained on cannot be "
            "guessed; ask its author and add it to dflash_config"
        )
    if not isinstance(ids, list) or not ids or not all(type(layer_id) is int for layer_id in ids):
        raise ModelError(f"{config.path}: {name} is {ids!r}; it must be a list of layer indices")
    tap_layer_ids = tuple(layer_id - offset for layer_id in ids)
    if len(set(ids)) != len(ids):
        raise ModelError(
            f"{config.path}: {name} {ids} names a layer twice; use the config its author published"
        )
    if not all(0 <= layer_id < target.num_layers for layer_id in tap_layer_ids):
        raise ModelError(
            f"{config.path}: {name} {ids} are not all layers of the target ({offset} to "
            f"{target.num_layers - 1 + offset}); use the drafter made for this target"
        )
    return tap_layer_ids


def _windows(config: ConfigJson, num_layers: int) -> tuple[int | None, ...]:
    """A sliding layer has a window unless `use_sliding_window` is false; no layer types: Qwen3's rule."""
    kinds = config.get("layer_types")
    is_used = config.flag("use_swa", config.flag("use_sliding_window", kinds is not None))
    if kinds is None:
        first = config.integer("max_window_layers", 28, is_zero_fine=True)
        kinds = [_LAYER_TYPES[is_used and layer >= first] for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= set(_LAYER_TYPES):
        raise ModelError(
            f"{config.path}: layer_types must name {' or '.join(_LAYER_TYPES)} for each of {num_layers}"
        )
    if not is_used or "sliding_attention" not in kinds:
        return (None,) * num_layers
    window = config.integer("swa_window_size", config.integer("sliding_window", 4096))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _causal(config: ConfigJson, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    for name in ("is_causal", "causal"):
        if config.get(name) is not None:
            return (config.flag(name),) * len(windows)
    if config.flag("sliding_window_non_causal"):
        return (False,) * len(windows)
    kinds = config.get("layer_types") or [_LAYER_TYPES[window is not None] for window in windows]
    return tuple(kind == "sliding_attention" for kind in kinds)


def _generation_2(config: ConfigJson) -> dict[str, int]:
    names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    return {name: config.integer(name) for name in names}


def _check(path: Path, spec: DrafterSpec, config: ConfigJson, target: Target) -> None:
    """Raise ModelError for what cannot be a drafter of this target."""
    if spec.hidden_size != config.integer("target_hidden_size", spec.hidden_size) or (
        spec.hidden_size != target.hidden_size
    ):
        raise ModelError(
            f"{path}: the drafter's hidden size is {spec.hidden_size}, that of the target "
            f"({target.architecture}) {target.hidden_size}; use the drafter made for this target"
        )
    if (num_layers := config.integer("num_target_layers", target.num_layers)) != target.num_layers:
        raise ModelError(
            f"{path}: the drafter is for a target of {num_layers} layers, this one has {target.num_layers}; "
            "use the drafter made for this target"
        )
    if (vocab_size := config.integer("vocab_size", target.vocab_size)) != target.vocab_size:
        raise ModelError(
            f"{path}: the drafter is for a vocabulary of {vocab_size}, the target's is {target.vocab_size}; "
            "use the drafter made for this target"
        )
    if spec.mask_token_id >= target.vocab_size:
        raise ModelError(
            f"{path}: mask_token_id {spec.mask_token_id} is outside the target's vocabulary of "
            f"{target.vocab_size}; use the drafter made for this target"
        )
    if not 2 <= spec.block_size <= spec.trained_block_size:
        raise ModelError(
            f"{path}: block size {spec.block_size} is not between 2 and {spec.trained_block_size}, which the "
            "drafter was trained for; choose one of these"
        )
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"{path}: hidden_act {activation!r} is not supported in a drafter; only 'silu' is")
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(f"{path}: {spec.num_heads} heads cannot share {spec.num_kv_heads} key-value heads")
    if spec.generation == 2 and spec.has_own_vocab:
        raise ModelError(f"{path}: a DFlash 2 drafter with a vocabulary of its own is not supported")
    if spec.generation == 2 and spec.hidden_size % spec.conv_group_size:
        raise ModelError(f"{path}: conv_group_size {spec.conv_group_size} does not divide {spec.hidden_size}")
