"""/v1/files and /v1/batches by OpenAI's client: uploads, runs, restarts, cancels, owners."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from front import MODEL, ScriptedEngine, listening, scripted_front
from openai_schemas import load, valid

from paceline.cluster.errors import ConfigError, RequestError
from paceline.deploy.api.app import create_app
from paceline.deploy.api.batch_jobs import BatchJobs
from paceline.deploy.api.file_store import FileStore
from paceline.deploy.api.front import BatchDoor
from paceline.deploy.api.keys import KeyRing, load_keys

KEYS = "alice sk-alices-key,bob sk-bobs-key"
CHAT = "/v1/chat/completions"


class Clock:
    """The store's time, which a test can move on."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


class Server:
    """A server with a batch folder, its engine, and clients that are closed with it."""

    def __init__(self, url: str, engine: ScriptedEngine, clock: Clock) -> None:
        self.url, self.engine, self.clock = url, engine, clock
        self.clients = ExitStack()

    def client(self, key: str = "sk-alices-key") -> openai.OpenAI:
        return self.clients.enter_context(
            openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)
        )

    def http(self) -> httpx.Client:
        headers = {"authorization": "Bearer sk-alices-key"}
        return self.clients.enter_context(httpx.Client(base_url=self.url, headers=headers, trust_env=False))


@contextmanager
def running(model: Path, folder: Path) -> Iterator[Server]:
    """A server whose batches are worked on, in a loop of its own; its folder outlives it."""
    clock = Clock()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def opened() -> tuple[Any, ScriptedEngine, BatchJobs]:
        store = FileStore(folder, 1 << 20, clock)
        jobs = BatchJobs(store, 4, clock)
        ring = KeyRing(load_keys(None, {"PACELINE_API_KEYS": KEYS}))
        front, engine = scripted_front(model, batches=BatchDoor(store=store, jobs=jobs), keys=ring)
        jobs.start(create_app(front))
        return front, engine, jobs

    front, engine, jobs = asyncio.run_coroutine_threadsafe(opened(), loop).result(30)
    try:
        with listening(front, loop) as url:
            server = Server(url, engine, clock)
            with server.clients:
                yield server
    finally:
        asyncio.run_coroutine_threadsafe(jobs.close(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running(tmp_path, tmp_path / "store") as it:
        yield it


def lines(count: int, url: str = CHAT, **fields: Any) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, **fields}
    if url == "/v1/responses":
        body = {"model": MODEL, "input": "hi", "max_output_tokens": 6}
    asked = [{"custom_id": f"id-{i}", "method": "POST", "url": url, "body": body} for i in range(count)]
    return b"".join(json.dumps(line).encode() + b"\n" for line in asked)


def started(client: openai.OpenAI, content: bytes, endpoint: Any = CHAT) -> str:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"run": "1"}
    )
    assert batch.status == "validating"
    return batch.id


def until(client: openai.OpenAI, batch_id: str, is_so: Callable[[Any], bool]) -> Any:
    deadline = time.monotonic() + 30
    while not is_so(batch := client.batches.retrieve(batch_id)):
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
    return batch


def ended(batch: Any) -> bool:
    return batch.status in ("completed", "failed", "cancelled", "expired")


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


@pytest.mark.parametrize("endpoint", [CHAT, "/v1/responses"])
def test_a_batch_from_upload_to_results(server: Server, endpoint: str) -> None:
    client = server.client()
    batch = until(client, started(client, lines(20, endpoint), endpoint), ended)

    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed) == (20, 20)
    assert batch.error_file_id is None
    assert batch.metadata == {"run": "1"}
    told = results(client, batch.output_file_id)
    assert sorted(line["custom_id"] for line in told) == sorted(f"id-{i}" for i in range(20))
    assert all(line["response"]["status_code"] == 200 for line in told)
    assert set(server.engine.salts) == {"alice/"}
    schemas = load()
    raw = server.http()
    valid(schemas, "Batch", raw.get(f"/v1/batches/{batch.id}").json())
    valid(schemas, "ListBatchesResponse", raw.get("/v1/batches").json())
    valid(schemas, "ListFilesResponse", raw.get("/v1/files").json())
    valid(schemas, "OpenAIFile", raw.get(f"/v1/files/{batch.output_file_id}").json())
    valid(schemas, "DeleteFileResponse", raw.delete(f"/v1/files/{batch.output_file_id}").json())


