"""A converted GGUF file holds the weights and the tokenizer it was written from, or is refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import Family, make_checkpoint
from tiny_gguf import MARKER, WORD, write_gguf
from tokenizers import Tokenizer

from paceline.cluster import gguf
from paceline.cluster.errors import ModelError
from paceline.cluster.gguf import convert_gguf
from paceline.cluster.model_directory import check_directory
from paceline.workers.spec import ModelSpec

TEXT = "It's 1234 caf\u00e9s, na\u00efve \U0001f600!\n\n  two  spaces\ttab"


def _write(
    tmp_path: Path, family: Family, arch: str, **options: object
) -> tuple[Path, dict[str, torch.Tensor]]:
    file = tmp_path / "tiny.gguf"
    checkpoint = make_checkpoint(tmp_path / "original", family)
    return file, write_gguf(checkpoint, file, arch, **options)  # type: ignore[arg-type]


def _converted(file: Path, tmp_path: Path) -> Path:
    target = tmp_path / "converted"
    target.mkdir()
    convert_gguf(file, target)
    return target


@pytest.mark.parametrize(
    ("family", "arch", "pre"),
    [
        ("llama", "llama", "smollm"),
        ("llama", "llama", "llama-bpe"),
        ("qwen2", "qwen2", "qwen2"),
        ("qwen3", "qwen3", "qwen2"),
    ],
)
def test_weights_and_dimensions_come_back(tmp_path: Path, family: Family, arch: str, pre: str) -> None:
    file, original = _write(tmp_path, family, arch, pre=pre)
    target = check_directory(_converted(file, tmp_path))
    found = load_file(target / "model.safetensors")
    assert found.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(found[name], tensor.bfloat16()), name
    assert (target / "model.safetensors").stat().st_mode & 0o777 == 0o644
    before, after = ModelSpec.load(tmp_path / "original"), ModelSpec.load(target)
    ignored = {"eos_token_ids", "bos_token_id"}  # the vocabulary written by the test has its own
    for name in set(ModelSpec.__slots__) - ignored:
        assert getattr(after, name) == getattr(before, name), name


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2"])
def test_text_round_trips_and_markers_are_one_token(tmp_path: Path, pre: str) -> None:
    file, _ = _write(tmp_path, "llama", "llama", pre=pre)
    tokenizer = Tokenizer.from_file(str(_converted(file, tmp_path) / "tokenizer.json"))
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == TEXT
    marked = tokenizer.encode(f"a{MARKER}b{WORD}", add_special_tokens=False)
    assert marked.tokens == ["a", MARKER, "b", WORD]
    assert tokenizer.decode(marked.ids, skip_special_tokens=True) == f"ab{WORD}"
    # llama-bpe files begin every text with BOS even when they do not say so
    assert (tokenizer.encode("a").tokens == [MARKER, "a"]) == (pre == "llama-bpe")


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["It", "'s", "\u0120", "2", "0", "2", "4", "!?", "\u010a\u010a\u0120", "\u0120x"]),
        ("llama-bpe", ["It", "'s", "\u0120", "202", "4", "!?\u010a\u010a", "\u0120", "\u0120x"]),
        ("qwen2", ["It", "'s", "\u0120", "2", "0", "2", "4", "!?\u010a\u010a", "\u0120", "\u0120x"]),
    ],
)
def test_text_is_split_as_the_model_saw_it(pre: str, pieces: list[str]) -> None:
    split = gguf._PRE_TOKENIZERS[pre]().pre_tokenize_str("It's 2024!?\n\n  x")
    assert [piece for piece, _ in split] == pieces


def test_large_models_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "SHARD_BYTES", 40_000)
    file, original = _write(tmp_path, "llama", "llama")
    target = check_directory(_converted(file, tmp_path))
    shards = sorted(target.glob("*.safetensors"))
    assert len(shards) > 2
    weight_map = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map.keys() == original.keys()
    for shard in shards:
        for name, tensor in load_file(shard).items():
            assert weight_map[name] == shard.name
            assert torch.equal(tensor, original[name].bfloat16())


def test_progress_ends_at_one(tmp_path: Path) -> None:
    file, _ = _write(tmp_path, "llama", "llama")
    (target := tmp_path / "converted").mkdir()
    shares: list[float] = []
    convert_gguf(file, target, shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"pre": "tekken"}, "gpt2/tekken"),
        ({"extra": {"llama.rope.scaling.type": "yarn"}}, "RoPE scaling"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    tmp_path: Path, options: dict[str, object], named: str
) -> None:
    file, _ = _write(tmp_path, "llama", "llama", **options)
    with pytest.raises(ModelError, match=named) as caught:
        _converted(file, tmp_path)
    assert "Hugging Face directory" in str(caught.value)


def test_another_architecture_is_refused_with_the_list(tmp_path: Path) -> None:
    file, _ = _write(tmp_path, "qwen3", "gemma3")
    with pytest.raises(ModelError, match=r"'gemma3' is not supported \(llama, qwen2, qwen3 are\)"):
        _converted(file, tmp_path)


@pytest.mark.parametrize("damage", ["garbage", "truncated", "empty"])
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    file, _ = _write(tmp_path, "llama", "llama")
    content = file.read_bytes()
    file.write_bytes(
        {"garbage": b"not a model" * 100, "truncated": content[: len(content) // 2], "empty": b""}[damage]
    )
    with pytest.raises(ModelError, match="fetch it again") as caught:
        _converted(file, tmp_path)
    assert "\n" not in str(caught.value)
