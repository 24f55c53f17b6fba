"""Flags beat variables, variables the file, the file the defaults; a mistake is named with its remedy."""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.choices import cache_dir
from paceline.cluster.config import SECTIONS, Config, ModelConfig, load_config
from paceline.cluster.errors import ConfigError, UserError


def _load(**sources: Any) -> Config:
    """Without the variables of whoever runs the tests."""
    return load_config(**{"environ": {}, **sources})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "paceline.toml"
    path.write_text('[engine]\nmax_num_seqs = 3\npage_size = 32\n[server]\nport = 1\nhost = "0.0.0.0"\n')
    return path


def test_defaults_stand_alone() -> None:
    assert _load() == Config()
    assert Config().model == ModelConfig(model="default", dtype="bfloat16")


def test_precedence(file: Path) -> None:
    config = _load(
        file=file,
        environ={"PACELINE_PORT": "2", "PACELINE_MAX_NUM_SEQS": "4"},
        flags={"port": 3, "host": None},
    )
    assert config.server.port == 3, "a flag beats a variable"
    assert config.engine.max_num_seqs == 4, "a variable beats the file"
    assert config.engine.page_size == 32, "the file beats the default"
    assert config.server.host == "0.0.0.0", "a flag that is None was not given"
    assert config.engine.max_queued_requests == 256


def test_names_are_unique_over_sections() -> None:
    names = [field.name for kind in SECTIONS.values() for field in msgspec.structs.fields(kind)]
    assert len(names) == len(set(names))


def test_configuration_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Config().engine.page_size = 8  # type: ignore[misc]


@pytest.mark.parametrize(
    ("variable", "text", "section", "name", "value"),
    [
        ("PACELINE_KV_CACHE_GIB", "0.5", "engine", "kv_cache_gib", 0.5),
        ("PACELINE_CHECK_INVARIANTS", "true", "engine", "check_invariants", True),
        ("PACELINE_CHECK_INVARIANTS", "0", "engine", "check_invariants", False),
        ("PACELINE_MODEL", "owner/name", "model", "model", "owner/name"),
        ("PACELINE_MAX_MODEL_LEN", "2048", "model", "max_model_len", 2048),
    ],
)
def test_variables_are_read_as_their_option_s_type(
    variable: str, text: str, section: str, name: str, value: object
) -> None:
    assert getattr(getattr(_load(environ={variable: text}), section), name) == value


def test_other_variables_are_left_alone() -> None:
    assert _load(environ={"PACELINE_CACHE": "/x", "PORT": "1", "PATH": "/bin"}) == Config()


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One set of sources, and what the error must say."""

    says: str
    flags: dict[str, Any] = dataclasses.field(default_factory=dict)
    environ: dict[str, str] = dataclasses.field(default_factory=dict)
    toml: str | None = None


MISTAKES = [
    Mistake("did you mean 'max_num_seqs'", flags={"max_num_seq": 1}),
    Mistake("did you mean 'port'", environ={"PACELINE_PROT": "1"}),
    Mistake("did you mean 'page_size'", toml="[engine]\npagesize = 16"),
    Mistake("did you mean 'engine'", toml="[engin]\npage_size = 16"),
    Mistake("unknown option 'port'", toml="[engine]\nport = 1"),
    Mistake("must be a table", toml="engine = 1"),
    Mistake("is not TOML", toml="[engine"),
    Mistake("PACELINE_PORT='x'", environ={"PACELINE_PORT": "x"}),
    Mistake("PACELINE_TAP_LAYER_IDS", environ={"PACELINE_TAP_LAYER_IDS": "1,b"}),
    Mistake("port", flags={"port": "8000"}),
    Mistake("page_size", toml='[engine]\npage_size = "16"'),
    Mistake("dtype", flags={"dtype": "float16"}),
    Mistake("drafter is empty", flags={"drafter": ""}),
    Mistake("tensor_parallel_size is 0", flags={"tensor_parallel_size": 0}),
    Mistake("max_model_len is -1", flags={"max_model_len": -1}),
    Mistake("kv_cache_gib is 0", flags={"kv_cache_gib": 0.0}),
    Mistake("kv_cache_gib is nan", environ={"PACELINE_KV_CACHE_GIB": "nan"}),
    Mistake("step_deadline_s is inf", toml="[engine]\nstep_deadline_s = inf"),
    Mistake("num_threads is 0", flags={"num_threads": 0}),
    Mistake("choose 8, 16", flags={"page_size": 12}),
    Mistake("raise the first or lower the second", flags={"max_num_seqs": 64, "max_num_batched_tokens": 32}),
    Mistake("gpu_memory_utilization is 1.5", flags={"gpu_memory_utilization": 1.5}),
    Mistake("between 0 and 65535", flags={"port": 65536}),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.says)
def test_mistakes_are_named_in_one_line(mistake: Mistake, tmp_path: Path) -> None:
    path = None
    if mistake.toml is not None:
        path = tmp_path / "paceline.toml"
        path.write_text(mistake.toml)
    with pytest.raises(ConfigError) as caught:
        _load(flags=mistake.flags, environ=mistake.environ, file=path)
    assert mistake.says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml does not exist"):
        _load(file=tmp_path / "absent.toml")


@given(
    name=st.sampled_from([f.name for kind in SECTIONS.values() for f in msgspec.structs.fields(kind)]),
    text=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12),
)
def test_any_text_in_a_variable_gives_a_configuration_or_a_user_error(name: str, text: str) -> None:
    try:
        config = _load(environ={f"PACELINE_{name.upper()}": text})
    except UserError:
        return
    assert isinstance(config, Config)


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/rider")
    monkeypatch.delenv("PACELINE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == Path("/home/rider/.cache/paceline")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert cache_dir() == Path("/var/cache/paceline")
    monkeypatch.setenv("PACELINE_CACHE", "~/models")
    assert cache_dir() == Path("/home/rider/models")
