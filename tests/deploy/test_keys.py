"""API keys: files and variables of them, limits per minute, and that no text ever shows one."""

import hashlib
import pickle
from pathlib import Path

import pytest

from paceline.cluster.errors import ConfigError, RequestError
from paceline.deploy.api.keys import ANYONE, Caller, KeyRing, load_keys

SECRET = "sk-very-secret-1"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_file_and_two_variables(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    digest = hashlib.sha256(b"sk-carols-key").hexdigest()
    file.write_text(
        f"# ours\n{SECRET}\n\nalice sk-alices-key requests_per_min=60 tokens_per_min=1000  # a team\n"
        f"carol sha256:{digest}\nops sk-operators admin\n"
    )
    keys = load_keys(
        str(file),
        {"PACELINE_API_KEYS": "sk-from-env, bob sk-bobs-key", "PACELINE_ADMIN_KEYS": "root sk-rootkey"},
    )

    assert [key.name for key in keys][1:4] == ["alice", "carol", "ops"]
    assert keys[0].name == f"key-{hashlib.sha256(SECRET.encode()).hexdigest()[:8]}"
    assert (keys[1].requests_per_min, keys[1].tokens_per_min) == (60, 1000)
    assert [key.name for key in keys if key.is_admin] == ["ops", "root"]
    ring = KeyRing(keys)
    for key, name in (("sk-alices-key", "alice"), ("sk-carols-key", "carol"), ("sk-bobs-key", "bob")):
        caller = ring.check(f"Bearer {key}")
        assert caller is not None
        assert caller.name == name
    assert ring.check("bearer   sk-from-env  ") is not None


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Basic sk-very-secret-1", SECRET, f"Bearer {SECRET}x", "Bearer \udcff"],
)
def test_nothing_else_is_a_key(header: str | None) -> None:
    assert KeyRing(load_keys(None, {"PACELINE_API_KEYS": SECRET})).check(header) is None


def test_a_ring_without_keys_is_open() -> None:
    assert KeyRing().is_open
    assert KeyRing().check(None) is ANYONE


@pytest.mark.parametrize(
    "line",
    [
        "short",
        "two words three",
        "name sk-long-enough requests_per_min=0",
        "name sk-long-enough requests_per_min=1 requests_per_min=2",
        "name sk-long-enough tokens_per_min=many",
        "name requests_per_min=1 sk-long-enough",
        "na/me sk-long-enough",
        "carol sha256:12",
        "a sk-long-enough,b sk-long-enough",
        "a sk-long-enough,a sk-longer-enough",
    ],
)
def test_a_line_that_is_wrong_is_told_without_its_key(line: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        load_keys(None, {"PACELINE_API_KEYS": line})

    assert "enough" not in str(wrong.value)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n")
    for name, problem in (("absent", "No such file"), ("empty", "holds no key")):
        with pytest.raises(ConfigError, match=problem):
            load_keys(str(tmp_path / name), {})


def test_no_text_and_no_pickle_shows_a_key() -> None:
    keys = load_keys(None, {"PACELINE_API_KEYS": f"alice {SECRET}"})

    assert repr(keys) == "(ApiKey(alice),)"
    assert SECRET.encode() not in pickle.dumps(keys)
    assert keys[0].digest.hex() not in f"{keys} {KeyRing(keys)!r} {vars(KeyRing(keys))}"


def test_requests_per_minute() -> None:
    clock = Clock()
    ring = KeyRing(load_keys(None, {"PACELINE_API_KEYS": f"alice {SECRET} requests_per_min=3"}), clock)
    caller = ring.check_key(SECRET)
    assert caller is not None
    for _ in range(3):
        caller.admit()
    with pytest.raises(RequestError) as refused:
        caller.admit()

    assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
    assert refused.value.retry_after_s == 20
    assert caller.limits() == {"x-ratelimit-limit-requests": "3", "x-ratelimit-remaining-requests": "0"}
    clock.now += 20
    caller.admit()
    clock.now += 3600
    assert caller.limits()["x-ratelimit-remaining-requests"] == "3"


def test_tokens_per_minute_leave_a_debt() -> None:
    clock = Clock()
    ring = KeyRing(load_keys(None, {"PACELINE_API_KEYS": f"alice {SECRET} tokens_per_min=60"}), clock)
    caller = ring.check_key(SECRET)
    assert caller is not None
    caller.admit()
    caller.charge(100)  # what a request makes is known only when it is made
    with pytest.raises(RequestError) as refused:
        caller.admit()

    assert refused.value.retry_after_s == 41
    clock.now += 41
    caller.admit()


def test_callers_share_no_prefixes() -> None:
    alice, bob = Caller.named("alice"), Caller.named("bob")

    assert len({alice.salt(""), alice.salt("a"), bob.salt(""), bob.salt("a"), ANYONE.salt("a")}) == 5
    assert Caller.named("") is ANYONE
