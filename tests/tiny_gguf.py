"""Tiny GGUF files, written the way llama.cpp's converter writes them, from the checkpoints of `tiny.py`."""

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
MARKER = "<|end|>"  # control token; the last id of the vocabulary
WORD = "<word>"  # user-defined token; the one before


def write_gguf(
    checkpoint: Path, file: Path, arch: str, *, pre: str = "smollm", extra: dict[str, str] | None = None
) -> dict[str, torch.Tensor]:
    """Write the checkpoint as float32 GGUF with a byte-level vocabulary; returns its tensors by HF name."""
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(file, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    for key, value in (extra or {}).items():
        writer.add_string(key, value)
    _add_vocabulary(writer, config, pre)
    tensors = load_file(checkpoint / "model.safetensors")
    for name, tensor in tensors.items():
        stem, _, suffix = name.rpartition(".")
        parts = stem.split(".")
        renamed = _NAMES[stem] if stem in _NAMES else f"blk.{parts[2]}.{_NAMES['.'.join(parts[3:])]}"
        if arch == "llama" and parts[-1] in ("q_proj", "k_proj"):
            is_query = parts[-1] == "q_proj"
            tensor = _interleave(tensor, config["num_attention_heads" if is_query else "num_key_value_heads"])
        writer.add_tensor(f"{renamed}.{suffix}", tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _interleave(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Row i of each head's first half goes to row 2i, of its second half to row 2i + 1."""
    interleaved = torch.empty_like(weight)
    head_dim = weight.shape[0] // num_heads
    for row in range(weight.shape[0]):
        head, offset = divmod(row, head_dim)
        half, pair = divmod(offset, head_dim // 2)
        interleaved[head * head_dim + 2 * pair + half] = weight[row]
    return interleaved


def _add_vocabulary(writer: gguf.GGUFWriter, config: dict[str, Any], pre: str) -> None:
    letters = sorted(ByteLevel.alphabet())
    fillers = [f"<unused{i}>" for i in range(config["vocab_size"] - len(letters) - 3)]
    merged = letters[10] + letters[11]
    tokens = [*letters, merged, *fillers, WORD, MARKER]
    kinds = [gguf.TokenType.NORMAL] * len(tokens)
    kinds[-2:] = [gguf.TokenType.USER_DEFINED, gguf.TokenType.CONTROL]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{letters[10]} {letters[11]}"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_chat_template("{{ messages[0]['content'] }}")
