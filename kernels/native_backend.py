"""The back end for CPUs in kernels of our own (`native/`): float32, over weights in bfloat16 if they are.

A weight whose every value is a bfloat16 is stored as such and expanded in registers: half the memory to read
per step, and the same bits as from float32. K/V pages are float32, or bfloat16, to which K and V are rounded
when they are written. What a row becomes depends on nothing but the row.
"""

import ctypes
import mmap

import numpy as np
import torch
from torch import Tensor

from .native_library import Isa, load_library
from .rows import Rows

_SLAB_BYTES = 256 << 20  # of addresses; memory is taken where it is written to
_ALIGNMENT = 64
_MAX_TILE_QUERIES = 48  # kQueries of attention.cpp
_MAX_HEAD_DIM = 256


class NativeBackend:
    """Implements `backend.Backend`; see there for shapes and meaning."""

    def __init__(self, isa: Isa) -> None:
        self.device = torch.device("cpu")
        self._library = load_library(isa)
        self._memory = WeightMemory()

    def linear(self, weight: Tensor, bias: Tensor | None) -> "NativeLinear":
        return NativeLinear(self._library, self._memory, weight, bias)

    def page_dtype(self, configured: torch.dtype, computed: torch.dtype) -> torch.dtype:
        """What is configured: half the memory to read and to keep, where that is bfloat16."""
        del computed
        return configured

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, width).contiguous()
        out = torch.empty(x.shape)
        self._norm(rows, None, weight, eps, out)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        assert residual.is_contiguous()
        x = x.contiguous()
        out = torch.empty(x.shape)
        self._norm(x.view(-1, x.shape[-1]), residual, weight, eps, out)
        return out, residual

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        return self._rotate(q, positions, cos_sin), self._rotate(k, positions, cos_sin)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        assert gate_up.is_contiguous()
        assert gate_up.dtype == torch.float32
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(num_rows, width)
        self._library.silu_and_mul(gate_up.data_ptr(), num_rows, width, out.data_ptr(), _num_threads())
        return out

    def write_kv(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
        k, v = _rows_of_heads(k), _rows_of_heads(v)
        width = k.shape[1] * k.shape[2]
        self._library.write_kv(
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            len(k),
            width,
            slots.data_ptr(),
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            _is_bfloat16(k_pages, v_pages),
        )

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
        assert qkv.is_contiguous()
        assert k_pages.is_contiguous()
        assert v_pages.is_contiguous()
        num_kv_heads, head_dim = k_pages.shape[2:]
        num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
        self._library.place_qkv(
            qkv.data_ptr(),
            len(qkv),
            num_heads,
            num_kv_heads,
            head_dim,
            rows.positions.data_ptr(),
            cos_sin.data_ptr(),
            None if norms is None else norms[0].data_ptr(),
            None if norms is None else norms[1].data_ptr(),
            eps,
            rows.slots.data_ptr(),
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            _is_bfloat16(k_pages, v_pages),
            _num_threads(),
        )
        return qkv[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))

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
    ) -> "NativeAttention":
        return NativeAttention(
            self._library,
            rows,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            causal=causal,
            window=window,
        )

    def _norm(self, rows: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
        assert rows.dtype == weight.dtype == torch.float32
        self._library.rms_norm(
            rows.data_ptr(),
            rows.stride(0),
            rows.shape[0],
            rows.shape[1],
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            _num_threads(),
        )

    def _rotate(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        x = _rows_of_heads(x)
        out = torch.empty(x.shape)
        self._library.rope(
            x.data_ptr(),
            x.stride(0),
            *x.shape,
            positions.data_ptr(),
            cos_sin.data_ptr(),
            out.data_ptr(),
            _num_threads(),
        )
        return out


class WeightMemory:
    """Memory for packed weights, in large pieces that the system may back with huge pages.

    Weights are read once per step from end to end; with pages of 4 KiB each of them costs a look-up.
    """

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of its own, at a multiple of the cache line."""
        num_taken = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if num_taken > len(self._slab):
            self._slab = _map_slab(max(num_taken, _SLAB_BYTES))
        piece, self._slab = self._slab[:num_bytes], self._slab[num_taken:]
        return piece


def _map_slab(num_bytes: int) -> Tensor:
    """Zeros that take memory only where they are written to."""
    slab = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        slab.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(slab, dtype=torch.uint8)


class NativeLinear:
    """x @ weight.T + bias over the packed weight; the plain one can be freed."""

    def __init__(
        self, library: ctypes.CDLL, memory: WeightMemory, weight: Tensor, bias: Tensor | None
    ) -> None:
        weight = weight.float().contiguous()
        self._library = library
        self._num_out, self._num_in = weight.shape
        self.is_bfloat16 = bool(library.is_bfloat16_exact(weight.data_ptr(), weight.numel()))
        self._packed = memory.take(library.packed_bytes(self._num_out, self._num_in, self.is_bfloat16))
        library.pack(
            weight.data_ptr(), self._num_out, self._num_in, self.is_bfloat16, self._packed.data_ptr()
        )
        self._bias = None if bias is None else bias.float().contiguous()
        self._weight_at = self._packed.data_ptr()
        self._bias_at = None if self._bias is None else self._bias.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        num_rows, num_in = x.shape
        assert num_in == self._num_in
        assert x.dtype == torch.float32
        if x.stride(1) != 1:
            x = x.contiguous()
        y = torch.empty(num_rows, self._num_out)
        self._library.linear(
            x.data_ptr(),
            x.stride(0),
            num_rows,
            self._weight_at,
            self.is_bfloat16,
            num_in,
            self._num_out,
            self._bias_at,
            y.data_ptr(),
            _num_threads(),
        )
        return y


class _Plan(ctypes.Structure):
    """AttentionPlan of attention.cpp."""

    _fields_ = (
        ("first_rows", ctypes.c_void_p),
        ("query_lens", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("hidden_lens", ctypes.c_void_p),
        ("page_tables", ctypes.c_void_p),
        ("tile_chunks", ctypes.c_void_p),
        ("tile_firsts", ctypes.c_void_p),
        ("table_len", ctypes.c_int64),
        ("num_tiles", ctypes.c_int64),
        ("tile_len", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("page_shift", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("is_causal", ctypes.c_bool),
    )


class NativeAttention:
    """Implements `backend.AttentionPlan`: the step's chunks, cut into tiles of few rows."""

    def __init__(
        self,
        library: ctypes.CDLL,
        rows: Rows,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool,
        window: int | None,
    ) -> None:
        assert num_heads % num_kv_heads == 0
        assert head_dim <= _MAX_HEAD_DIM
        assert page_size.bit_count() == 1
        group = num_heads // num_kv_heads
        assert group <= _MAX_TILE_QUERIES
        self._library = library
        tile_len = _MAX_TILE_QUERIES // group
        num_chunks = len(rows.query_lens)
        query_lens = np.array(rows.query_lens, np.int64)
        num_tiles = -(-query_lens // tile_len)
        first_tiles = np.cumsum(num_tiles) - num_tiles
        tile_chunks = np.repeat(np.arange(num_chunks), num_tiles)
        self._arrays = (
            np.cumsum(query_lens) - query_lens,
            query_lens,
            np.array(rows.context_lens, np.int64),
            np.array(rows.hidden_lens or [0] * num_chunks, np.int64),
        )
        self._tables = rows.page_tables.contiguous()
        self._tiles = (tile_chunks, (np.arange(len(tile_chunks)) - first_tiles[tile_chunks]) * tile_len)
        self._plan = _Plan(
            *(array.ctypes.data for array in self._arrays),
            self._tables.data_ptr(),
            *(array.ctypes.data for array in self._tiles),
            self._tables.shape[1],
            len(tile_chunks),
            tile_len,
            num_heads,
            num_kv_heads,
            head_dim,
            page_size.bit_length() - 1,
            window or 0,
            causal,
        )
        self._plan_at = ctypes.addressof(self._plan)

    def run(self, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        assert q.dtype == torch.float32
        q = _rows_of_heads(q)
        out = torch.empty(q.shape)
        self._library.attention(
            self._plan_at,
            q.data_ptr(),
            q.stride(0),
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            _is_bfloat16(k_pages, v_pages),
            out.data_ptr(),
            _num_threads(),
        )
        return out


def _rows_of_heads(x: Tensor) -> Tensor:
    """x [N, heads, D] with each row's heads in one piece; rows may lie apart."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _is_bfloat16(k_pages: Tensor, v_pages: Tensor) -> bool:
    assert k_pages.dtype == v_pages.dtype
    assert k_pages.dtype in (torch.bfloat16, torch.float32)
    return k_pages.dtype == torch.bfloat16


def _num_threads() -> int:
    return torch.get_num_threads()
