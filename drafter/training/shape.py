"""The target's shape, as far as a drafter that starts as its last layers takes it over."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from ...cluster.checkpoint import Checkpoint
from ...cluster.config_json import ConfigJson
from ...cluster.rope_spec import RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetShape:
    """What config.json of the target says."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_len: int  # tokens per sequence the model was made for
    named_token_ids: frozenset[int]  # begin, end and padding

    @classmethod
    def load(cls, path: Path) -> "TargetShape":
        """Raises ModelError for a config that is absent or damaged."""
        config = ConfigJson.read(path / "config.json")
        hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        rope = RopeSpec.of(config)
        named = [config.get(f"{name}_token_id", []) for name in ("bos", "eos", "pad")]
        return cls(
            vocab_size=config.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            num_layers=config.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=config.integer("num_key_value_heads", num_heads),
            head_dim=config.integer("head_dim", hidden_size // num_heads),
            rms_norm_eps=config.number("rms_norm_eps", 1e-6),
            rope_theta=rope.theta,
            max_len=rope.max_len(config.integer("max_position_embeddings")),
            named_token_ids=frozenset(
                token_id for ids in named for token_id in (ids if isinstance(ids, list) else [ids])
            ),
        )


def target_digest(model_path: Path) -> str:
    """Tells a target from another of the same shape: a hash of its last layer's norms and first projection.

    Raises ModelError for missing weights.
    """
    last = TargetShape.load(model_path).num_layers - 1
    parts = ("self_attn.q_proj", "input_layernorm", "post_attention_layernorm")
    names = (*(f"model.layers.{last}.{part}.weight" for part in parts), "model.norm.weight")
    digest = hashlib.sha256()
    with Checkpoint(model_path) as checkpoint:
        for name in names:
            digest.update(checkpoint.tensor(name).float().numpy().tobytes())
    return digest.hexdigest()[:16]
