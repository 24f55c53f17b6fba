"""What `--drafter` names, found and checked against the target before a process starts."""

from pathlib import Path

import msgspec
import torch

from ..cluster.config import Config
from ..cluster.drafter_choice import DrafterChoice
from ..cluster.model_source import resolve_drafter
from ..drafter.spec import DrafterSpec
from ..drafter.target import Target
from ..workers.runner import max_model_len
from ..workers.spec import ModelSpec

NGRAM = "ngram"


def choose_drafter(config: Config, model_path: Path) -> DrafterChoice | None:
    """The drafter of `config.engine.drafter` for the target in `model_path`; None: serve without one.

    "default" is prompt lookup, which suits every model and costs next to nothing. Raises ModelError for a
    checkpoint that is absent, no drafter, or made for another target, and for more draft tokens than it was
    trained for.
    """
    engine = config.engine
    match engine.drafter:
        case "none":
            return None
        case "default" | "ngram":
            return DrafterChoice(name=NGRAM)
        case name:
            path = resolve_drafter(name)
    block_size = None if engine.num_draft_tokens is None else engine.num_draft_tokens + 1
    spec = DrafterSpec.load(path, _shape_of(config, model_path), block_size)
    return DrafterChoice(name=name, path=path.resolve(), tap_layer_ids=spec.tap_layer_ids)


def with_drafter(config: Config, name: str) -> Config:
    """The configuration with another drafter."""
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, drafter=name))


def _shape_of(config: Config, model_path: Path) -> Target:
    """The target without its tables."""
    spec = ModelSpec.load(model_path)
    table = torch.empty(spec.vocab_size, spec.hidden_size, device="meta")
    return Target(
        architecture=spec.architecture,
        hidden_size=spec.hidden_size,
        num_layers=spec.num_layers,
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len(spec, config.model.max_model_len),
        embedding=table,
        head=None if spec.is_tied else table,
    )
