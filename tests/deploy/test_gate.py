"""The gate in front of every route: keys, raw paths, limits, origins, and draining."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi.routing import APIRoute
from front import MODEL, ScriptedEngine, listening, scripted_front

from paceline.deploy.api.app import create_app
from paceline.deploy.api.front import Front
from paceline.deploy.api.gate import OPEN_PATHS
from paceline.deploy.api.keys import KeyRing, load_keys

BEARER = "Bearer sk-alices-key"
KEYS = "alice sk-alices-key,bob sk-bobs-key tokens_per_min=40,carol sk-carols-key requests_per_min=1"
ALICE = {"authorization": BEARER}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
ORIGIN = "https://pages.example"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Front, ScriptedEngine]]:
    front, engine = scripted_front(
        tmp_path_factory.mktemp("model"),
        keys=KeyRing(load_keys(None, {"PACELINE_API_KEYS": KEYS})),
        cors_origins=(ORIGIN,),
    )
    with listening(front) as url:
        yield url, front, engine


@pytest.fixture
def client(guarded: tuple[str, Front, ScriptedEngine]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded[0], trust_env=False) as http:
        yield http


def raw(url: str, head: str) -> tuple[int, bytes]:
    """Status and body of a request written by hand."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
        connection.sendall(head.replace("\n", "\r\n").encode("latin-1") + b"\r\n\r\n")
        answer = b""
        while part := connection.recv(65536):
            answer += part
    head_bytes, _, body = answer.partition(b"\r\n\r\n")
    return int(head_bytes.split()[1]), body


def test_every_route_but_health_needs_a_key(client: httpx.Client, tmp_path: Path) -> None:
    front, _ = scripted_front(tmp_path)
    routes = [route for route in create_app(front).routes if isinstance(route, APIRoute)]
    assert len(routes) > 15
    for route in routes:
        for method in route.methods or ():
            status = client.request(method, route.path).status_code
            is_open = route.path.encode() in OPEN_PATHS
            assert status == (200 if is_open else 401), (method, route.path)


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ([], "missing_api_key"),
        ([("authorization", "Bearer sk-alices-kex")], "invalid_api_key"),
        ([("authorization", "Bearer")], "invalid_api_key"),
        ([("authorization", "Basic sk-alices-key")], "invalid_api_key"),
        ([("authorization", "Bearer " + "x" * 5000)], "invalid_api_key"),
        (
            [("authorization", "Bearer sk-alices-key"), ("authorization", "Bearer sk-bobs-key")],
            "invalid_api_key",
        ),
        ([("authorization", BEARER), ("x-api-key", "sk-bobs-key")], "invalid_api_key"),
        ([("x-api-key", "sk-nobodys-key")], "invalid_api_key"),
    ],
)
def test_refusals_are_openai_s(client: httpx.Client, headers: list[tuple[str, str]], code: str) -> None:
    response = client.post("/v1/chat/completions", json=CHAT, headers=headers)

    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", code)
    assert set(error) == {"message", "type", "param", "code"}
    assert "sk-" not in response.text


def test_a_refusal_of_messages_is_anthropic_s(client: httpx.Client) -> None:
    body = client.post("/v1/messages", json={}).json()

    assert body["type"] == "error"
    assert body["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    "target",
    [
        "//v1/models", "/v1//models", "/v1/../v1/models", "/health/../v1/models", "/./v1/models",
        "/%76%31/models", "/v1%2fmodels", "/v1/%2e%2e/v1/models", "/health/%2e%2e/v1/models",
        "/health%2f..%2fv1/models", "/health;/../v1/models", "/health/", "//health", "/health%00",
        "/HEALTH", "/v1/models?/health", "/v1/models#/health", "http://127.0.0.1/v1/models", "/%68ealth",
        "/health\\..\\v1\\models", "/page/../v1/models", "/page/x.js/../../v1/models",
        "/page/%2e%2e/v1/models.js", "/metrics", "/openapi.json", "*", "/ready/../metrics",
    ],
)  # fmt: skip
@pytest.mark.parametrize("host", ["x", "x/health?", "health:80/health#"])
def test_no_spelling_of_a_path_leads_past_the_gate(
    guarded: tuple[str, Front, ScriptedEngine], target: str, host: str
) -> None:
    status, body = raw(guarded[0], f"GET {target} HTTP/1.1\nHost: {host}\nConnection: close")

    assert status in (400, 401, 404), (target, body)
    assert b'"list"' not in body
    assert b"vllm:" not in body