def test_lines_that_cannot_be_answered_are_told_one_by_one(server: Server) -> None:
    client = server.client()
    content = (
        lines(2)
        + b'{"custom_id": "hot", "method": "POST", "url": "%b", "body": {"model": "%b", "messages": []}}\n'
        % (CHAT.encode(), MODEL.encode())
        + lines(1, "/v1/completions").replace(b"id-0", b"elsewhere")
        + b"no json\n"
    )
    batch = until(client, started(client, content), ended)

    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (
        5,
        2,
        3,
    )
    assert len(results(client, batch.output_file_id)) == 2
    failed = {line["custom_id"]: line["error"]["code"] for line in results(client, batch.error_file_id)}
    assert failed == {"hot": "empty_array", "elsewhere": "invalid_url", None: "invalid_json"}


def test_a_batch_is_cancelled_with_what_it_has(server: Server) -> None:
    server.engine.step_s = 0.02
    client = server.client()
    first, second = (started(client, lines(200)) for _ in range(2))
    until(client, first, lambda batch: batch.request_counts.completed > 4)
    assert client.batches.cancel(first).status == "cancelling"
    assert client.batches.cancel(second).status == "cancelled"  # it had not begun
    batch = until(client, first, ended)

    assert batch.status == "cancelled"
    assert 4 < batch.request_counts.completed < 200
    assert len(results(client, batch.output_file_id)) == batch.request_counts.completed
    assert until(client, second, lambda batch: batch.cancelled_at is not None).status == "cancelled"
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(first)
    assert not server.engine.live


def test_a_batch_expires_with_what_it_has(server: Server) -> None:
    server.engine.step_s = 0.02
    client = server.client()
    batch_id = started(client, lines(200))
    until(client, batch_id, lambda batch: batch.request_counts.completed > 4)
    server.clock.ahead_s = 25 * 3600
    batch = until(client, batch_id, ended)

    assert batch.status == "expired"
    assert len(results(client, batch.output_file_id)) == batch.request_counts.completed > 4


def test_a_batch_outlives_its_server(tmp_path: Path) -> None:
    with running(tmp_path, tmp_path / "store") as server:
        server.engine.step_s = 0.02
        client = server.client()
        batch_id = started(client, lines(60))
        until(client, batch_id, lambda batch: batch.request_counts.completed > 8)
    with running(tmp_path, tmp_path / "store") as server:
        client = server.client()
        batch = until(client, batch_id, ended)
        assert batch.request_counts.completed == 60
        assert len(server.engine.prompts) < 60  # only what was missing
        told = [line["custom_id"] for line in results(client, batch.output_file_id)]
    assert sorted(told) == sorted(f"id-{i}" for i in range(60))


