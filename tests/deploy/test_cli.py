"""The command line: options reach the configuration, a mistake is one line on stderr and exit code 2."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from tiny import make_checkpoint
from tiny_drafter import config_of, make_drafter
from typer.testing import CliRunner

from paceline.cluster.config import SECTIONS, Config
from paceline.cluster.errors import RankLost
from paceline.deploy import cli
from paceline.deploy.options import HELP, config_command

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run the command line in this process; returns exit code, stdout, stderr."""
    for name in list(os.environ):
        if name.startswith("PACELINE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*argv: object) -> tuple[int, str, str]:
        code = cli.main([str(arg) for arg in argv])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = make_checkpoint(tmp_path / "model", "llama")
    (path / "tokenizer.json").write_text("{}")
    return path


def _options_of(section: str, *argv: str) -> Config:
    """What a command with the options of `section` is given."""
    app = typer.Typer()
    seen: list[Config] = []

    @app.command()
    @config_command(section)
    def command(config: Config) -> None:
        seen.append(config)

    CliRunner().invoke(app, argv, catch_exceptions=False)
    return seen[0]


class TestOptions:
    def test_every_field_is_an_option_with_help(self, run: Run) -> None:
        fields = [field.name for kind in SECTIONS.values() for field in msgspec.structs.fields(kind)]
        assert sorted(HELP) == sorted(fields)
        code, out, _ = run("serve", "--help")
        assert code == 0
        assert [name for name in fields if f"--{name.replace('_', '-')} " not in out] == []

    @pytest.mark.parametrize(
        ("section", "argv", "name", "value"),
        [
            ("model", ["owner/name"], "model", "owner/name"),
            ("model", ["--model", "owner/name"], "model", "owner/name"),
            ("model", ["--dtype", "float32"], "dtype", "float32"),
            ("engine", ["--tensor-parallel-size", "4"], "tensor_parallel_size", 4),
            ("engine", ["--kv-cache-gib", "0.5"], "kv_cache_gib", 0.5),
            ("engine", ["--check-invariants"], "check_invariants", True),
            ("engine", [], "check_invariants", False),
            ("engine", ["--drafter", "ngram"], "drafter", "ngram"),
            ("engine", ["--num-draft-tokens", "4"], "num_draft_tokens", 4),
            ("engine", ["--context-cap", "0"], "context_cap", 0),
            ("engine", ["--no-prefix-cache"], "prefix_cache", False),
            ("engine", ["--prefix-cache"], "prefix_cache", True),
            ("engine", [], "prefix_cache", True),
            (
                "server",
                ["--per-request-speculation-metrics", "detailed"],
                "per_request_speculation_metrics",
                "detailed",
            ),
            ("server", ["--port", "1234"], "port", 1234),
        ],
    )
    def test_flags_reach_the_configuration(
        self, section: str, argv: list[str], name: str, value: object
    ) -> None:
        assert getattr(getattr(_options_of(section, *argv), section), name) == value

    def test_file_and_variable_are_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "p.toml").write_text("[engine]\nmax_num_seqs = 3\npage_size = 32\n")
        monkeypatch.setenv("PACELINE_MAX_NUM_SEQS", "5")
        engine = _options_of("engine", "--config", str(tmp_path / "p.toml")).engine
        assert (engine.max_num_seqs, engine.page_size) == (5, 32)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["srv"], "Did you mean 'serve'"),
        (["serve", "--prot", "1"], "--prot"),
        (["serve", "--port", "many"], "--port"),
        (["serve", "--dtype", "float16"], "'bfloat16', 'float32'"),
        (["serve", "--port", "65536"], "between 0 and 65535"),
        (["serve", "--page-size", "12"], "choose 8, 16"),
        (["serve", "--context-cap", "3"], "must be 0 (no cap) or at least a page"),
        (["serve", "--num-draft-tokens", "0"], "must be above 0"),
        (["serve", "--per-request-speculation-metrics", "all"], "'summary'"),
        (["drafter", "swop"], "Did you mean 'swap'"),
        (["drafter", "swap"], "Missing argument 'DRAFTER'"),
        (["drafter", "swap", "none"], "start paceline serve, or give --address"),
        (["serve", "a/b", "--model", "c/d"], "leave one out"),
        (["serve", "--config", "/absent.toml"], "does not exist"),
        (["serve", "/absent/model", "--port", "0"], "does not exist"),
        (["serve", "--revision", "main", "--port", "0"], "leave it out"),
        (["serve", "--host", "203.0.113.1"], "choose another with --host"),
        (["serve", "--host", "no such host"], "choose an address of this machine"),
        (["generate"], "give --prompt, --chat or --prompts-file"),
        (["generate", "--prompts-file", "/absent.jsonl"], "check --prompts-file"),
        (["generate", "--prompt", "a", "--temperature", "-1"], "--temperature"),
        (["generate", "/absent/model", "--prompt", "a"], "does not exist"),
        (["chat", "--url", "http://127.0.0.1:1"], "start one with `paceline serve`"),
        (["chat", "--url", "ftp://x"], "is not the URL of a server"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(run: Run, argv: list[str], says: str) -> None:
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert err.startswith("paceline: ")
    assert err.count("\n") == 1
    assert says in err


def test_port_that_is_taken_is_named_before_anything_is_loaded(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = run("serve", "/absent/model", "--port", port)
    assert (code, err) == (2, f"paceline: port {port} is taken; choose another with --port\n")


def test_tensor_parallel_size_that_does_not_divide_names_those_that_do(run: Run, model: Path) -> None:
    code, _, err = run("serve", model, "--port", 0, "--tensor-parallel-size", 3)
    assert code == 2
    assert "choose one of 1, 2, 4" in err


def test_unsupported_architecture_is_named_with_the_list(run: Run, model: Path) -> None:
    config = model / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "GPT2LMHeadModel"))
    code, _, err = run("serve", model, "--port", 0)
    assert code == 2
    assert "GPT2LMHeadModel" in err
    assert "Qwen3ForCausalLM" in err


def test_drafter_of_another_model_is_refused_before_ray_starts(run: Run, model: Path, tmp_path: Path) -> None:
    drafter = make_drafter(tmp_path / "drafter", config_of())
    code, _, err = run("serve", model, "--port", 0, "--drafter", drafter)
    assert code == 2
    assert err.splitlines()[-1].endswith("; use the drafter made for this target")


def test_failure_of_the_engine_is_exit_code_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: Any, **__: Any) -> None:
        raise RankLost("rank 1 died")

    monkeypatch.setattr("paceline.deploy.chat.run_chat", lose)
    assert run("chat") == (1, "", "paceline: the engine failed: rank 1 died\n")


def test_interrupt_is_exit_code_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.deploy.chat.run_chat", interrupt)
    assert run("chat")[0] == 130


def test_version_and_help(run: Run) -> None:
    assert run("--version")[:2] == (0, "paceline 0.1.0\n")
    code, out, _ = run("--help")
    assert code == 0
    assert all(command in out for command in ("serve", "generate", "chat", "doctor", "drafter"))


def test_help_loads_no_heavy_library() -> None:
    program = (
        "import sys; from paceline.deploy import cli; cli.main(['serve', '--help'])\n"
        "print({'torch', 'ray', 'transformers', 'numpy', 'fastapi'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "set()\n"


def test_as_a_process() -> None:
    """The module form, with the exit code a shell sees."""
    command = [sys.executable, "-m", "paceline.deploy"]
    done = subprocess.run([*command, "serve", "./absent"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("paceline: model './absent' does not exist; give ")
    assert done.stderr.count("\n") == 1
