"""The result in the published layout: config.json, bf16 safetensors, and a model card."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..spec import DrafterSpec
from ..target import Target
from .network import DrafterNetwork
from .shards import publish


def write_config(path: Path, config: dict[str, Any], target: Target) -> DrafterSpec:
    """Write config.json and read it back as serving will. Raises ModelError for what is no drafter."""
    path.mkdir(parents=True, exist_ok=True)
    _write_text(path / "config.json", json.dumps(config, indent=2) + "\n")
    return DrafterSpec.load(path, target)


def vocab_tensors(target: Target, counts: Tensor, size: int) -> dict[str, Tensor]:
    """A vocabulary of the drafter's own, in the `speculators` layout: the `size` tokens that `counts` [vocab]
    has most of, as rows of the target's head.

    `d2t` [size] is what to add to a row's number to have its token, `t2d` [vocab] says which tokens have one.
    """
    kept = counts.argsort(descending=True, stable=True)[:size].sort().values
    head = target.embedding if target.head is None else target.head
    is_kept = torch.zeros(len(counts), dtype=torch.bool)
    is_kept[kept] = True
    return {
        "lm_head.weight": head[kept].to(torch.bfloat16),
        "d2t": kept - torch.arange(size),
        "t2d": is_kept,
    }


def export_drafter(
    path: Path, network: DrafterNetwork, facts: dict[str, Any], vocab: dict[str, Tensor] | None = None
) -> None:
    """Write the weights beside config.json, `vocab` among them, and README.md with `facts`."""
    weights = {
        name: weight.to("cpu", torch.bfloat16).contiguous() for name, weight in network.folded().items()
    }
    weights |= vocab or {}
    partial = path / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    publish(partial, path / "model.safetensors")
    _write_text(path / "README.md", _card(network.spec, weights, facts))


def _card(spec: DrafterSpec, weights: dict[str, Tensor], facts: dict[str, Any]) -> str:
    num_parameters = sum(weight.numel() for weight in weights.values())
    taps = ", ".join(map(str, spec.tap_layer_ids))
    lines = [
        "---",
        "license: apache-2.0",
        "tags: [dflash, speculative-decoding]",
        "---",
        "",
        "# A DFlash drafter",
        "",
        f"{num_parameters / 1e6:.2f} M parameters in bfloat16: {spec.num_layers} layers, blocks of "
        f"{spec.trained_block_size} (anchor and {spec.trained_block_size - 1} drafts), mask token "
        f"{spec.mask_token_id}. It reads its target's residual stream after blocks {taps}, counted from 0, "
        f"and shares the target's embedding{'' if 'd2t' in weights else ' and head'}.",
        "",
        "Trained by `paceline train` on the target's own answers. Figures of a walk are of recorded greedy "
        "text; `paceline train eval` measures in the engine.",
        "",
    ]
    for name, value in facts.items():
        lines.append(f"* {name}: {json.dumps(value) if isinstance(value, (dict, list)) else value}")
    return "\n".join(lines) + "\n"


def _write_text(file: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as stream:
        stream.write(text)
    os.chmod(stream.name, 0o644)
    publish(Path(stream.name), file)