def test_open_paths_are_open_to_get_alone(
    guarded: tuple[str, Front, ScriptedEngine], client: httpx.Client
) -> None:
    assert client.get("/health").status_code == 200
    assert client.get("/ready?x=1").status_code == 200
    assert client.post("/health").status_code == 401
    assert raw(guarded[0], "GET /health HTTP/1.1\nHost: a/../b\nConnection: close")[0] == 200


def test_keys_open_every_api_in_its_own_way(client: httpx.Client) -> None:
    for headers in (ALICE, {"x-api-key": "sk-alices-key"}):
        assert client.get("/v1/models", headers=headers).status_code == 200
    assert client.get("/v1/foo", headers=ALICE).json()["error"]["code"] == "unknown_url"
    assert client.get("/v1/completions", headers=ALICE).status_code == 405


def test_callers_have_prefixes_of_their_own(
    client: httpx.Client, guarded: tuple[str, Front, ScriptedEngine]
) -> None:
    engine = guarded[2]
    engine.salts.clear()
    for headers in (ALICE, {"authorization": "Bearer sk-bobs-key"}):
        client.post("/v1/chat/completions", json={**CHAT, "cache_salt": "mine"}, headers=headers)

    assert engine.salts == ["alice/mine", "bob/mine"]


def test_limits_answer_429_and_say_when(client: httpx.Client) -> None:
    carol = {"authorization": "Bearer sk-carols-key"}
    first, second = (client.post("/v1/chat/completions", json=CHAT, headers=carol) for _ in range(2))
    assert first.status_code == 200
    assert first.headers["x-ratelimit-limit-requests"] == "1"
    assert second.status_code == 429
    assert second.json()["error"]["type"] == "rate_limit_error"
    assert 55 <= int(second.headers["retry-after"]) <= 60
    assert client.get("/v1/models", headers=carol).status_code == 200  # only work is counted
    bob = {"authorization": "Bearer sk-bobs-key"}
    statuses = [client.post("/v1/chat/completions", json=CHAT, headers=bob).status_code for _ in range(12)]
    assert 429 in statuses
    assert client.post("/v1/chat/completions", json=CHAT, headers=ALICE).status_code == 200


def test_pages_of_a_named_origin_may_ask(client: httpx.Client) -> None:
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    allowed = client.options("/v1/models", headers={"origin": ORIGIN, **preflight})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    assert client.get("/v1/models", headers={**ALICE, "origin": ORIGIN}).headers[
        "access-control-allow-origin"
    ]
    for origin in ("https://evil.example", "null", ORIGIN + ".evil.example"):
        answer = client.get("/v1/models", headers={**ALICE, "origin": origin})
        assert "access-control-allow-origin" not in answer.headers


def test_without_an_origin_no_page_may_ask(tmp_path: Path) -> None:
    front, _ = scripted_front(tmp_path)
    with listening(front) as url:
        answer = httpx.get(f"{url}/v1/models", headers={"origin": ORIGIN}, trust_env=False)
    assert "access-control-allow-origin" not in answer.headers


def test_a_draining_server_takes_nothing_new(
    client: httpx.Client, guarded: tuple[str, Front, ScriptedEngine]
) -> None:
    front = guarded[1]
    front.drain.is_on = True
    try:
        for path in ("/v1/chat/completions", "/v1/messages"):
            response = client.post(path, json=CHAT, headers=ALICE)
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "shutting_down"
            assert response.headers["connection"] == "close"
            assert response.headers["retry-after"]
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200
    finally:
        front.drain.is_on = False
    assert client.get("/ready").json() == {"status": "ready"}


def test_logs_show_neither_prompts_nor_keys(
    client: httpx.Client, guarded: tuple[str, Front, ScriptedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    engine = guarded[2]
    before = engine.fails_at
    engine.fails_at = 1
    try:
        body = {**CHAT, "messages": [{"role": "user", "content": "canary prompt"}]}
        with caplog.at_level("DEBUG"):
            assert client.post("/v1/chat/completions", json=body, headers=ALICE).status_code == 500
            client.post("/v1/chat/completions", json={**body, "n": "canary"}, headers=ALICE)
    finally:
        engine.fails_at = before
    assert "a request failed" in caplog.text
    assert "canary" not in caplog.text
    assert "sk-alices-key" not in caplog.text
    assert "canary" not in client.get("/metrics", headers=ALICE).text
    assert "canary" not in json.dumps(client.get("/openapi.json", headers=ALICE).json())
