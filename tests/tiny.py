"""Tiny random checkpoints in Hugging Face's layout, one per model family, for tests.

The weights are scaled up from the usual initialisation: a fresh model gives nearly equal logits, and a greedy
comparison would then hang on rounding. Here the gap between the best and the second best token is wide.
"""

from pathlib import Path
from typing import Any, Literal, get_args

import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

Family = Literal["llama", "llama3", "llama-linear", "llama-yarn", "mistral", "qwen2", "qwen2-window", "qwen3"]
FAMILIES: tuple[Family, ...] = get_args(Family)

VOCAB_SIZE = 512
EOS_TOKEN_ID = 2
DIMENSIONS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}


def make_checkpoint(path: Path, family: Family, *, seed: int = 0, **overrides: Any) -> Path:
    """Write config.json, generation_config.json and model.safetensors (float32) into `path`; returns `path`.

    `overrides` are fields of the family's Hugging Face configuration, e.g. `tie_word_embeddings=True`.
    """
    model = _build(family, overrides)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=EOS_TOKEN_ID, pad_token_id=0)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            weight.copy_(_random_weight(name, weight, generator))
        if model.config.tie_word_embeddings:  # else the residual stream only echoes its own token
            model.get_input_embeddings().weight.mul_(0.3)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    return path


def _build(family: Family, overrides: dict[str, Any]) -> Any:
    """The model of a family, freshly initialised."""
    options = DIMENSIONS | {"attn_implementation": "eager", "dtype": torch.float32}
    linear_rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    window = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    parts: dict[Family, tuple[Any, Any, dict[str, Any]]] = {
        "llama": (LlamaForCausalLM, LlamaConfig, {}),
        "llama3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": _LLAMA3_ROPE}),
        "llama-linear": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": linear_rope}),
        "llama-yarn": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": _YARN_ROPE}),
        "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 24}),
        "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
        "qwen2-window": (Qwen2ForCausalLM, Qwen2Config, window),
        "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    }
    model, config, special = parts[family]
    return model(config(**(options | special | overrides)))


def _random_weight(name: str, weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(weight.shape, generator=generator)
    if "embed_tokens" in name:
        return noise
    if "norm" in name:
        return 1 + 0.1 * noise
    if name.endswith("bias"):
        return 0.3 * noise
    scale = 3.0 if "lm_head" in name else 2.0 if "q_proj" in name or "k_proj" in name else 1.0
    return noise * scale / weight.shape[-1] ** 0.5
