"""Whether a model's weights and K/V fit the memory they would have: read from headers, nothing is loaded."""

from dataclasses import dataclass
from math import prod
from pathlib import Path

import psutil
import torch
from safetensors import safe_open

from ..cluster.config import Config
from ..kernels.backend import native_isa
from ..kernels.dtypes import DTYPES, compute_dtype
from ..workers.kv_cache import budget_bytes, count_pages, page_bytes
from ..workers.layers import Partition
from ..workers.spec import ModelSpec

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Fit:
    """What the ranks would hold. `needed_bytes` and `available_bytes` are of a GPU, or of the machine."""

    architecture: str
    num_ranks: int
    weight_bytes: int  # of all ranks
    weight_dtype: str
    kv_bytes: int  # of all ranks
    num_tokens: int  # for which there is K/V
    max_model_len: int
    needed_bytes: int
    available_bytes: int
    place: str  # whose memory it is

    def __str__(self) -> str:
        ranks = f"{self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"
        return (
            f"{self.architecture}: weights {self.weight_bytes / GIB:.2f} GiB in {self.weight_dtype}, "
            f"K/V {self.kv_bytes / GIB:.2f} GiB, over {ranks}"
        )


def measure_fit(config: Config, path: Path, drafter_path: Path | None) -> Fit:
    """The fit of the checkpoint at `path` and its drafter. Raises UserError where `config` contradicts it."""
    engine, num_ranks = config.engine, config.engine.tensor_parallel_size
    spec = ModelSpec.load(path)
    spec.check_tensor_parallel(num_ranks)
    device = torch.device("cuda" if engine.device != "cpu" and torch.cuda.is_available() else "cpu")
    dtype = compute_dtype(config.model.dtype, device, engine.backend)
    # Our own CPU kernels compute in float32 from weights and pages that stay as they are stored.
    is_native = native_isa(device, engine.backend) is not None
    weight_bytes = _weight_bytes(path, dtype, keeps_bfloat16=is_native)
    if drafter_path is not None:  # whole on every rank
        weight_bytes += _weight_bytes(drafter_path, dtype, keeps_bfloat16=is_native) * num_ranks
    if device.type == "cuda":
        place, available = "of each GPU", int(torch.cuda.mem_get_info()[1] * engine.gpu_memory_utilization)
        if engine.kv_cache_gib is not None:
            rank_kv_bytes = int(engine.kv_cache_gib * GIB / num_ranks)
        else:
            rank_kv_bytes = max(0, available - weight_bytes // num_ranks)
        needed = weight_bytes // num_ranks + rank_kv_bytes
    else:
        rank_kv_bytes = budget_bytes(engine.kv_cache_gib, num_ranks, engine.gpu_memory_utilization, device)
        place, available = "of this machine", available_memory_bytes()
        needed = weight_bytes + rank_kv_bytes * num_ranks
    max_model_len = config.model.max_model_len or spec.max_model_len
    num_tokens = 0
    if needed <= available:
        page_dtype = DTYPES[config.model.dtype] if is_native else dtype
        num_bytes = page_bytes(Partition(spec, 0, num_ranks), engine.page_size, page_dtype)
        num_tokens = count_pages(rank_kv_bytes, num_bytes, engine.page_size, max_model_len) * engine.page_size
    return Fit(
        architecture=spec.architecture,
        num_ranks=num_ranks,
        weight_bytes=weight_bytes,
        weight_dtype="bfloat16" if is_native else str(dtype).removeprefix("torch."),
        kv_bytes=rank_kv_bytes * num_ranks,
        num_tokens=num_tokens,
        max_model_len=max_model_len,
        needed_bytes=needed,
        available_bytes=available,
        place=place,
    )


def available_memory_bytes() -> int:
    """What can still be allocated: the machine's, or less in a container with a limit."""
    available = psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        available = min(available, max(0, int(text) - int(used.read_text())))
    return available


def _weight_bytes(path: Path, dtype: torch.dtype, *, keeps_bfloat16: bool) -> int:
    """Memory of a checkpoint's tensors in `dtype`, or in two bytes where bfloat16 is kept."""
    count = 0
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            names = opened.keys()
            for part in map(opened.get_slice, names):
                is_kept = keeps_bfloat16 and part.get_dtype() == "BF16"
                count += prod(part.get_shape()) * (2 if is_kept else dtype.itemsize)
    return count
