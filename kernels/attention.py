"""Paged attention in torch: a step's chunks are sorted into few groups, each one gather and one SDPA call.

A loop over sequences costs a Python round trip per sequence and layer, so chunks with few rows (decodes,
drafted blocks) share a call, padded to the longest of their group. Groups are cut where padding would cost
more than another call. A chunk with many rows (prefill) is a group of its own. Everything that depends only
on lengths and page tables is built once, in `AttentionGroups`; a layer runs the gathers and the product.

Padding never reads another sequence's memory: padded keys repeat a key of the same chunk, so a non-finite
value stays with the sequence that made it (0 * nan is nan).

A row gets the same bits in any batch. SDPA on CPU sums keys block by block, and a masked tail or block adds
exact zeros; so it is enough that blocks start at the same positions (windows are cut at whole blocks) and
that a partial block has a length at which the matrix product keeps its summation order (`_padded_len`; the
test that compares bits found it).

Legend: G chunks of a group, Q rows per chunk, C keys per chunk, R = Hq // Hkv.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .rows import Rows

MAX_SHORT_QUERY_LEN = 16
# SDPA on CPU walks the keys in blocks of this many, counted from the first.
BLOCK_LEN = 512
PADDING_LEN = 16
# Numbers of K that may be gathered for nothing in one group: beyond it another call is cheaper (measured: a
# call costs what 600 keys of 3 heads of 64 cost; the figure need not be exact).
MAX_PADDING_SIZE = 100_000


class GatherScratch:
    """Memory the gathered K and V of one group are written to; grown to the largest group and reused.

    The operating system maps and zeroes fresh memory of this size on every call, which costs more than the
    gather itself.
    """

    def __init__(self) -> None:
        self._k = torch.empty(0)
        self._v = torch.empty(0)

    def gather(self, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Rows `slots` [C] of both pools [P, page, Hkv, D]: two [C, Hkv, D], valid until the next call."""
        width = k_pages.shape[2] * k_pages.shape[3]
        size = slots.shape[0] * width
        if self._k.numel() < size or self._k.dtype != k_pages.dtype or self._k.device != k_pages.device:
            self._k = torch.empty(size, dtype=k_pages.dtype, device=k_pages.device)
            self._v = torch.empty_like(self._k)
        k = self._k[:size].view(-1, width)
        v = self._v[:size].view(-1, width)
        torch.index_select(k_pages.view(-1, width), 0, slots, out=k)
        torch.index_select(v_pages.view(-1, width), 0, slots, out=v)
        return k.view(-1, *k_pages.shape[2:]), v.view(-1, *v_pages.shape[2:])