def test_nobody_sees_what_is_another_s(server: Server) -> None:
    alice, bob = server.client(), server.client("sk-bobs-key")
    file = alice.files.create(file=("a.jsonl", lines(1)), purpose="batch")
    batch = alice.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")

    assert [entry.id for entry in alice.files.list()] == [file.id]
    assert list(bob.files.list()) == []
    assert list(bob.batches.list()) == []
    for call in (
        lambda: bob.files.retrieve(file.id),
        lambda: bob.files.content(file.id),
        lambda: bob.files.delete(file.id),
        lambda: bob.batches.retrieve(batch.id),
        lambda: bob.batches.cancel(batch.id),
        lambda: bob.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            call()


def test_files_are_listed_page_by_page_and_expire(server: Server) -> None:
    client = server.client()
    ids = [client.files.create(file=(f"{i}", b"x"), purpose="user_data").id for i in range(5)]
    kept = client.files.create(
        file=("k", b"xyz"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )

    assert {entry.id for entry in client.files.list(limit=2)} == {*ids, kept.id}
    assert [entry.id for entry in client.files.list(purpose="batch")] == [kept.id]
    assert (kept.bytes, kept.filename) == (3, "k")
    assert client.files.content(kept.id).read() == b"xyz"
    server.clock.ahead_s = 3700
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(kept.id)
    client.files.delete(ids[0])
    with pytest.raises(openai.NotFoundError):
        client.files.content(ids[0])


def test_names_of_clients_lead_nowhere(server: Server, tmp_path: Path) -> None:
    client = server.client()
    before = {path for path in tmp_path.rglob("*") if "store" not in path.parts}
    file = client.files.create(file=("../../../etc/pass\x00wd\n", b"x"), purpose="batch")
    assert "\n" not in file.filename
    raw = server.http()
    for name in (
        "..%2fbatches",
        "..%2ffiles",
        f"..%2ffiles%2f{file.id}",
        "%2e%2e",
        "file-" + "0" * 32,
        f"{file.id}.tmp",
        "x" * 500,
    ):
        for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
            assert raw.get(path).status_code == 404, path
    assert {path for path in tmp_path.rglob("*") if "store" not in path.parts} == before


def test_what_is_wrong_with_an_upload_is_said(server: Server) -> None:
    http = server.http()

    def code(status: int, **sent: Any) -> str:
        response = http.post("/v1/files", **sent)
        assert response.status_code == status, response.text
        return response.json()["error"]["code"]

    file = {"file": ("f", b"x")}
    assert code(415, json={}) == "unsupported_media_type"
    assert code(400, files=file) == "invalid_value"
    assert code(400, files=file, data={"purpose": "fine-tune"}) == "invalid_value"
    assert code(400, files={"other": b"x"}, data={"purpose": "batch"}) == "missing_required_parameter"
    assert (
        code(413, files={"file": ("f", b"x" * (2 << 20))}, data={"purpose": "batch"}) == "request_too_large"
    )
    broken = {"content-type": "multipart/form-data; boundary=x"}
    assert code(400, content=b"--y\r\nnonsense", headers=broken)
    short = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "5"}
    assert code(400, files=file, data=short) == "integer_below_min_value"
    for body, wrong in (
        ({}, "missing_required_parameter"),
        ({"input_file_id": "x", "endpoint": "/v1/embeddings", "completion_window": "24h"}, "invalid_value"),
        ({"input_file_id": "x", "endpoint": CHAT, "completion_window": "1h"}, "invalid_value"),
        ({"input_file_id": "x", "endpoint": CHAT, "completion_window": "24h"}, "file_not_found"),
    ):
        assert http.post("/v1/batches", json=body).json()["error"]["code"] == wrong
    for query in ("limit=0", "limit=x", "order=up", "after=nothing"):
        assert http.get(f"/v1/files?{query}").status_code == 400


def test_an_empty_input_fails_the_batch(server: Server) -> None:
    client = server.client()
    batch = until(client, started(client, b"\n"), ended)

    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert batch.errors.data[0].code == "invalid_input_file"


def test_without_a_folder_there_is_a_hint(tmp_path: Path) -> None:
    front, _ = scripted_front(tmp_path)
    with listening(front) as url:
        for path in ("/v1/files", "/v1/batches/batch_1"):
            error = httpx.get(url + path, trust_env=False).json()["error"]
            assert "--batch-dir" in error["message"]


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="batch_dir"):
        FileStore(tmp_path / "file", 1)
    store = FileStore(tmp_path / "store", 1)
    with pytest.raises(RequestError):
        store.get("../../file", "")
