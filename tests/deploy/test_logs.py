"""Log lines: what each request leaves, in which form, and how it gets from a replica to stderr."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from front import MODEL, listening, scripted_front

from paceline.deploy.logs import JsonFormatter, TextFormatter, receive_lines

SECRET = "the fox says nothing"
BODY: dict[str, Any] = {"model": MODEL, "prompt": SECRET, "max_tokens": 7, "ignore_eos": True}


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []
        self.setFormatter(JsonFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler, logger = Kept(), logging.getLogger("paceline.requests")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel("INFO")
    yield handler
    logger.setLevel(level)
    logger.removeHandler(handler)


def record(message: str, fields: dict[str, Any]) -> logging.LogRecord:
    made = logging.LogRecord("paceline.x", logging.INFO, __file__, 1, message, (), None)
    made.fields = fields
    return made


def test_each_request_leaves_one_line_without_its_text(kept: Kept, tmp_path: Path) -> None:
    front, _ = scripted_front(tmp_path)
    with listening(front) as url, httpx.Client(base_url=url, trust_env=False) as client:
        for stream in (False, True):
            client.post("/v1/completions", json={**BODY, "stream": stream}, headers={"x-request-id": "mine"})
        client.post("/v1/completions", json={**BODY, "model": "secret-model"})
        client.get("/secret/path?key=secret")
        client.get("/health")
    plain, streamed, refused, unknown = kept.lines
    for line in (plain, streamed):
        assert (line["request_id"], line["status"], line["route"]) == ("mine", 200, "/v1/completions")
        assert line["completion_tokens"] == 7
        assert line["prompt_tokens"] > 0
        assert line["duration_ms"] > 0
    assert (refused["status"], unknown["status"], unknown["route"]) == (404, 404, "unknown")
    told = json.dumps(kept.lines)
    assert "fox" not in told
    assert "secret" not in told
    counted = front.metrics.render().decode()
    assert 'handler="/v1/completions",method="POST",model_name="org/scripted",status="200"} 2.0' in counted
    assert "secret" not in counted


def test_a_line_for_people_is_one_line_whatever_a_client_sends() -> None:
    told = TextFormatter().format(record("request", {"status": 200, "request_id": "a b\nERROR fake=1"}))
    assert told.endswith(' INFO request: status=200 request_id="a b\\nERROR fake=1"')
    assert "\n" not in told


def test_a_line_as_json_holds_its_exception() -> None:
    try:
        raise ValueError("odd")
    except ValueError:
        made = record("it broke", {"n": 1})
        made.exc_info = sys.exc_info()
    line = json.loads(JsonFormatter().format(made))
    assert (line["message"], line["n"], line["level"]) == ("it broke", 1, "info")
    assert line["exception"].endswith("ValueError: odd")


SAY = (
    "import logging; from paceline.deploy.logs import configure_logging; configure_logging('info', 'json');"
    "logging.getLogger('paceline.x').info('from a replica', extra={'fields': {'n': 1}})"
)


def say() -> str:
    """What a process like a replica writes to its own stderr."""
    return subprocess.run([sys.executable, "-c", SAY], capture_output=True, text=True, check=True).stderr


def test_lines_of_a_replica_reach_the_server(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    with receive_lines(tmp_path / "log"):
        assert say() == ""
    assert json.loads(capfdbinary.readouterr().err)["message"] == "from a replica"


def test_without_a_server_they_stay_in_its_own_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert json.loads(say())["n"] == 1
    monkeypatch.setitem(os.environ, "_PACELINE_LOG_SOCKET", str(tmp_path / "gone"))
    assert json.loads(say())["n"] == 1
