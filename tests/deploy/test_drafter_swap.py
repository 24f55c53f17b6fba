"""How a second command finds the server of this machine, and may speak to its Ray."""

import os
from pathlib import Path

import pytest

from paceline.cluster.errors import ConfigError
from paceline.deploy import ray_session
from paceline.deploy.drafter_swap import swap_drafter


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and home; the environment is as found afterwards."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "")  # so that what a test sets is taken back
        monkeypatch.delenv(name)
    return tmp_path / "cache"


def test_commands_of_one_user_share_a_secret_file(cache: Path) -> None:
    ray_session.set_environment()
    path = cache / "ray_token"
    token = path.read_text()
    assert len(token) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(path)
    del os.environ["RAY_AUTH_TOKEN_PATH"]
    ray_session.set_environment()
    assert path.read_text() == token
    assert [file.name for file in cache.iterdir()] == ["ray_token"]


@pytest.mark.parametrize("variable", ["RAY_AUTH_TOKEN", "RAY_ADDRESS"])
def test_what_the_user_has_set_stays(cache: Path, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "mine")
    ray_session.set_environment()
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ
    assert not cache.exists()


def test_without_a_server_the_remedy_is_named(cache: Path) -> None:
    with pytest.raises(ConfigError, match="no server runs on this machine; start paceline serve, or give"):
        swap_drafter("ngram", None)
    assert (cache / "ray_token").exists()


@pytest.mark.usefixtures("cache")
def test_only_its_own_address_is_taken_back() -> None:
    ray_session.announce("first:1")
    ray_session.announce("second:2")
    ray_session.retract("first:1")
    assert ray_session.address_file().read_text() == "second:2"
    ray_session.retract("second:2")
    assert not ray_session.address_file().exists()
