"""Turns a GGUF file into the Hugging Face form that the workers load: safetensors, configuration, tokenizer.

Weights are dequantised and rounded to bfloat16, shard by shard, so the memory taken is one shard and not the
model. Two facts of the format matter here. The writers of `llama` files interleave the rotary halves of Q and
K (row 2i is the i-th of the first half, 2i+1 of the second); the halves are put back. And a file names its
pre-tokenizer instead of carrying it, so only names known here are accepted: a wrong one would split text in a
way the model never saw, and nothing would fail.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from .errors import ModelError

SHARD_BYTES = 2 << 30
_CONTROL, _USER_DEFINED = 3, 4  # token types: markers such as <|im_end|>, and plain added words

_REMEDY = "serve the model's Hugging Face directory instead"


@dataclass(frozen=True, slots=True)
class _Family:
    """What a GGUF architecture is called on the other side."""

    model_type: str
    class_name: str
    has_interleaved_rope: bool  # Q and K rows must be put back in halves
    extra_config: dict[str, Any]


_FAMILIES = {
    "llama": _Family("llama", "LlamaForCausalLM", True, {"attention_bias": False, "mlp_bias": False}),
    "qwen2": _Family("qwen2", "Qwen2ForCausalLM", False, {"use_sliding_window": False}),
    "qwen3": _Family("qwen3", "Qwen3ForCausalLM", False, {"attention_bias": False}),
}

_OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": lambda: _sequence(pre_tokenizers.Digits(individual_digits=True), use_regex=True),
    "llama-bpe": lambda: _sequence(_split(_WORDS % "{1,3}"), use_regex=False),
    "qwen2": lambda: _sequence(_split(_WORDS % ""), use_regex=False),
}


def convert_gguf(source: Path, target: Path, progress: Callable[[float], None] | None = None) -> None:
    """Write the model of `source` into the existing, empty directory `target`.

    `progress` is told the share of tensors done. Raises ModelError when the file is damaged or of a kind that
    is not understood; `target` is then incomplete and the caller's to remove.
    """
    try:
        reader = GGUFReader(source)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ModelError(
            f"{source} is not a readable GGUF file ({_one_line(error)}); fetch it again"
        ) from None
    name = fields.get("general.architecture")
    if name not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise ModelError(f"{source}: GGUF architecture {name!r} is not supported ({known} are); {_REMEDY}")
    family = _FAMILIES[name]
    try:
        config = _config(family, name, fields, reader.tensors)
        tokenizer, tokenizer_config = _tokenizer(fields)
    except KeyError as error:
        raise ModelError(f"{source}: the key {error} is missing; {_REMEDY}") from None
    except ModelError as error:
        raise ModelError(f"{source}: {error}; {_REMEDY}") from None
    tensors = _tensors(family, config, reader.tensors, source, progress)
    _write_weights(tensors, target)
    special_ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", special_ids)
    _write_json(target / "tokenizer_config.json", tokenizer_config)
    tokenizer.save(str(target / "tokenizer.json"))


def _config(
    family: _Family, name: str, fields: dict[str, Any], tensors: list[ReaderTensor]
) -> dict[str, Any]:
    def value(key: str) -> Any:
        return fields[f"{name}.{key}"]

    if fields.get(f"{name}.rope.scaling.type", "none") != "none":
        raise ModelError("RoPE scaling in a GGUF file is not supported")
    num_heads = value("attention.head_count")
    head_dim = fields.get(f"{name}.attention.key_length", value("embedding_length") // num_heads)
    if fields.get(f"{name}.rope.dimension_count", head_dim) != head_dim:
        raise ModelError("RoPE over a part of each head is not supported")
    return {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "hidden_act": "silu",
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": head_dim,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": value("context_length"),
        # stored as float32: 9.9999997e-06 was 1e-05
        "rms_norm_eps": float(f"{value('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": fields.get(f"{name}.rope.freq_base", 10000.0),
        "rope_scaling": None,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in tensors),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
        **family.extra_config,
    }


def _tensors(
    family: _Family,
    config: dict[str, Any],
    tensors: list[ReaderTensor],
    source: Path,
    progress: Callable[[float], None] | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for index, tensor in enumerate(tensors):
        outer, _, suffix = tensor.name.rpartition(".")
        kind = outer.split(".")[-1]
        if outer in _OUTER_NAMES:
            renamed = f"{_OUTER_NAMES[outer]}.{suffix}"
        elif outer.startswith("blk.") and kind in _BLOCK_NAMES:
            renamed = f"model.layers.{outer.split('.')[1]}.{_BLOCK_NAMES[kind]}.{suffix}"
        else:
            raise ModelError(f"{source}: the tensor {tensor.name!r} is not understood; {_REMEDY}")
        try:
            weight = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            kind_name = tensor.tensor_type.name
            raise ModelError(f"{source}: quantisation {kind_name} is not supported; {_REMEDY}") from None
        if family.has_interleaved_rope and kind in heads:
            weight = _rope_halves(weight, heads[kind])
        # a copy, because the reader's arrays are read-only maps of the file
        yield renamed, torch.from_numpy(np.array(weight, dtype=np.float32)).to(torch.bfloat16)
        if progress is not None:
            progress((index + 1) / len(tensors))


def _rope_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """[heads * (half, 2), ...] interleaved pairs to [heads * (2, half), ...]: what rotate-half expects."""
    rest = weight.shape[1:]
    return weight.reshape(num_heads, -1, 2, *rest).swapaxes(1, 2).reshape(weight.shape)


def _write_weights(tensors: Iterator[tuple[str, torch.Tensor]], target: Path) -> None:
    """One `model.safetensors`, or shards of at most SHARD_BYTES (or one tensor) and their index."""
    shards: list[list[str]] = []
    total_bytes = 0
    shard: dict[str, torch.Tensor] = {}

    def flush() -> None:
        shards.append(list(shard))
        file = target / f"model-{len(shards):05}.safetensors"
        save_file(shard, file, metadata={"format": "pt"})
        file.chmod(0o644)  # the cache may be shared; safetensors writes for its owner only
        shard.clear()

    shard_bytes = 0
    for name, tensor in tensors:
        if shard and shard_bytes + tensor.nbytes > SHARD_BYTES:
            flush()
            shard_bytes = 0
        shard[name] = tensor
        shard_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    flush()
    if len(shards) == 1:
        (target / "model-00001.safetensors").rename(target / "model.safetensors")
        return
    weight_map = {
        name: f"model-{number:05}.safetensors" for number, names in enumerate(shards, 1) for name in names
    }
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    _write_json(target / "model.safetensors.index.json", index)


def _tokenizer(fields: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Byte-level BPE from the file's vocabulary and merges, and its `tokenizer_config.json`."""
    model, pre = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ModelError(f"the tokenizer {model}/{pre} is not supported (gpt2 with {known} is)")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields["tokenizer.ggml.token_type"]
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelError("the vocabulary names a token twice")
    merges = [(left, right) for left, right in (m.split(" ") for m in fields["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    for kind, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
        tokenizer.add_tokens(
            [
                AddedToken(token, special=is_special, normalized=False)
                for token, token_kind in zip(tokens, types, strict=True)
                if token_kind == kind
            ]
        )
    ids = {
        key: fields.get(f"tokenizer.ggml.{name}_token_id")
        for key, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    named = {f"{key}_token": tokens[token_id] for key, token_id in ids.items() if token_id is not None}
    if fields.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") and ids["bos"] is not None:
        bos = named["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, ids["bos"])]
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    return tokenizer, config


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _sequence(first: pre_tokenizers.PreTokenizer, *, use_regex: bool) -> pre_tokenizers.PreTokenizer:
    bytes_to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    return pre_tokenizers.Sequence([first, bytes_to_letters])


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
