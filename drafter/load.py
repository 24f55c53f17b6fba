"""From a choice to a proposer: prompt lookup, a checkpoint beside its target's tables, or both."""

from pathlib import Path

import torch

from ..cluster.config import Config
from ..cluster.config_json import ConfigJson
from ..cluster.drafter_choice import DrafterChoice
from ..kernels.dtypes import compute_dtype
from ..kernels.grammar import Grammars
from .dflash_proposer import DFlashProposer
from .grammar_proposer import GrammarProposer
from .mixed import MixedProposer
from .ngram import NgramProposer
from .proposer import Proposer
from .target import Target

GIB = 1 << 30
CPU_CONTEXT_GIB = 0.25  # over all shards, where the machine's memory is also everybody else's
GPU_SHARE = 0.5  # of what the target leaves: the other half is for weights, scratch and the CUDA context


def load_proposer(
    choice: DrafterChoice, config: Config, model_path: Path, max_model_len: int, device: torch.device
) -> Proposer:
    """Raises ModelError for a checkpoint that cannot be loaded or is another target's."""
    vocab_size = ConfigJson.read(model_path / "config.json").integer("vocab_size")
    # Without end tokens: no draft of one stands, and an end needs no draft.
    grammars = Grammars(model_path, vocab_size, ())
    return GrammarProposer(_load(choice, config, model_path, max_model_len, device), grammars)


def _load(
    choice: DrafterChoice, config: Config, model_path: Path, max_model_len: int, device: torch.device
) -> Proposer:
    engine = config.engine
    if choice.path is None:
        return NgramProposer() if engine.num_draft_tokens is None else NgramProposer(engine.num_draft_tokens)
    dtype = compute_dtype(config.model.dtype, device, engine.backend)
    network = DFlashProposer.load(
        choice.path,
        Target.load(model_path, max_model_len, dtype, device),
        context_bytes=_context_bytes(config, device),
        page_size=engine.page_size,
        block_size=None if engine.num_draft_tokens is None else engine.num_draft_tokens + 1,
        dtype=dtype,
        device=device,
        backend=engine.backend,
    )
    return MixedProposer(network) if engine.prompt_lookup else network


def _context_bytes(config: Config, device: torch.device) -> int:
    """Memory for one shard's pages."""
    engine = config.engine
    if engine.drafter_cache_gib is not None:
        return int(engine.drafter_cache_gib * GIB)
    if device.type == "cpu":
        return int(CPU_CONTEXT_GIB * GIB / engine.tensor_parallel_size)
    _, total = torch.cuda.mem_get_info(device)
    return int((1 - engine.gpu_memory_utilization) * total * GPU_SHARE)
