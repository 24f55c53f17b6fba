"""The back ends this machine has: torch's, and our own for each instruction set of its CPU."""

import torch

from paceline.kernels.backend import Backend
from paceline.kernels.native_backend import NativeBackend
from paceline.kernels.native_library import Isa, find_isa
from paceline.kernels.torch_backend import TorchBackend

_NARROWER: dict[Isa | None, tuple[Isa, ...]] = {"avx512": ("avx512", "avx2"), "avx2": ("avx2",), None: ()}
ISAS = _NARROWER[find_isa()]
NAMES = ("torch", *ISAS)
COMPUTED = [
    ("torch", torch.float32),
    ("torch", torch.bfloat16),
    *((isa, torch.float32) for isa in ISAS),
]


def make_backend(name: str) -> Backend:
    for isa in ISAS:
        if name == isa:
            return NativeBackend(isa)
    return TorchBackend(torch.device("cpu"))
