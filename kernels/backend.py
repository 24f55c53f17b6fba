"""The operations a model is written in, and the one place where their implementation is chosen.

A back end is chosen once, at start, from the device; nothing on the step path asks what is installed.

Shapes: N rows of a step, H hidden size, I feed-forward size, Hq and Hkv query and K/V heads (Hq a multiple of
Hkv; query head h reads K/V head h // (Hq // Hkv)), D head size, P pages.
"""

import logging
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..cluster.choices import BackendChoice, Device
from ..cluster.errors import ConfigError
from .dtypes import has_bfloat16_products
from .native_backend import NativeBackend
from .native_library import Isa, find_isa, library_path
from .rows import Rows
from .torch_backend import TorchBackend

log = logging.getLogger(__name__)

Linear = Callable[[Tensor], Tensor]  # [N, in] -> [N, out]


class AttentionPlan(Protocol):
    """Attention of one step's rows, prepared once and run by every layer that has the same mask."""

    def run(self, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        """softmax(q k^T / sqrt(D) + mask) v: q [N, Hq, D], pages [P, page, Hkv, D] -> [N, Hq, D], q's dtype.

        The K/V of all rows of the step must have been written before.
        """
        ...


class Backend(Protocol):
    """Operations over one device's tensors. Not thread-safe: it owns scratch memory that calls share."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Prepare x @ weight.T + bias for weight [out, in]; the caller drops its own reference to `weight`.

        The prepared form may be a copy in the device's own layout; only one copy stays alive.
        """
        ...

    def page_dtype(self, configured: torch.dtype, computed: torch.dtype) -> torch.dtype:
        """That of K/V pages, for a model configured in one dtype and computed in another."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis, accumulated in float32; x of any rank."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual). `residual` is consumed: it may be overwritten."""
        ...

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q [N, Hq, D] and k [N, Hkv, D] by their positions [N]; pair (i, i + D/2) shares an angle.

        cos_sin [max_len, D] float32: cosines of the D/2 angles, then their sines. New tensors are returned.
        """
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for gate_up [N, 2I] = gate | up."""
        ...

    def write_kv(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
        """Write k and v [N, Hkv, D] to slots [N] (distinct) of the pages [P, page, Hkv, D]."""
        ...

    def place_qkv(
        self,
        qkv: Tensor,
        rows: Rows,
        cos_sin: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        norms: tuple[Tensor, Tensor] | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """From qkv [N, (Hq + 2 Hkv) D] = q | k | v to what attention reads; returns q [N, Hq, D].

        Each head of q and k is normed with the weights [D] of `norms` (for q, for k), if given; then rotated
        by rows.positions; k and v are written to rows.slots. `qkv` is consumed.
        """
        ...

    def plan_attention(
        self,
        rows: Rows,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = True,
        window: int | None = None,
    ) -> AttentionPlan:
        """Prepare a step's attention: once per step and distinct (causal, window).

        Causal: a row sees the keys at its own position and before. Not causal: every row of a chunk sees all
        its context_len keys. Window W: a query at q sees keys k with q - k < W, and k - q < W if not causal.
        A plan is valid until the next step's first plan.
        """
        ...


def choose_backend(device: torch.device | str, choice: BackendChoice = "auto") -> Backend:
    """The back end for a device; call it once, at start. ConfigError for a choice that this machine has not.

    Where our own kernels cannot be compiled, torch does the same work more slowly.
    """
    device = torch.device(device)
    isa = native_isa(device, choice)
    if isa is None:
        return TorchBackend(device)
    try:
        return NativeBackend(isa)
    except ConfigError as error:
        if choice == "native":
            raise
        log.warning("Using torch's kernels, which are slower: %s", error)
        return TorchBackend(device)


def native_isa(device: torch.device, choice: BackendChoice) -> Isa | None:
    """The instruction set that our own kernels are to use on a device; None where torch's are.

    On a CPU whose bfloat16 products would be emulated ours are the fastest; one that has instructions for
    them (AMX, AVX-512 BF16) keeps oneDNN's, which use them. ConfigError if ours are asked for and cannot run.
    """
    isa = find_isa() if device.type == "cpu" else None
    if choice == "torch" or (choice == "auto" and has_bfloat16_products()):
        return None
    if isa is None and choice == "native":
        raise ConfigError(
            f"backend is native, which needs a CPU with AVX2 or AVX-512, and the device is {device.type}; "
            "choose auto or torch"
        )
    return isa


def prepare_backend(device: Device, choice: BackendChoice, report: Callable[[str], None]) -> None:
    """Compile now, while somebody watches, what `choose_backend` would compile in an engine's processes."""
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return
    isa = native_isa(torch.device("cpu"), choice)
    if isa is not None and not library_path(isa).exists():
        report("compiling the CPU kernels (once, about 10 s)")
        choose_backend("cpu", choice)
