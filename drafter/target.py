"""What a drafter needs of its target: a few numbers, and the two tables it shares with it."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..cluster.checkpoint import Checkpoint
from ..cluster.config_json import ConfigJson

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The model that is drafted for."""

    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_model_len: int  # positions that tokens may have
    embedding: Tensor  # [vocab, hidden]
    head: Tensor | None  # [vocab, hidden]; None: tied to the embedding

    @classmethod
    def load(cls, path: Path, max_model_len: int, dtype: torch.dtype, device: torch.device) -> "Target":
        """Read the config and the tables of a target's directory, which its ranks have found servable.

        Raises ModelError when one of them is missing or damaged.
        """
        config = ConfigJson.read(path / "config.json")
        hidden_size, vocab_size = config.integer("hidden_size"), config.integer("vocab_size")
        names = [_EMBEDDING] if config.flag("tie_word_embeddings") else [_EMBEDDING, _HEAD]
        with Checkpoint(path) as checkpoint:
            checkpoint.check_some(dict.fromkeys(names, (vocab_size, hidden_size)))
            tables = {name: checkpoint.tensor(name).to(device, dtype) for name in names}
        return cls(
            architecture=", ".join(config.get("architectures", ["none"])),
            hidden_size=hidden_size,
            num_layers=config.integer("num_hidden_layers"),
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            embedding=tables[_EMBEDDING],
            head=tables.get(_HEAD),
        )
