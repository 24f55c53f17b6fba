"""What a config.json says of rotary embeddings; targets and drafters are written alike."""

from dataclasses import dataclass
from typing import Literal

from .config_json import ConfigJson
from .errors import ModelError

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding: base frequency and the rescaling of its frequencies (see kernels/rope.py)."""

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_len: int = 0  # llama3 and yarn: the length before rescaling
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # yarn: multiplies cos and sin; None: from `factor`
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @classmethod
    def of(cls, config: ConfigJson) -> "RopeSpec":
        """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

        Raises ModelError for a kind we do not have, and for numbers that are missing.
        """
        rope = config.object("rope_parameters" if config.get("rope_parameters") else "rope_scaling")
        theta = rope.number("rope_theta", config.number("rope_theta", 10000.0))
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if rope.number("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError(
                f"{config.path}: partial rotary embeddings are not supported; choose another model"
            )
        match kind:
            case "default":
                return cls(theta=theta)
            case "linear":
                return cls(kind="linear", theta=theta, factor=rope.number("factor"))
            case "llama3":
                return cls(
                    kind="llama3",
                    theta=theta,
                    factor=rope.number("factor"),
                    original_max_len=rope.integer("original_max_position_embeddings"),
                    low_freq_factor=rope.number("low_freq_factor"),
                    high_freq_factor=rope.number("high_freq_factor"),
                )
            case "yarn":
                return cls(
                    kind="yarn",
                    theta=theta,
                    factor=rope.number("factor"),
                    original_max_len=rope.integer(
                        "original_max_position_embeddings", config.integer("max_position_embeddings")
                    ),
                    beta_fast=rope.number("beta_fast", 32.0),
                    beta_slow=rope.number("beta_slow", 1.0),
                    attention_factor=rope.optional_number("attention_factor"),
                    mscale=rope.optional_number("mscale"),
                    mscale_all_dim=rope.optional_number("mscale_all_dim"),
                    truncate=rope.flag("truncate", True),
                )
            case _:
                raise ModelError(
                    f"{config.path}: rope type {kind!r} is not supported; "
                    "supported are default, linear, llama3, yarn"
                )

    def max_len(self, max_position_embeddings: int) -> int:
        """Tokens per sequence: linear and yarn checkpoints may state the length before rescaling."""
        if self.kind == "linear":
            return int(max_position_embeddings * self.factor)
        if self.kind == "yarn":
            return max(max_position_embeddings, int(self.original_max_len * self.factor))
        return max_position_embeddings
