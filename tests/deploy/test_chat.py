"""`paceline chat` over real sockets against a scripted server: history, failures, hostile output."""

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from paceline.cluster.errors import ConfigError
from paceline.deploy.chat import run_chat


class ScriptedServer(ThreadingHTTPServer):
    """Answers each chat request with the next script of events, and remembers what was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.scripts: list[list[str] | int] = []  # events of a stream, or the status of a refusal
        self.asked: list[dict[str, Any]] = []
        self.models = ["first", "second"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self._reply(200, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        script = self.server.scripts.pop(0)
        if isinstance(script, int):
            self._reply(script, {"error": {"message": "too long for this model"}})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for event in script:
            self.wfile.write(f"data: {event}\n\n".encode())

    def _reply(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Not onto the test's stderr."""


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _says(*pieces: str, is_whole: bool = True) -> list[str]:
    deltas: list[dict[str, str]] = [{"role": "assistant"}, *({"content": piece} for piece in pieces), {}]
    events = [json.dumps({"choices": [{"delta": delta}]}) for delta in deltas]
    usage = json.dumps({"choices": [], "usage": {"total_tokens": 3}})
    return [*events, usage, "[DONE]"] if is_whole else events


@pytest.fixture
def chat(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Type lines into a chat with the server; returns what was printed."""

    def chat(*lines: str, **options: Any) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        run_chat(server.url, **options)
        return capsys.readouterr().out

    return chat


def test_turns_are_streamed_and_remembered(server: ScriptedServer, chat: Any) -> None:
    server.scripts = [_says("Hel", "lo."), _says("Again.")]
    out = chat("hi", "", "more", "/exit", "never sent", system="Be brief.", max_tokens=7, temperature=0.0)
    assert "Hello." in out
    assert "Again." in out
    first, second = server.asked
    assert first["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]
    assert second["messages"][1:] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "more"},
    ]
    assert (first["model"], first["stream"]) == ("first", True)
    assert (first["max_tokens"], first["temperature"]) == (7, 0.0)


def test_clear_forgets(server: ScriptedServer, chat: Any) -> None:
    server.scripts = [_says("one"), _says("two")]
    chat("a", "/clear", "/what", "b")
    assert server.asked[1]["messages"] == [{"role": "user", "content": "b"}]


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (400, "too long for this model (status 400)"),
        ([*_says("half", is_whole=False), '{"error": {"message": "a rank was lost"}}'], "a rank was lost"),
        (_says("half", is_whole=False), "before the answer was whole"),
        (["not json"], "not a chat completion"),
        (['{"choices": [1]}'], "not a chat completion"),
    ],
)
def test_failed_turn_is_named_and_forgotten(
    server: ScriptedServer, chat: Any, script: list[str] | int, says: str
) -> None:
    server.scripts = [script, _says("fine")]
    out = chat("a", "b")
    assert says in out
    assert "fine" in out
    assert server.asked[1]["messages"] == [{"role": "user", "content": "b"}]


def test_model_cannot_drive_the_terminal(server: ScriptedServer, chat: Any) -> None:
    server.scripts = [_says("a\x1b]0;title\x07b\x9bc\u200dd\te")]
    out = chat("a")
    assert "a]0;titlebc\u200dd\te" in out
    assert "\x1b" not in out


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
@pytest.mark.parametrize("has_scheme", [True, False])
def test_urls_people_paste(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, suffix: str, has_scheme: bool
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    run_chat((server.url if has_scheme else server.url.removeprefix("http://")) + suffix)


def test_model_is_chosen_among_the_server_s(server: ScriptedServer, chat: Any) -> None:
    server.scripts = [_says("x")]
    chat("a", model="second")
    assert server.asked[0]["model"] == "second"
    with pytest.raises(ConfigError, match="it has first, second"):
        chat("a", model="third")
    server.models = []
    with pytest.raises(ConfigError, match="has no models"):
        chat("a")
