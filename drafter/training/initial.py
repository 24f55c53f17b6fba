"""Where training starts: from the target's own last layers, or from a drafter that exists.

A drafter that starts as the last layers of its target, and sees the deepest tap through its `fc`, needs a
third of the tokens that a random one needs to reach the same acceptance.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...cluster.checkpoint import Checkpoint
from ...cluster.errors import ConfigError, ModelError
from ..spec import DrafterSpec
from ..target import Target
from ..weights import load_weights
from .network import DrafterNetwork
from .shape import TargetShape

_LOGIT_SPREAD = 1.5  # of a random row through the final norm and the head
_OTHER_TAPS = 0.3  # of a fresh fc's random weights; the deepest tap passes straight
_SPREAD_ROWS = 8192  # of the head, to measure it
_LAYER_PARTS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
)


def drafter_config(
    shape: TargetShape,
    *,
    num_layers: int,
    block_size: int,
    tap_layer_ids: tuple[int, ...],
    mask_token_id: int,
) -> dict[str, Any]:
    """config.json of a drafter shaped like its target's layers, in the published layout.

    Raises ConfigError for options that make no drafter of this target.
    """
    if not 1 <= num_layers <= shape.num_layers:
        raise ConfigError(f"{num_layers} draft layers; choose 1 to {shape.num_layers}, what the target has")
    if block_size < 2:
        raise ConfigError(f"a block of {block_size} drafts nothing; choose 2 or more")
    if not 0 <= mask_token_id < shape.vocab_size:
        raise ConfigError(f"mask token {mask_token_id} is outside the vocabulary of {shape.vocab_size}")
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_len,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": ["full_attention"] * num_layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "num_target_layers": shape.num_layers,
        "block_size": block_size,
        "dflash_config": {
            "block_size": block_size,
            "mask_token_id": mask_token_id,
            "target_layer_ids": list(tap_layer_ids),
        },
        "torch_dtype": "bfloat16",
    }


@torch.no_grad()
def start_from_target(network: DrafterNetwork, model_path: Path, target: Target, seed: int) -> None:
    """Copy the target's last layers; `tap_scale` must be set. Raises ModelError for missing weights."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        network.fc.reset_parameters()
    spec = network.spec
    hidden = spec.hidden_size
    first = TargetShape.load(model_path).num_layers - spec.num_layers
    with Checkpoint(model_path) as checkpoint:

        def read(name: str) -> Tensor:
            return checkpoint.tensor(name).float()

        for index in range(spec.num_layers):
            prefix = f"model.layers.{first + index}"
            for part in _LAYER_PARTS:
                network.get_parameter(f"layers.{index}.{part}.weight").copy_(read(f"{prefix}.{part}.weight"))
            for part in ("self_attn.q_norm", "self_attn.k_norm"):
                if f"{prefix}.{part}.weight" in checkpoint.names:
                    network.get_parameter(f"layers.{index}.{part}.weight").copy_(
                        read(f"{prefix}.{part}.weight")
                    )
        network.hidden_norm.weight.copy_(read(f"model.layers.{first}.input_layernorm.weight"))
        norm = read("model.norm.weight")
    # The layers' output is not what the target's would be, and its norm would make logits far too wide.
    head = (target.embedding if target.head is None else target.head)[:_SPREAD_ROWS].float()
    spread = (head * norm).square().sum(1).sqrt().mean()
    network.norm.weight.copy_(norm * (_LOGIT_SPREAD / spread))
    network.fc.weight.mul_(_OTHER_TAPS)
    deepest = 1 / network.tap_scale[-hidden:]  # undone, so that dimensions keep their proportions
    network.fc.weight[:, -hidden:] = torch.diag(deepest / deepest.mean())


def start_from_drafter(network: DrafterNetwork, path: Path, target: Target) -> None:
    """Load an existing drafter; ConfigError for one of another shape or kind than is trained here."""
    found, wanted = DrafterSpec.load(path, target), network.spec
    if found.generation != 1 or found.has_own_vocab or any(found.windows) or any(found.causal):
        raise ConfigError(
            f"{path} is not a DFlash 1 drafter of full attention over the whole vocabulary; leave out --init"
        )
    for name in ("num_layers", "tap_layer_ids", "mask_token_id", "head_dim", "num_heads", "num_kv_heads"):
        if getattr(found, name) != getattr(wanted, name):
            raise ConfigError(
                f"{path} has {name} {getattr(found, name)}, and {getattr(wanted, name)} is wanted; "
                "train with the drafter's own"
            )
    weights = load_weights(path, found, target, torch.float32, torch.device("cpu"))
    if brought := {"embed_tokens.weight", "lm_head.weight"} & weights.keys():
        raise ModelError(f"{path} brings {', '.join(sorted(brought))} of its own; leave out --init")
    network.take(weights)


def pick_mask_token(model_path: Path, shape: TargetShape, counts: Tensor) -> int:
    """The token that the answers use least, a special one if the tokenizer has any; the last of equals.

    `counts` [vocab] says how often each token occurs. Begin, end and padding are not taken.
    """
    try:
        added = json.loads((model_path / "tokenizer.json").read_text())["added_tokens"]
        special = {token["id"] for token in added if token["special"]}
    except (OSError, ValueError, KeyError, TypeError):
        special = set[int]()
    free = special & set(range(len(counts))) - shape.named_token_ids
    candidates = free or set(range(len(counts))) - shape.named_token_ids
    return min(candidates, key=lambda token_id: (int(counts[token_id]), -token_id))
