"""What the ranks compute together: sums and gathers over one value per rank.

Every collective returns the same bits on every rank: that is why each rank can hold the residual stream,
and the scheduler trust rank 0's tokens for all. All ranks call the same collectives in the same order.
"""

import platform
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..cluster.errors import ConfigError
from .shared_memory import SharedMemory

CollectivesKind = Literal["solo", "shared-memory", "gloo", "nccl"]


class Collectives(Protocol):
    """The ranks of one engine, as one of them sees them. A lost rank raises RankLost."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks; may reuse x's memory."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape], in order of rank."""
        ...

    def barrier(self) -> None:
        """Return once every rank has called it."""
        ...

    def close(self) -> None:
        """Release what the collectives hold; harmless twice."""
        ...


class Solo:
    """One rank alone."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


class TorchDistributed:
    """torch.distributed: NCCL between GPUs, gloo between CPUs of several nodes."""

    def __init__(
        self,
        backend: Literal["nccl", "gloo"],
        rank: int,
        size: int,
        store: dist.Store,  # pyright: ignore[reportPrivateImportUsage]
    ) -> None:
        self.rank = rank
        self.size = size
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        dist.all_gather_single(gathered, x.contiguous()[None])
        return gathered

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def choose_kind(size: int, device: torch.device, *, is_one_node: bool) -> CollectivesKind:
    """The fastest collectives that work between these ranks."""
    if size == 1:
        return "solo"
    if device.type == "cuda":
        return "nccl"
    # Flags and payload are ordered by x86's memory model; other machines would need fences Python lacks.
    return "shared-memory" if is_one_node and platform.machine() in ("x86_64", "AMD64") else "gloo"


def connect(
    kind: CollectivesKind,
    *,
    rank: int,
    size: int,
    store: dist.Store | None = None,  # pyright: ignore[reportPrivateImportUsage]
    capacity_bytes: int = 4 << 20,
    timeout_s: float = 60.0,
) -> Collectives:
    """Join the ranks' collectives; returns once all have joined.

    `store` is the rendezvous every rank shares (needed above one rank). `capacity_bytes` is the largest value
    the shared-memory kind passes in one piece: with `max_num_batched_tokens * hidden_size * 4` every
    all-reduce is one. `timeout_s` bounds each of its waits for another rank.
    """
    if kind == "solo":
        if size != 1:
            raise ConfigError(f"{size} ranks cannot be solo; choose shared-memory, gloo or nccl")
        return Solo()
    assert store is not None, "more than one rank needs a store to meet at"
    if kind == "shared-memory":
        return SharedMemory.join(
            rank=rank, size=size, store=store, capacity_bytes=capacity_bytes, timeout_s=timeout_s
        )
    return TorchDistributed(kind, rank, size, store)
