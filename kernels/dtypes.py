"""The dtype that weights of a configured dtype are computed in, chosen once at start from the device."""

import torch
from torch import Tensor

from ..cluster.choices import BackendChoice, Dtype

DTYPES: dict[Dtype, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def compute_dtype(configured: Dtype, device: torch.device, backend: BackendChoice = "auto") -> torch.dtype:
    """What was configured, except on a CPU that would emulate bfloat16 products: there it is float32.

    An emulated product of 8 rows or more takes two to three times as long as the float32 one of the same
    weights. A single row would be faster by a third, but its bits would then depend on how many rows share a
    step; in float32 they do not. Our own kernels compute in float32 only, from weights kept in bfloat16;
    torch's weights take twice the memory.
    """
    if device.type == "cpu" and (backend == "native" or not has_bfloat16_products()):
        return torch.float32
    return DTYPES[configured]


def narrowed(weight: Tensor) -> Tensor:
    """A float32 weight [rows, columns] in bfloat16 if that loses no bit of it, else as it is."""
    parts = weight.split(4096)  # the check takes little memory, and ends at the first that differs
    is_exact = weight.dtype == torch.float32 and all(
        torch.equal(part.bfloat16().float(), part) for part in parts
    )
    return weight.bfloat16() if is_exact else weight


def has_bfloat16_products() -> bool:
    """Whether this CPU has instructions for them; those that are not x86 are taken at their word."""
    capabilities = torch.cpu.get_capabilities()
    if capabilities.get("architecture") != "x86_64":
        return True
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
