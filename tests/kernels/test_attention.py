"""Paged attention equals the naive reference, isolates sequences, gives a row the same bits in any batch."""

import dataclasses
from collections.abc import Sequence

import back_ends
import pytest
import torch
from torch import Tensor

from paceline.kernels import reference
from paceline.kernels.backend import Backend
from paceline.kernels.rows import Rows

PAGE = 16
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}

MIXES = {
    "one decode": [(1, 5)],
    "first token": [(1, 1)],
    "decodes of like length": [(1, 40), (1, 33), (1, 48)],
    "decodes of unlike length": [(1, 3), (1, 700), (1, 64)],
    "whole short prompt": [(8, 8)],
    "whole long prompt": [(33, 33)],
    "later chunk of a prompt": [(40, 90)],
    "blocks of one length": [(4, 20), (4, 75)],
    "blocks of several lengths": [(2, 17), (16, 16), (9, 130)],
    "everything at once": [(20, 20), (1, 9), (5, 60), (1, 300), (33, 70), (1, 31), (16, 100)],
}


@pytest.fixture(params=back_ends.NAMES)
def backend(request: pytest.FixtureRequest) -> Backend:
    return back_ends.make_backend(request.param)


def make_rows(chunks: Sequence[tuple[int, int]], seed: int = 0) -> tuple[Rows, int]:
    """Rows of chunks (query_len, context_len) over shuffled pages, and how many pages there are."""
    num_pages = [-(-context_len // PAGE) for _, context_len in chunks]
    order = torch.randperm(sum(num_pages) + 3, generator=torch.Generator().manual_seed(seed))
    tables = torch.zeros(len(chunks), max(num_pages), dtype=torch.int64)
    positions, slots, taken = [], [], 0
    for chunk, (query_len, context_len) in enumerate(chunks):
        tables[chunk, : num_pages[chunk]] = order[taken : taken + num_pages[chunk]]
        taken += num_pages[chunk]
        places = torch.arange(context_len - query_len, context_len)
        positions.append(places)
        slots.append(tables[chunk, places // PAGE] * PAGE + places % PAGE)
    return (
        Rows(torch.cat(positions), torch.cat(slots), [q for q, _ in chunks], [c for _, c in chunks], tables),
        len(order),
    )


def make_pages(num_pages: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (2, num_pages, PAGE, num_kv_heads, head_dim)
    k_pages, v_pages = torch.randn(shape, generator=generator).to(dtype)
    return k_pages, v_pages


def attend(
    backend: Backend,
    rows: Rows,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    causal: bool = True,
    window: int | None = None,
) -> Tensor:
    num_kv_heads, head_dim = k_pages.shape[2:]
    plan = backend.plan_attention(
        rows,
        num_heads=q.shape[1],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=PAGE,
        causal=causal,
        window=window,
    )
    return plan.run(q, k_pages, v_pages)


@pytest.mark.parametrize(("backend", "dtype"), back_ends.COMPUTED, indirect=["backend"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mix", MIXES)
def test_equals_reference(backend: Backend, mix: str, causal: bool, dtype: torch.dtype) -> None:
    rows, num_pages = make_rows(MIXES[mix])
    k_pages, v_pages = make_pages(num_pages, 2, 16, dtype)
    q = torch.randn(len(rows.positions), 4, 16).to(dtype)
    expected = reference.attention(q, k_pages, v_pages, rows, causal=causal)
    actual = attend(backend, rows, q, k_pages, v_pages, causal)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 15, 16, 17, 600])
def test_window_edges_equal_reference(backend: Backend, window: int, causal: bool) -> None:
    rows, num_pages = make_rows([(1, 15), (1, 16), (1, 17), (1, 650), (16, 16), (5, 33), (20, 50), (17, 17)])
    k_pages, v_pages = make_pages(num_pages, 1, 8, torch.float32)
    q = torch.randn(len(rows.positions), 2, 8)
    expected = reference.attention(q, k_pages, v_pages, rows, causal=causal, window=window)
    actual = attend(backend, rows, q, k_pages, v_pages, causal, window)
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (4, 4), (8, 1)])
def test_head_groups_equal_reference(backend: Backend, num_heads: int, num_kv_heads: int) -> None:
    rows, num_pages = make_rows([(1, 30), (3, 20), (18, 25)])
    k_pages, v_pages = make_pages(num_pages, num_kv_heads, 32, torch.float32)
    q = torch.randn(len(rows.positions), num_heads, 32)
    expected = reference.attention(q, k_pages, v_pages, rows)
    torch.testing.assert_close(attend(backend, rows, q, k_pages, v_pages), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 20])
def test_hidden_keys_equal_reference(backend: Backend, window: int | None, causal: bool) -> None:
    """A context whose first keys have been given up: no row sees them, whatever they hold."""
    rows, num_pages = make_rows([(1, 30), (1, 600), (4, 40), (4, 10), (40, 90), (1, 9)])
    rows = dataclasses.replace(rows, hidden_lens=[16, 560, 36, 0, 50, 8])
    k_pages, v_pages = make_pages(num_pages, 2, 16, torch.float32)
    v_pages[rows.page_tables[0, 0]] = float("nan")
    q = torch.randn(len(rows.positions), 4, 16)
    expected = reference.attention(q, k_pages, v_pages, rows, causal=causal, window=window)
    actual = attend(backend, rows, q, k_pages, v_pages, causal, window)
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=0)


def test_one_plan_serves_many_layers(backend: Backend) -> None:
    rows, num_pages = make_rows(MIXES["everything at once"])
    plan = backend.plan_attention(rows, num_heads=4, num_kv_heads=2, head_dim=16, page_size=PAGE)
    layers = [make_pages(num_pages, 2, 16, torch.float32) for _ in range(2)]
    layers[1][0].mul_(-1)
    q = torch.randn(len(rows.positions), 4, 16)
    outputs = [plan.run(q, *layer) for layer in layers]
    for layer, output in zip(layers, outputs, strict=True):
        torch.testing.assert_close(output, reference.attention(q, *layer, rows), atol=2e-6, rtol=0)


def test_memory_of_others_is_never_read(backend: Backend) -> None:
    """Pages of other sequences and slots past the context hold nan, and no row notices."""
    rows, num_pages = make_rows(MIXES["everything at once"])
    k_pages, v_pages = make_pages(num_pages, 2, 16, torch.float32)
    q = torch.randn(len(rows.positions), 4, 16)
    expected = attend(backend, rows, q, k_pages, v_pages)
    is_used = torch.zeros(num_pages * PAGE, dtype=torch.bool)
    for table, context_len in zip(rows.page_tables, rows.context_lens, strict=True):
        places = torch.arange(context_len)
        is_used[table[places // PAGE] * PAGE + places % PAGE] = True
    for pages in (k_pages, v_pages):
        pages.view(-1, 2, 16)[~is_used] = float("nan")
    assert torch.equal(attend(backend, rows, q, k_pages, v_pages), expected)


def test_a_non_finite_sequence_harms_only_itself(backend: Backend) -> None:
    rows, num_pages = make_rows([(1, 40), (1, 30), (4, 30), (4, 44)])
    k_pages, v_pages = make_pages(num_pages, 2, 16, torch.float32)
    for chunk in (0, 2):
        v_pages[rows.page_tables[chunk, 0]] = float("nan")
    out = attend(backend, rows, torch.randn(10, 4, 16), k_pages, v_pages)
    assert out.isnan().any(dim=(1, 2)).tolist() == [True, False, *[True] * 4, *[False] * 4]


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("backend", "dtype"), back_ends.COMPUTED, indirect=["backend"])
def test_same_bits_in_any_batch(backend: Backend, dtype: torch.dtype, window: int | None) -> None:
    """A row's output is bitwise the same alone, in a batch, in a drafted block, and in a prefill chunk."""
    length = 530  # crosses a key block
    (whole, num_pages) = make_rows([(length, length), (1, 9), (1, 640), (1, 290), (5, 300)])
    k_pages, v_pages = make_pages(num_pages, 2, 16, dtype)
    q = torch.randn(len(whole.positions), 4, 16).to(dtype)
    prefill = attend(backend, whole, q, k_pages, v_pages, window=window)[:length]
    table = whole.page_tables[:1]
    for start, num_rows in [(p, 1) for p in range(0, length, 23)] + [(0, 5), (250, 8), (508, 16), (400, 130)]:
        places = torch.arange(start, start + num_rows)
        slots = table[0, places // PAGE] * PAGE + places % PAGE
        alone = Rows(places, slots, [num_rows], [start + num_rows], table)
        actual = attend(backend, alone, q[start : start + num_rows], k_pages, v_pages, window=window)
        assert torch.equal(actual, prefill[start : start + num_rows]), (start, num_rows)
