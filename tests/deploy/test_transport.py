"""Requests that are wrong below JSON, written to a raw socket: refused in time, and the server answers on."""

import json
import socket
import struct
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from front import MODEL, ScriptedEngine, listening, scripted_front

from paceline.deploy.api import bodies

BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).encode()
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ScriptedEngine]]:
    front, engine = scripted_front(tmp_path_factory.mktemp("model"))
    with listening(front) as url:
        yield url, engine


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=10)


def exchange(url: str, sent: bytes) -> tuple[int, bytes]:
    """Status (0: none) and body of what comes back before the server closes or falls silent for a second."""
    with connect(url) as connection:
        connection.sendall(sent)
        connection.settimeout(1.0)
        answer = b""
        try:
            while part := connection.recv(65536):
                answer += part
        except (TimeoutError, ConnectionResetError):
            pass
    head, _, body = answer.partition(b"\r\n\r\n")
    return (int(head.split()[1]), body) if head else (0, b"")


def lengthy(length: int | str, body: bytes = BODY) -> bytes:
    return POST + f"Content-Length: {length}\r\nConnection: close\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        (lengthy(len(BODY)), {200}),
        (lengthy(len(BODY) - 5), {400}),  # a length that lies: JSON that is cut off
        (lengthy(2 << 20), {413}),
        (lengthy("-5"), {400}),
        (lengthy("+5"), {400}),
        (lengthy("5, 6"), {400}),
        (
            POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
            {400},
        ),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", {400, 0}),
        (POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", {400}),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", {400}),  # TLS to a port without it
        (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-Long: " + b"x" * 200_000 + b"\r\n\r\n", {400, 431}),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nBad Header : 1\r\n\r\n", {400}),
        (b"GET /heal\x00th HTTP/1.1\r\nHost: x\r\n\r\n", {400}),
    ],
)
def test_what_is_no_request_is_refused(
    served: tuple[str, ScriptedEngine], sent: bytes, statuses: set[int]
) -> None:
    began = time.monotonic()
    status, body = exchange(served[0], sent)

    assert status in statuses, body[:300]
    assert time.monotonic() - began < 5
    assert httpx.post(f"{served[0]}/v1/chat/completions", content=BODY, trust_env=False,
                      headers={"content-type": "application/json"}).status_code == 200  # fmt: skip
    assert not served[1].live


def test_a_client_that_asks_first_is_told_to_go_on(served: tuple[str, ScriptedEngine]) -> None:
    with connect(served[0]) as connection:
        connection.sendall(POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY))
        assert connection.recv(1024).startswith(b"HTTP/1.1 100")
        connection.sendall(BODY)
        assert connection.recv(1024).startswith(b"HTTP/1.1 200")


def test_a_body_that_stalls_is_given_up(
    served: tuple[str, ScriptedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "BODY_S", 0.2)
    status, body = exchange(served[0], lengthy(len(BODY), BODY[:10]))

    assert status == 408
    assert json.loads(body)["error"]["code"] == "request_timeout"


def test_a_client_that_leaves_within_its_body_is_no_failure(
    served: tuple[str, ScriptedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    with connect(served[0]) as connection:
        connection.sendall(lengthy(len(BODY), BODY[:10]))
        time.sleep(0.1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    time.sleep(0.2)
    assert httpx.get(f"{served[0]}/health", trust_env=False).status_code == 200
    assert "a request failed" not in caplog.text
