"""Collectives between processes of one machine through one shared block of memory.

Each collective has a number, the same on all ranks. A rank copies its value into its own slot, then raises
its flag to that number, then waits until every flag has reached it, then reads all slots in order of rank (so
all ranks add in the same order and hold the same bits). Slots are doubled by the parity of the number: a rank
can be at most one collective ahead of another, so no slot is overwritten while it is read. Flags are 64 bytes
apart, so that no two ranks write one cache line.
"""

import mmap
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor

from ..cluster.errors import RankLost

_LINE_BYTES = 64
_NUM_SPINS = 200  # reads of the flags before the processor is offered to others
_YIELD_S = 0.0002  # then yield for this long, then sleep between looks: on a crowded machine yielding starves
_SLEEP_S = 0.00005


class SharedMemory:
    """One rank's end of the block, which has no name and lives exactly as long as a rank maps it."""

    def __init__(self, block: mmap.mmap, *, rank: int, size: int, slot_bytes: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._slot_bytes = slot_bytes
        self._timeout_s = timeout_s
        self._number = 0
        flags_bytes = size * _LINE_BYTES
        self._flags = memoryview(block)[:flags_bytes].cast("q")
        self._flag_indices = range(0, flags_bytes // 8, _LINE_BYTES // 8)
        self._own_flag = self._flag_indices[rank]
        raw = torch.frombuffer(block, dtype=torch.uint8, offset=flags_bytes, count=2 * size * slot_bytes)
        self._slots = raw.view(2, size, slot_bytes)
        self._views: dict[tuple[torch.dtype, int], tuple[Tensor, Tensor]] = {}

    @classmethod
    def join(
        cls,
        *,
        rank: int,
        size: int,
        store: dist.Store,  # pyright: ignore[reportPrivateImportUsage]
        capacity_bytes: int,
        timeout_s: float,
    ) -> "SharedMemory":
        """Create the block (rank 0) or map it through rank 0's descriptor (others); returns when all have."""
        slot_bytes = -(-capacity_bytes // _LINE_BYTES) * _LINE_BYTES
        total_bytes = size * _LINE_BYTES + 2 * size * slot_bytes
        key = "paceline/collectives"
        if rank == 0:
            descriptor = os.memfd_create("paceline-collectives")
            os.ftruncate(descriptor, total_bytes)
            store.set(key, f"/proc/{os.getpid()}/fd/{descriptor}")
        else:
            descriptor = os.open(store.get(key).decode(), os.O_RDWR)
        block = mmap.mmap(descriptor, total_bytes)
        joined = cls(block, rank=rank, size=size, slot_bytes=slot_bytes, timeout_s=timeout_s)
        joined.barrier()
        os.close(descriptor)
        return joined

    def all_reduce(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        limit = self._slot_bytes // x.element_size()
        if len(flat) <= limit:
            return self._exchange(flat).sum(0).view(x.shape)
        return torch.cat([self._exchange(piece).sum(0) for piece in flat.split(limit)]).view(x.shape)

    def all_gather(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        limit = self._slot_bytes // x.element_size()
        pieces = [self._exchange(piece).clone() for piece in flat.split(limit)]
        return torch.cat(pieces, dim=1).view(self.size, *x.shape)

    def barrier(self) -> None:
        self._number += 1
        self._raise_flag()

    def close(self) -> None:
        # The last reference unmaps the block; unmapping by hand could pull it from under a tensor.
        self._views.clear()
        self._slots = torch.empty((2, self.size, 0), dtype=torch.uint8)

    def _exchange(self, flat: Tensor) -> Tensor:
        """[n] -> [size, n], a view of the slots that holds until the next collective but one."""
        self._number += 1
        slots = self._view(flat.dtype, len(flat))[self._number % 2]
        slots[self.rank].copy_(flat)
        self._raise_flag()
        return slots

    def _view(self, dtype: torch.dtype, num_values: int) -> tuple[Tensor, Tensor]:
        key = (dtype, num_values)
        if key not in self._views:
            self._views[key] = (
                self._slots[0].view(dtype)[:, :num_values],
                self._slots[1].view(dtype)[:, :num_values],
            )
        return self._views[key]

    def _raise_flag(self) -> None:
        number, flags = self._number, self._flags
        flags[self._own_flag] = number
        for index in self._flag_indices:
            num_looks = 0
            while flags[index] < number:
                num_looks += 1
                if num_looks > _NUM_SPINS:
                    self._wait(index)

    def _wait(self, index: int) -> None:
        """The slow side of waiting for one flag; raises RankLost at the deadline."""
        began = time.monotonic()
        while self._flags[index] < self._number:
            waited = time.monotonic() - began
            if waited < _YIELD_S:
                os.sched_yield()
            elif waited < self._timeout_s:
                time.sleep(_SLEEP_S)
            else:
                rank = index // (_LINE_BYTES // 8)
                raise RankLost(
                    f"rank {rank} did not join collective {self._number} within {self._timeout_s} s"
                )
