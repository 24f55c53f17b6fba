"""Our own kernels: the same bits in any batch, on any number of threads; compiled once, or done without."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import back_ends
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.errors import ConfigError
from paceline.kernels import backend, dtypes, native_library, reference
from paceline.kernels.native_backend import NativeBackend, WeightMemory
from paceline.kernels.native_library import Isa
from paceline.kernels.rows import Rows
from paceline.kernels.torch_backend import TorchBackend

pytestmark = pytest.mark.skipif(not back_ends.ISAS, reason="this CPU has neither AVX2 nor AVX-512")

SIZES = st.integers(1, 200)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("isa", back_ends.ISAS)
@given(num_in=SIZES, num_out=SIZES, num_rows=st.integers(1, 120), seed=st.integers(0, 9), data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_row_of_a_product_is_the_same_in_any_batch(
    isa: Isa, num_in: int, num_out: int, num_rows: int, seed: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_out, num_in, generator=generator)
    x = torch.randn(num_rows, num_in, generator=generator)
    multiply = NativeBackend(isa).linear(weight, None)
    whole = multiply(x)
    torch.testing.assert_close(whole, reference.linear(x, weight, None), atol=5e-5, rtol=1e-4)
    first = data.draw(st.integers(0, num_rows - 1))
    last = data.draw(st.integers(first + 1, num_rows))
    assert torch.equal(multiply(x[first:last]), whole[first:last])


@pytest.mark.parametrize("isa", back_ends.ISAS)
@pytest.mark.parametrize("num_rows", [1, 5, 12, 13, 97, 200])
def test_bfloat16_weights_are_stored_as_such_and_give_the_bits_of_float32(isa: Isa, num_rows: int) -> None:
    native = NativeBackend(isa)
    weight = torch.randn(193, 400).bfloat16()
    x = torch.randn(num_rows, 400)
    stored = native.linear(weight, None)
    assert stored.is_bfloat16
    odd = torch.cat([weight.float(), torch.full((1, 400), 0.1)])  # a value that bfloat16 does not have
    wide = native.linear(odd, None)
    assert not wide.is_bfloat16
    assert torch.equal(stored(x), wide(x)[:, :193])


@pytest.mark.parametrize("isa", back_ends.ISAS)
@pytest.mark.parametrize("num_rows", [1, 9, 130])
def test_threads_do_not_change_a_bit(isa: Isa, num_rows: int, two_threads: None) -> None:  # noqa: ARG001
    native = NativeBackend(isa)
    multiply = native.linear(torch.randn(960, 576), torch.randn(960))
    x, residual = torch.randn(2, num_rows, 576)

    def results() -> list[torch.Tensor]:
        wide = multiply(x)
        return [wide, native.silu_and_mul(wide), *native.add_rms_norm(x, residual.clone(), x[0], 1e-5)]

    on_two = results()
    torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(on_two, results(), strict=True))


@pytest.mark.parametrize("isa", back_ends.ISAS)
def test_the_activation_is_right_where_exp_would_overflow(isa: Isa) -> None:
    gate = torch.tensor([-1e4, -100.0, -88.0, -87.0, -20.0, -1e-6, 0.0, 1e-6, 20.0, 100.0, 1e4])
    gate_up = torch.cat([gate, torch.ones_like(gate)])[None]
    expected = reference.silu_and_mul(gate_up)
    torch.testing.assert_close(NativeBackend(isa).silu_and_mul(gate_up), expected, atol=1e-33, rtol=1e-6)


@pytest.mark.parametrize("isa", back_ends.ISAS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_never_hidden(isa: Isa, bad: float) -> None:
    native = NativeBackend(isa)
    x = torch.randn(3, 64)
    x[1, 5] = bad
    assert native.linear(torch.randn(40, 64), None)(x).isfinite().all(1).tolist() == [True, False, True]
    assert native.rms_norm(x, torch.ones(64), 1e-5).isfinite().all(1).tolist() == [True, False, True]
    if bad != float("-inf"):  # of which silu is 0
        assert native.silu_and_mul(x).isfinite().all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("isa", back_ends.ISAS)
@pytest.mark.parametrize("head_dim", [64, 24])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 70)])
def test_pages_in_bfloat16_give_the_bits_of_their_values_in_float32(
    isa: Isa, head_dim: int, causal: bool, window: int | None
) -> None:
    native = NativeBackend(isa)
    lens = [(1, 300), (5, 40), (40, 90)]  # (query_len, context_len)
    tables = torch.randperm(60).view(3, 20)
    rows = Rows(
        positions=torch.cat([torch.arange(context - query, context) for query, context in lens]),
        slots=torch.arange(46),
        query_lens=[query for query, _ in lens],
        context_lens=[context for _, context in lens],
        page_tables=tables,
    )
    k_pages, v_pages = torch.randn(2, 60, 16, 2, head_dim).bfloat16()
    q = torch.randn(46, 6, head_dim)
    plan = native.plan_attention(
        rows, num_heads=6, num_kv_heads=2, head_dim=head_dim, page_size=16, causal=causal, window=window
    )
    narrow = plan.run(q, k_pages, v_pages).clone()
    assert torch.equal(narrow, plan.run(q, k_pages.float(), v_pages.float()))


@pytest.mark.parametrize("isa", back_ends.ISAS)
def test_keys_and_values_are_rounded_as_torch_rounds(isa: Isa) -> None:
    native = NativeBackend(isa)
    odd = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40, 3.4e38, 1.00390625])
    values = torch.cat([odd, torch.randn(2 * 5 * 3 * 24 - len(odd))]).view(2, 5, 3, 24)
    slots = torch.tensor([7, 0, 31, 16, 2])
    pages = torch.zeros(2, 2, 16, 3, 24, dtype=torch.bfloat16)
    native.write_kv(values[0], values[1], pages[0], pages[1], slots)
    torch.testing.assert_close(
        pages.view(2, 32, 3, 24)[:, slots], values.bfloat16(), atol=0, rtol=0, equal_nan=True
    )

    wide, narrow = torch.zeros(2, 2, 16, 3, 24), torch.zeros(2, 2, 16, 3, 24, dtype=torch.bfloat16)
    rows = Rows(torch.arange(5), slots, [5], [5], torch.tensor([[0, 1]]))
    qkv, cos_sin = torch.randn(5, 12 * 24), torch.randn(5, 24)
    norms = (torch.randn(24), torch.randn(24))
    q = native.place_qkv(qkv.clone(), rows, cos_sin, wide[0], wide[1], norms, 1e-5)
    assert torch.equal(q, native.place_qkv(qkv.clone(), rows, cos_sin, narrow[0], narrow[1], norms, 1e-5))
    assert torch.equal(narrow, wide.bfloat16())


def test_pieces_of_weight_memory_are_apart_and_aligned() -> None:
    memory = WeightMemory()
    pieces = [memory.take(num_bytes) for num_bytes in (1, 100, 40 << 20, 64, 7)]
    for index, piece in enumerate(pieces):
        piece.fill_(index)
        assert piece.data_ptr() % 64 == 0
    assert [int(piece.min()) for piece in pieces] == [int(piece.max()) for piece in pieces] == [0, 1, 2, 3, 4]


def test_without_a_compiler_torch_does_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(dtypes, "has_bfloat16_products", lambda: False)
    monkeypatch.setattr(backend, "has_bfloat16_products", lambda: False)
    native_library.load_library.cache_clear()
    assert isinstance(backend.choose_backend("cpu"), TorchBackend)
    assert "install g++" in caplog.text
    with pytest.raises(ConfigError, match=r"install g\+\+"):
        backend.choose_backend("cpu", "native")


def test_a_compiler_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'fatal error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    native_library.load_library.cache_clear()
    with pytest.raises(ConfigError, match=r"c\+\+ cannot compile .*no such thing.*; install g\+\+ 12"):
        native_library.load_library(back_ends.ISAS[0])


def test_the_choice_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "has_bfloat16_products", lambda: True)
    assert isinstance(backend.choose_backend("cpu"), TorchBackend)
    assert isinstance(backend.choose_backend("cpu", "native"), NativeBackend)
    monkeypatch.setattr(backend, "has_bfloat16_products", lambda: False)
    assert isinstance(backend.choose_backend("cpu"), NativeBackend)
    assert isinstance(backend.choose_backend("cpu", "torch"), TorchBackend)
    monkeypatch.setattr(backend, "find_isa", lambda: None)
    with pytest.raises(ConfigError, match="choose auto or torch"):
        backend.choose_backend("cpu", "native")


_LOAD = """
import logging
logging.basicConfig(level="INFO")
from paceline.kernels.native_library import find_isa, load_library
load_library(find_isa())
"""


def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    environ = os.environ | {"PACELINE_CACHE": str(tmp_path)}
    starts = [
        subprocess.Popen([sys.executable, "-c", _LOAD], env=environ, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [process.communicate()[1] for process in starts]
    assert [process.returncode for process in starts] == [0, 0, 0], said
    assert sum("Compiling the CPU kernels" in text for text in said) == 1
    assert [path.suffix for path in sorted((tmp_path / "kernels").iterdir())] == [".lock", ".so"]
