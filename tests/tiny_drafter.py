"""Tiny random DFlash drafters in the published layout, and the reference package's model of them.

Weights are scaled up like those of `tiny`, so that the best draft stands out and greedy comparison is safe.
"""

import json
from pathlib import Path
from typing import Any

import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config

from paceline.drafter.target import Target

HIDDEN_SIZE = 64
VOCAB_SIZE = 512
NUM_TARGET_LAYERS = 8
TAP_LAYER_IDS = [1, 3, 5]
MASK_TOKEN_ID = 500
_GENERATION_2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 16}


def make_target(*, is_tied: bool = False, max_model_len: int = 512, seed: int = 7) -> Target:
    """Random tables of a target nobody runs."""
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator)
    head = 3 * torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator) / HIDDEN_SIZE**0.5
    return Target(
        architecture="Qwen3ForCausalLM",
        hidden_size=HIDDEN_SIZE,
        num_layers=NUM_TARGET_LAYERS,
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        embedding=embedding,
        head=None if is_tied else head,
    )


def config_of(
    *,
    generation: int = 1,
    layer_types: tuple[str, ...] = ("full_attention", "full_attention"),
    block_size: int = 8,
    sliding_window: int = 24,
    options: dict[str, Any] | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """config.json as published; `options` go into dflash_config, `overrides` to the top."""
    dflash_config = {
        "block_size": block_size,
        "mask_token_id": MASK_TOKEN_ID,
        "target_layer_ids": TAP_LAYER_IDS,
        **(_GENERATION_2 if generation == 2 else {}),
        **(options or {}),
    }
    is_sliding = "sliding_attention" in layer_types
    return {
        "architectures": ["DFlashDraftModel" if generation == 1 else "DFlash2DraftModel"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 96,
        "num_hidden_layers": len(layer_types),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "layer_types": list(layer_types),
        "use_sliding_window": is_sliding,
        "sliding_window": sliding_window if is_sliding else None,
        "num_target_layers": NUM_TARGET_LAYERS,
        "dflash_config": dflash_config,
    } | overrides


def make_drafter(path: Path, config: dict[str, Any], *, seed: int = 0) -> Path:
    """Write config.json and model.safetensors (float32) into `path`; returns `path`."""
    model = _build(config)
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, weight in sorted(model.state_dict().items()):
        stored = name.removesuffix(".weight") if "codebook" in name else name
        weights[stored] = _random_weight(name, weight, generator)
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def load_reference(path: Path) -> Any:
    """The reference package's model with the weights of a directory made by `make_drafter`."""
    model = _build(json.loads((path / "config.json").read_text()))
    weights = {
        f"{name}.weight" if "codebook" in name else name: weight
        for name, weight in load_file(path / "model.safetensors").items()
    }
    model.load_state_dict(weights)
    return model.eval().requires_grad_(False)


def _build(config: dict[str, Any]) -> DFlashDraftModel:
    moved = ("architectures", "rope_theta", "rope_scaling")
    options = {name: value for name, value in config.items() if name not in moved}
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    options["rope_parameters"] = {**scaling, "rope_theta": config["rope_theta"]}
    kind = DFlash2DraftModel if config["architectures"] == ["DFlash2DraftModel"] else DFlashDraftModel
    options |= {"attn_implementation": "sdpa", "dtype": torch.float32}
    return kind(Qwen3Config(**options))


def _random_weight(name: str, weight: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(weight.shape, generator=generator)
    if "norm" in name:
        return 1 + 0.1 * noise
    if name.endswith("bias"):
        return 0.3 * noise
    if "base_kernel" in name:
        return torch.tensor([1.0, 0.3]).view(1, 2, 1) + 0.1 * noise
    if "kernel_projection" in name:
        return 0.1 * noise / weight.shape[-1] ** 0.5
    if "codebook" in name:
        return 0.7 * noise
    scale = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
    return noise * scale / weight.shape[-1] ** 0.5
