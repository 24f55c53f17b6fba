"""Linear, norm, rope, activation, K/V writes: equal to the naive reference, the same bits in any batch."""

import back_ends
import pytest
import torch

from paceline.cluster.choices import Dtype
from paceline.kernels import dtypes, linear, reference
from paceline.kernels.backend import Backend
from paceline.kernels.rows import Rows

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


@pytest.fixture(params=back_ends.NAMES)
def backend(request: pytest.FixtureRequest) -> Backend:
    return back_ends.make_backend(request.param)


@pytest.mark.parametrize(("backend", "dtype"), back_ends.COMPUTED, indirect=["backend"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_in", "num_out"), [(64, 192), (576, 960), (1536, 576), (48, 1031)])
def test_linear(backend: Backend, num_in: int, num_out: int, has_bias: bool, dtype: torch.dtype) -> None:
    weight = (torch.randn(num_out, num_in) / num_in**0.5).to(dtype)
    bias = torch.randn(num_out).to(dtype) if has_bias else None
    multiply = backend.linear(weight, bias)
    for num_rows in (1, 2, 7, 33):
        x = torch.randn(num_rows, num_in).to(dtype)
        expected = reference.linear(x, weight, bias)
        torch.testing.assert_close(multiply(x), expected, atol=TOLERANCE[dtype], rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_in", "num_out"), [(64, 192), (576, 960), (1536, 576), (576, 8192)])
def test_torchs_linear_gives_a_row_the_same_bits_in_any_batch(
    num_in: int, num_out: int, dtype: torch.dtype
) -> None:
    """Except one: a single row computed in bfloat16."""
    weight = (torch.randn(num_out, num_in) / num_in**0.5).to(dtype)
    multiply = linear.prepare_linear(weight, None)
    x = torch.randn(70, num_in).to(dtype)
    expected = multiply(x)
    torch.testing.assert_close(expected, reference.linear(x, weight, None), atol=TOLERANCE[dtype], rtol=1e-2)
    for num_rows in (2, 3, 8, 16, 33) if dtype == torch.bfloat16 else (1, 2, 3, 8, 16, 33):
        assert torch.equal(multiply(x[5 : 5 + num_rows]), expected[5 : 5 + num_rows]), num_rows


@pytest.mark.parametrize(
    ("configured", "has_products", "device", "expected"),
    [
        ("float32", False, "cpu", torch.float32),
        ("bfloat16", True, "cpu", torch.bfloat16),
        ("bfloat16", False, "cpu", torch.float32),
        ("bfloat16", False, "cuda", torch.bfloat16),
    ],
)
def test_bfloat16_is_computed_in_float32_only_where_it_would_be_emulated(
    configured: Dtype,
    has_products: bool,
    device: str,
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dtypes, "has_bfloat16_products", lambda: has_products)

    assert dtypes.compute_dtype(configured, torch.device(device)) == expected


def test_linear_without_packing_is_the_same_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = back_ends.make_backend("torch")
    weight, x = torch.randn(32, 16), torch.randn(3, 16)
    packed = backend.linear(weight, None)(x)
    monkeypatch.setattr(linear, "_can_pack", lambda: False)
    torch.testing.assert_close(backend.linear(weight, None)(x), packed)


@pytest.mark.parametrize(("backend", "dtype"), back_ends.COMPUTED, indirect=["backend"])
@pytest.mark.parametrize("shape", [(1, 576), (7, 64), (5, 4, 16)])
def test_norms(backend: Backend, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, *shape).to(dtype)
    weight = torch.rand(shape[-1]).to(dtype)
    expected = reference.rms_norm(x, weight, 1e-5)
    actual = backend.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=0)
    for row in range(shape[0]):
        assert torch.equal(backend.rms_norm(x[row : row + 1], weight, 1e-5), actual[row : row + 1])
    total = x + residual
    normed, new_residual = backend.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(new_residual, total)
    assert torch.equal(normed, backend.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize(("backend", "dtype"), back_ends.COMPUTED, indirect=["backend"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (2, 2, 8), (4, 1, 128)])
def test_rope(backend: Backend, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    angles = torch.rand(50, head_dim // 2) * 100
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.tensor([0, 49, 7, 7, 8])
    qkv = torch.randn(5, (num_heads + num_kv_heads) * head_dim).to(dtype)
    split = num_heads * head_dim
    q, k = qkv[:, :split].view(5, -1, head_dim), qkv[:, split:].view(5, -1, head_dim)
    for rotated, x in zip(backend.rope(q, k, positions, cos_sin), (q, k), strict=True):
        expected = reference.rope(x, positions, cos_sin)
        torch.testing.assert_close(rotated, expected, atol=TOLERANCE[dtype], rtol=0)
        assert rotated.dtype == dtype
    whole = backend.rope(q, k, positions, cos_sin)
    single = backend.rope(q[1:2], k[1:2], positions[1:2], cos_sin)
    assert all(torch.equal(a[1:2], b) for a, b in zip(whole, single, strict=True))


@pytest.mark.parametrize(("backend", "dtype"), back_ends.COMPUTED, indirect=["backend"])
def test_silu_and_mul(backend: Backend, dtype: torch.dtype) -> None:
    gate_up = torch.randn(5, 2 * 96).to(dtype)
    actual = backend.silu_and_mul(gate_up)
    torch.testing.assert_close(actual, reference.silu_and_mul(gate_up), atol=TOLERANCE[dtype], rtol=1e-2)
    assert torch.equal(backend.silu_and_mul(gate_up[2:3]), actual[2:3])


@pytest.mark.parametrize(("backend", "dtype"), back_ends.COMPUTED, indirect=["backend"])
def test_write_kv_touches_its_slots_only(backend: Backend, dtype: torch.dtype) -> None:
    pages = torch.randn(4, 5, 8, 2, 4).to(dtype)  # k and v of the back end, k and v of the reference
    pages[2:] = pages[:2]
    kv = torch.randn(3, 4, 4).to(dtype)  # a slice of a wider tensor, as the model has it
    slots = torch.tensor([39, 0, 17])
    backend.write_kv(kv[:, :2], kv[:, 2:], pages[0], pages[1], slots)
    reference.write_kv(kv[:, :2], kv[:, 2:], pages[2], pages[3], slots)
    assert torch.equal(pages[:2], pages[2:])


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (2, 2, 8), (4, 1, 80)])
@pytest.mark.parametrize("has_norms", [False, True])
def test_place_qkv_is_norm_rope_and_write(
    backend: Backend, num_heads: int, num_kv_heads: int, head_dim: int, has_norms: bool
) -> None:
    rows = Rows(torch.tensor([3, 4, 0]), torch.tensor([39, 0, 17]), [2, 1], [5, 1], torch.zeros(2, 1).long())
    angles = torch.rand(5, head_dim // 2) * 100
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    qkv = torch.randn(3, (num_heads + 2 * num_kv_heads) * head_dim)
    norms = (torch.rand(head_dim), torch.rand(head_dim)) if has_norms else None
    pages = torch.randn(2, 5, 8, num_kv_heads, head_dim)
    expected_pages = pages.clone()
    q, k, v = qkv.view(3, -1, head_dim).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norms is not None:
        q, k = reference.rms_norm(q, norms[0], 1e-5), reference.rms_norm(k, norms[1], 1e-5)
    expected = reference.rope(q, rows.positions, cos_sin)
    k = reference.rope(k, rows.positions, cos_sin)
    reference.write_kv(k, v, expected_pages[0], expected_pages[1], rows.slots)
    actual = backend.place_qkv(qkv.clone(), rows, cos_sin, pages[0], pages[1], norms, 1e-5)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(pages, expected_pages, atol=2e-5, rtol=0)
