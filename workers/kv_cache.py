"""The paged K/V of one rank: its memory, and how many pages fit."""

import torch
from torch import Tensor

from ..cluster.errors import ConfigError
from .layers import Partition

GIB = 1 << 30
_CPU_DEFAULT_GIB = 1.0


class KvCache:
    """K and V of every layer in pages; which page is whose is the scheduler's knowledge alone."""

    def __init__(
        self, partition: Partition, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (
            partition.spec.num_layers,
            2,
            num_pages,
            page_size,
            partition.num_kv_heads,
            partition.spec.head_dim,
        )
        # Zeros, not empty: padding in page tables points at page 0, and 0 * NaN would not vanish.
        memory = torch.zeros(shape, dtype=dtype, device=device)
        self.num_pages = num_pages
        self.page_size = page_size
        self.k_pages: list[Tensor] = [layer[0] for layer in memory]  # each [pages, page, kv heads, head_dim]
        self.v_pages: list[Tensor] = [layer[1] for layer in memory]


def page_bytes(partition: Partition, page_size: int, dtype: torch.dtype) -> int:
    """Memory of one page on one rank, K and V of all layers."""
    row = partition.num_kv_heads * partition.spec.head_dim * dtype.itemsize
    return 2 * partition.spec.num_layers * page_size * row


def count_pages(budget_bytes: int, page_bytes: int, page_size: int, max_model_len: int) -> int:
    """How many pages fit; ConfigError when they cannot hold one sequence of `max_model_len`."""
    num_pages = budget_bytes // page_bytes
    num_needed = -(-max_model_len // page_size)
    if num_pages < num_needed:
        raise ConfigError(
            f"the K/V memory of {budget_bytes / GIB:.2f} GiB per rank holds {num_pages * page_size} tokens, "
            f"less than one sequence of max_model_len {max_model_len} "
            f"({num_needed * page_bytes / GIB:.2f} GiB per rank); raise kv_cache_gib or lower max_model_len"
        )
    return num_pages


def budget_bytes(
    kv_cache_gib: float | None, num_ranks: int, gpu_memory_utilization: float, device: torch.device
) -> int:
    """K/V memory of one rank. On a GPU without a configured size, what is free now within the utilisation.

    Call after the weights are loaded and a largest step has run, so that its peak is accounted for.
    """
    if kv_cache_gib is not None:
        return int(kv_cache_gib * GIB / num_ranks)
    if device.type == "cpu":
        return int(_CPU_DEFAULT_GIB * GIB / num_ranks)
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    peak = torch.cuda.max_memory_allocated(device)
    used_by_others = total - free - reserved
    return max(0, int(total * gpu_memory_utilization) - used_by_others - peak)
