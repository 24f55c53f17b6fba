"""One rank's part of each weight: which slices it holds, and how they are loaded and fused.

Column-parallel linears (qkv, gate-up) hold whole heads and whole intermediate channels of the output;
row-parallel ones (o, down) the matching input columns, so that their outputs add up over the ranks. The
embedding and the head are split by vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cluster.checkpoint import Checkpoint
from ..kernels.backend import Backend
from ..kernels.dtypes import narrowed
from .collectives import Collectives
from .spec import ModelSpec

Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Partition:
    """The ranges of heads, channels and vocabulary one rank holds."""

    spec: ModelSpec
    rank: int
    size: int

    def __post_init__(self) -> None:
        self.spec.check_tensor_parallel(self.size)

    @property
    def num_heads(self) -> int:
        return self.spec.num_heads // self.size

    @property
    def num_kv_heads(self) -> int:
        """With more ranks than key-value heads, several ranks hold the same one."""
        return max(1, self.spec.num_kv_heads // self.size)

    @property
    def first_kv_head(self) -> int:
        return self.rank * self.spec.num_kv_heads // self.size

    @property
    def intermediate_size(self) -> int:
        return self.spec.intermediate_size // self.size

    @property
    def vocab_stride(self) -> int:
        """Vocabulary per rank; the last rank may hold fewer."""
        return -(-self.spec.vocab_size // self.size)

    @property
    def first_id(self) -> int:
        return min(self.rank * self.vocab_stride, self.spec.vocab_size)

    @property
    def num_ids(self) -> int:
        return min(self.vocab_stride, self.spec.vocab_size - self.first_id)


@dataclass(frozen=True, slots=True)
class Loader:
    """Builds this rank's operations from a checkpoint, one tensor at a time."""

    checkpoint: Checkpoint
    partition: Partition
    backend: Backend
    dtype: torch.dtype
    device: torch.device

    def vector(self, name: str) -> Tensor:
        """A norm's weight, whole on every rank."""
        (length,) = expected_shapes(self.partition.spec)[name]
        return self._read([(name, 0)], (length,))

    def qkv(self, prefix: str) -> Linear:
        """[N, hidden] -> [N, (heads + 2 kv heads) * head_dim]: q, then k, then v of this rank's heads."""
        part, dim = self.partition, self.partition.spec.head_dim
        q_len, kv_len = part.num_heads * dim, part.num_kv_heads * dim
        q_row, kv_row = part.rank * q_len, part.first_kv_head * dim
        pieces = [("q_proj", q_row, q_len), ("k_proj", kv_row, kv_len), ("v_proj", kv_row, kv_len)]
        return self._column(prefix, pieces, part.spec.has_qkv_bias)

    def gate_up(self, prefix: str) -> Linear:
        """[N, hidden] -> [N, 2 * intermediate]: gate, then up, of this rank's channels."""
        length = self.partition.intermediate_size
        row = self.partition.rank * length
        pieces = [("gate_proj", row, length), ("up_proj", row, length)]
        return self._column(prefix, pieces, self.partition.spec.has_mlp_bias)

    def output(self, prefix: str) -> Linear:
        """[N, heads * head_dim] -> [N, hidden]: a term of the sum over ranks."""
        length = self.partition.num_heads * self.partition.spec.head_dim
        return self._row(f"{prefix}.o_proj", length, self.partition.spec.has_o_bias)

    def down(self, prefix: str) -> Linear:
        """[N, intermediate] -> [N, hidden]: a term of the sum over ranks."""
        return self._row(
            f"{prefix}.down_proj", self.partition.intermediate_size, self.partition.spec.has_mlp_bias
        )

    def vocabulary(self, name: str) -> Tensor:
        """[num_ids, hidden]: this rank's rows of the embedding or the head."""
        part = self.partition
        return self._read([(name, part.first_id)], (part.num_ids, part.spec.hidden_size))

    def _column(self, prefix: str, pieces: Sequence[tuple[str, int, int]], has_bias: bool) -> Linear:
        names = [(f"{prefix}.{name}.weight", row) for name, row, _ in pieces]
        lengths = [length for _, _, length in pieces]
        weight = self._read(names, (sum(lengths), self.partition.spec.hidden_size), lengths)
        bias = None
        if has_bias:
            names = [(f"{prefix}.{name}.bias", row) for name, row, _ in pieces]
            bias = self._read(names, (sum(lengths),), lengths)
        return self.backend.linear(weight, bias)

    def _row(self, name: str, length: int, has_bias: bool) -> Linear:
        part = self.partition
        weight = self._empty((part.spec.hidden_size, length))
        self.checkpoint.read(f"{name}.weight", weight, first_column=part.rank * length)
        is_first = part.rank == 0  # the bias enters the sum once
        bias = self._read([(f"{name}.bias", 0)], (part.spec.hidden_size,)) if has_bias and is_first else None
        return self.backend.linear(weight, bias)

    def _read(
        self, names: Sequence[tuple[str, int]], shape: tuple[int, ...], lengths: Sequence[int] | None = None
    ) -> Tensor:
        """Stack rows of several tensors: (name, first row) each, `lengths` rows each."""
        fused = self._empty(shape)
        for (name, row), piece in zip(names, fused.split(list(lengths or shape[:1])), strict=True):
            self.checkpoint.read(name, piece, first_row=row)
        return fused

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class Embedding:
    """Token ids to their vectors, over all ranks."""

    def __init__(self, weight: Tensor, partition: Partition, collectives: Collectives) -> None:
        self.weight = narrowed(weight)  # [num_ids, hidden]
        self._dtype = weight.dtype
        self._partition = partition
        self._collectives = collectives

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[N] -> [N, hidden]; a new tensor."""
        if self._partition.size == 1:
            return self.weight[token_ids].to(self._dtype)
        local = token_ids - self._partition.first_id
        is_here = (local >= 0) & (local < self._partition.num_ids)
        vectors = self.weight[local.clamp(0, self._partition.num_ids - 1)].to(self._dtype)
        return self._collectives.all_reduce(vectors.masked_fill_(~is_here[:, None], 0))


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this architecture holds, by its Hugging Face name."""
    hidden, inner, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    q_len, kv_len = spec.num_heads * dim, spec.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.is_tied:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    linears = [
        ("self_attn.q_proj", q_len, hidden, spec.has_qkv_bias),
        ("self_attn.k_proj", kv_len, hidden, spec.has_qkv_bias),
        ("self_attn.v_proj", kv_len, hidden, spec.has_qkv_bias),
        ("self_attn.o_proj", hidden, q_len, spec.has_o_bias),
        ("mlp.gate_proj", inner, hidden, spec.has_mlp_bias),
        ("mlp.up_proj", inner, hidden, spec.has_mlp_bias),
        ("mlp.down_proj", hidden, inner, spec.has_mlp_bias),
    ]
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        for name, rows, columns, has_bias in linears:
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        if spec.has_qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (dim,)
    return shapes
