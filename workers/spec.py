"""What a checkpoint's config.json says, as the one description every part of a rank reads."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..cluster.config_json import ConfigJson
from ..cluster.errors import ConfigError, ModelError
from ..cluster.rope_spec import RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder's architecture and dimensions, whole (not per rank)."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    windows: tuple[int | None, ...]  # per layer; None: full attention
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    is_tied: bool  # the head is the embedding
    max_model_len: int  # tokens per sequence the model was made for
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def load(cls, path: Path) -> "ModelSpec":
        """Read `config.json` and, for the end-of-sequence ids, `generation_config.json` of a directory.

        Raises ModelError for a directory without a readable config, or an architecture we do not have.
        """
        config = ConfigJson.read(path / "config.json")
        architecture = _architecture(config)
        generation_path = path / "generation_config.json"
        generation = ConfigJson.read(generation_path) if generation_path.is_file() else None
        num_heads = config.integer("num_attention_heads")
        hidden_size = config.integer("hidden_size")
        if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise ModelError(f"{config.path}: hidden_act {activation!r} is not supported; only 'silu' is")
        if config.get("quantization_config"):
            raise ModelError(
                f"{config.path}: quantised weights are not supported; choose the model's bf16 release"
            )
        rope = RopeSpec.of(config)
        attention_bias, mlp_bias = config.flag("attention_bias"), config.flag("mlp_bias")
        return cls(
            architecture=architecture,
            vocab_size=config.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            num_layers=config.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=config.integer("num_key_value_heads", num_heads),
            head_dim=config.integer("head_dim", hidden_size // num_heads),
            rms_norm_eps=config.number("rms_norm_eps", 1e-6),
            rope=rope,
            windows=_ARCHITECTURES[architecture](config),
            has_qkv_bias=architecture == "Qwen2ForCausalLM"
            or (architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and attention_bias),
            has_o_bias=architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and attention_bias,
            has_mlp_bias=architecture == "LlamaForCausalLM" and mlp_bias,
            has_qk_norm=architecture == "Qwen3ForCausalLM",
            is_tied=config.flag("tie_word_embeddings"),
            max_model_len=rope.max_len(config.integer("max_position_embeddings")),
            bos_token_id=next(iter(_token_ids(generation, config, "bos_token_id")), None),
            eos_token_ids=_token_ids(generation, config, "eos_token_id"),
        )

    def check_tensor_parallel(self, size: int) -> None:
        """Raise ConfigError, naming the sizes that work, unless `size` ranks can share this model."""
        if not self._can_split(size):
            sizes = [n for n in range(1, self.num_heads + 1) if self._can_split(n)]
            raise ConfigError(
                f"tensor_parallel_size {size} does not divide this model ({self.num_heads} heads, "
                f"{self.num_kv_heads} key-value heads, {self.intermediate_size} intermediate); "
                f"choose one of {', '.join(map(str, sizes))}"
            )

    def _can_split(self, size: int) -> bool:
        return (
            self.num_heads % size == 0
            and self.intermediate_size % size == 0
            and (self.num_kv_heads % size == 0 or size % self.num_kv_heads == 0)
        )


def _no_windows(config: ConfigJson) -> tuple[int | None, ...]:
    return (None,) * config.integer("num_hidden_layers")


def _mistral_windows(config: ConfigJson) -> tuple[int | None, ...]:
    # Absent means 4096, the family's default; null means full attention.
    has_window = config.get("sliding_window") is not None or "sliding_window" not in config.values
    window = config.integer("sliding_window", 4096) if has_window else None
    return (window,) * config.integer("num_hidden_layers")


def _qwen_windows(config: ConfigJson) -> tuple[int | None, ...]:
    num_layers = config.integer("num_hidden_layers")
    if not config.flag("use_sliding_window"):
        return (None,) * num_layers
    window = config.integer("sliding_window", 4096)
    first = config.integer("max_window_layers", 28, is_zero_fine=True)
    default = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    kinds = config.get("layer_types") or default
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ModelError(
            f"{config.path}: layer_types must name full_attention or sliding_attention per layer"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


_ARCHITECTURES: dict[str, Callable[[ConfigJson], tuple[int | None, ...]]] = {
    "LlamaForCausalLM": _no_windows,
    "MistralForCausalLM": _mistral_windows,
    "Qwen2ForCausalLM": _qwen_windows,
    "Qwen3ForCausalLM": _qwen_windows,
}
SUPPORTED_ARCHITECTURES = tuple(_ARCHITECTURES)


def _architecture(config: ConfigJson) -> str:
    names = config.get("architectures") or []
    if not isinstance(names, list) or len(names) != 1 or names[0] not in _ARCHITECTURES:
        named = ", ".join(map(str, names)) if names else "none"
        raise ModelError(
            f"architecture {named} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return names[0]


def _token_ids(generation: ConfigJson | None, config: ConfigJson, name: str) -> tuple[int, ...]:
    """The generation config's answer when it has one, else the model config's."""
    value = generation.get(name) if generation is not None else None
    if value is None:
        value = config.get(name)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise ModelError(f"{config.path}: {name} is {value!r}; it must be a token id or a list of them")
    return tuple(ids)