class AttentionGroups:
    """The attention plan of one step: groups of chunks with their index tensors and masks."""

    def __init__(
        self,
        rows: Rows,
        scratch: GatherScratch,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool,
        window: int | None,
    ) -> None:
        assert num_heads % num_kv_heads == 0
        max_padding_len = MAX_PADDING_SIZE // (num_kv_heads * head_dim)
        first_rows = [0]
        for query_len in rows.query_lens:
            first_rows.append(first_rows[-1] + query_len)
        hidden_lens = rows.hidden_lens or [0] * len(rows.query_lens)
        num_keys = [
            _num_keys(query_len, context_len, hidden_len, window)
            for query_len, context_len, hidden_len in zip(
                rows.query_lens, rows.context_lens, hidden_lens, strict=True
            )
        ]
        groups = _group_chunks(rows.query_lens, num_keys, max_padding_len)
        self._groups = [
            _Group(
                rows,
                chunks,
                [first_rows[chunk] for chunk in chunks],
                [num_keys[chunk] for chunk in chunks],
                scratch,
                num_kv_heads=num_kv_heads,
                page_size=page_size,
                causal=causal,
                window=window,
            )
            for chunks in groups
        ]

    def run(self, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        if len(self._groups) == 1 and self._groups[0].is_whole_step:
            return self._groups[0].attend(q, k_pages, v_pages)
        out = torch.empty_like(q)
        for group in self._groups:
            out.index_copy_(
                0, group.row_ids, group.attend(q.index_select(0, group.padded_row_ids), k_pages, v_pages)
            )
        return out


def _group_chunks(
    query_lens: Sequence[int], num_keys: Sequence[int], max_padding_len: int
) -> list[list[int]]:
    """Chunk indices of every group; within a group in step order."""
    groups: list[list[int]] = []
    decodes: list[int] = []
    blocks: list[int] = []
    for chunk, query_len in enumerate(query_lens):
        if query_len > MAX_SHORT_QUERY_LEN:
            groups.append([chunk])
        else:
            (decodes if query_len == 1 else blocks).append(chunk)
    for chunks in (decodes, blocks):
        order = sorted(chunks, key=lambda chunk: -num_keys[chunk])
        start, padding = 0, 0
        for place, chunk in enumerate(order):
            padding += num_keys[order[start]] - num_keys[chunk]
            if padding > max_padding_len:
                groups.append(sorted(order[start:place]))
                start, padding = place, 0
        if order:
            groups.append(sorted(order[start:]))
    return groups


def _num_keys(query_len: int, context_len: int, hidden_len: int, window: int | None) -> int:
    """Keys to read, up to the context's end: not the hidden, nor blocks behind every row's window."""
    num_seen = context_len - hidden_len
    if window is None:
        return num_seen
    return min(num_seen, context_len - max(context_len - query_len - window + 1, 0) // BLOCK_LEN * BLOCK_LEN)


def _padded_len(num_keys: int) -> int:
    """The number of keys C that a group with `num_keys` is computed with."""
    whole, rest = num_keys // BLOCK_LEN * BLOCK_LEN, num_keys % BLOCK_LEN
    return whole + (BLOCK_LEN if rest > BLOCK_LEN // 2 else -(-rest // PADDING_LEN) * PADDING_LEN)


class _Group:
    """Chunks that share one SDPA call, padded to Q rows and C keys."""

    def __init__(
        self,
        rows: Rows,
        chunks: list[int],
        first_rows: list[int],
        num_keys: list[int],
        scratch: GatherScratch,
        *,
        num_kv_heads: int,
        page_size: int,
        causal: bool,
        window: int | None,
    ) -> None:
        device = rows.positions.device
        query_lens = [rows.query_lens[chunk] for chunk in chunks]
        context_lens = [rows.context_lens[chunk] for chunk in chunks]
        self._scratch = scratch
        self._num_kv_heads = num_kv_heads
        self._num_chunks = len(chunks)
        self._query_len = max(query_lens)
        self._num_keys = _padded_len(max(num_keys))
        self._is_long = self._query_len > MAX_SHORT_QUERY_LEN

        lens = torch.tensor([query_lens, context_lens, num_keys, first_rows], device=device)
        query_len, context_len, key_len, first_row = lens.unsqueeze(-1)  # each [G, 1]
        query = torch.arange(self._query_len, device=device)  # [Q]
        key = torch.arange(self._num_keys, device=device)  # [C]
        is_key = key < key_len  # [G, C]
        key_positions = torch.where(is_key, context_len - key_len + key, context_len - 1)  # [G, C]
        tables = rows.page_tables[chunks[0] : chunks[0] + 1] if len(chunks) == 1 else rows.page_tables[chunks]
        pages = tables.gather(1, key_positions // page_size)
        self._slots = (pages * page_size + key_positions % page_size).view(-1)  # [G * C]

        is_row = query < query_len  # [G, Q]
        self._is_ragged = min(query_lens) < self._query_len
        self._valid = is_row.view(-1).nonzero().view(-1) if self._is_ragged else None
        # A padding row repeats the chunk's first one, and is dropped.
        padded = torch.where(is_row, first_row + query, first_row).view(-1)
        self.padded_row_ids = padded  # [G * Q]
        self.row_ids = padded if self._valid is None else padded[self._valid]
        self.is_whole_step = len(chunks) == len(rows.query_lens) and not self._is_ragged

        self._is_causal = causal and self._is_long and num_keys == query_lens and window is None
        is_full = min(num_keys) == self._num_keys and window is None and (not causal or self._query_len == 1)
        self._visible: Tensor | None = None
        self._bias: Tensor | None = None
        if not is_full and not self._is_causal:
            query_positions = (context_len - query_len + query).unsqueeze(-1)  # [G, Q, 1]
            distance = query_positions - key_positions.unsqueeze(1)  # [G, Q, C]
            visible = is_key.unsqueeze(1).expand(-1, self._query_len, -1)
            if causal:
                visible = visible & (distance >= 0)
            if window is not None:
                visible = visible & (distance.abs() < window)
            self._visible = visible

    def attend(self, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        """q [G * Q, Hq, D], padded as `padded_row_ids` -> the group's rows [len(row_ids), Hq, D]."""
        num_rows, num_heads, head_dim = q.shape
        chunks, query_len, heads = self._num_chunks, self._query_len, self._num_kv_heads
        k, v = self._scratch.gather(k_pages, v_pages, self._slots)
        k = k.view(chunks, -1, heads, head_dim).transpose(1, 2)  # [G, Hkv, C, D]
        v = v.view(chunks, -1, heads, head_dim).transpose(1, 2)
        bias = self._bias_of(q.dtype, num_heads)
        q = q.view(chunks, query_len, num_heads, head_dim)
        if self._is_long:
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k,
                v,
                attn_mask=bias,
                is_causal=self._is_causal,
                enable_gqa=num_heads != heads,
            ).transpose(1, 2)
        else:
            # The R query heads of a K/V head become rows of one product, so K/V is read once.
            q = q.view(chunks, query_len, heads, -1, head_dim).permute(0, 2, 3, 1, 4)  # [G, Hkv, R, Q, D]
            out = F.scaled_dot_product_attention(
                q.reshape(chunks, heads, -1, head_dim), k, v, attn_mask=bias
            )  # [G, Hkv, R * Q, D]
            out = out.view(chunks, heads, -1, query_len, head_dim).permute(0, 3, 1, 2, 4)
        out = out.reshape(num_rows, num_heads, head_dim)
        return out if self._valid is None else out.index_select(0, self._valid)

    def _bias_of(self, dtype: torch.dtype, num_heads: int) -> Tensor | None:
        """The mask as an additive bias in q's dtype, made by the first layer that runs."""
        if self._visible is None:
            return None
        if self._bias is None or self._bias.dtype != dtype:
            bias = torch.zeros(self._visible.shape, dtype=dtype, device=self._visible.device)
            bias.masked_fill_(~self._visible, float("-inf"))  # [G, Q, C]
            repeat = 1 if self._is_long else num_heads // self._num_kv_heads
            self._bias = bias.repeat(1, repeat, 1).unsqueeze(1)  # [G, 1, R * Q, C]
        return self._bias
