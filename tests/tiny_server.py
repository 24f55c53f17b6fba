"""A server for tests, all of it real: tiny weights, an engine in this process, HTTP, gRPC, keys, batches."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
from front import byte_level, listening, loaded
from malformed import CHAT, KEY, MAX_BODY_BYTES, MAX_MODEL_LEN, MODEL, TEXT, USER
from streams import wait_idle
from tiny import make_checkpoint

from paceline.cluster.config import load_config
from paceline.cluster.errors import EngineError
from paceline.cluster.messages import Output, SamplingParams
from paceline.deploy.api.app import create_app
from paceline.deploy.api.batch_jobs import BatchJobs
from paceline.deploy.api.file_store import FileStore
from paceline.deploy.api.front import BatchDoor, Front, front_of
from paceline.deploy.api.keys import KeyRing, load_keys
from paceline.deploy.api.streaming import TokenSource
from paceline.deploy.assemble import start_local_engine
from paceline.deploy.engine import Engine
from paceline.deploy.grpc.paceline_pb2_grpc import add_PacelineServicer_to_server
from paceline.deploy.grpc.service import GrpcMethods

KEYS = f"everyone {KEY},few sk-few-requests requests_per_min=1"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
NUM_KV_TOKENS = 512  # an engine whose pages hold less than one context does not start
KV_BYTES = 2 * 3 * 2 * 16 * 4  # of a token: two, layers, K/V heads, head dim, float32


class Source:
    """The engine's tokens, of which a test may plan how they come."""

    def __init__(self, engine: TokenSource) -> None:
        self.prompts: list[list[int]] = []
        self.num_live = 0
        self.pause_s = 0.0
        self.fails_at: int | None = None  # number of the output that does not come
        self._engine = engine

    async def stream(
        self, request_id: str, prompt_ids: list[int], params: SamplingParams, *rest: Any, **options: Any
    ) -> AsyncGenerator[Output, None]:
        self.prompts.append(prompt_ids)
        self.num_live += 1
        number = 0
        try:
            made = self._engine.stream(request_id, prompt_ids, params, *rest, **options)
            async with aclosing(made) as outputs:
                async for output in outputs:
                    if number == self.fails_at:
                        raise EngineError("a rank died")
                    number += 1
                    await asyncio.sleep(self.pause_s)
                    yield output
        finally:
            self.num_live -= 1


@dataclass(frozen=True)
class Served:
    """The server, and what is behind it."""

    url: str
    grpc_url: str
    client: httpx.Client
    front: Front
    source: Source
    engine: Engine

    def post(self, body: dict[str, Any], path: str = TEXT, **headers: str) -> httpx.Response:
        return self.client.post(path, json=body, headers=headers)

    def is_well(self) -> None:
        reply = self.post({"model": MODEL, "messages": [USER], "max_tokens": 1}, CHAT)
        assert reply.status_code == 200, reply.text

    def wait_until_left(self) -> None:
        deadline = time.monotonic() + 10
        while self.source.num_live:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def connect(self) -> socket.socket:
        parts = urlsplit(self.url)
        return socket.create_connection((parts.hostname, parts.port), timeout=10)

    def exchange(self, sent: bytes) -> tuple[int, bytes]:
        """Status (0: none) and the answer, up to where the server closes or is silent for half a second."""
        answer = b""
        with self.connect() as connection:
            connection.sendall(sent)
            connection.settimeout(0.5)
            try:
                while part := connection.recv(65536):
                    answer += part
            except (TimeoutError, ConnectionResetError):
                pass
        return (int(answer.split()[1]) if answer.startswith(b"HTTP/") else 0), answer


@contextmanager
def serving(path: Path) -> Iterator[Served]:
    """A server of a model that is made in `path`; when it ends, every page must be free."""
    make_checkpoint(path, "llama")
    loaded(byte_level(), path, TEMPLATE)
    flags = {
        "model": str(path), "served_model_name": MODEL, "dtype": "float32", "num_threads": 1,
        "max_model_len": MAX_MODEL_LEN, "kv_cache_gib": (NUM_KV_TOKENS + 16) * KV_BYTES / (1 << 30),
        "check_invariants": True, "max_body_bytes": MAX_BODY_BYTES,
    }  # fmt: skip
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    async def opened() -> tuple[Engine, Front, Source, BatchJobs, grpc.aio.Server, int]:
        config = load_config(flags=flags, environ={})
        engine = await start_local_engine(config, path)
        front = front_of(config, path, engine, "0")
        source = Source(front.source)
        store = FileStore(path / "files", MAX_BODY_BYTES)
        jobs = BatchJobs(store, 2)
        ring = KeyRing(load_keys(None, {"PACELINE_API_KEYS": KEYS}))
        front = replace(front, source=source, keys=ring, batches=BatchDoor(store=store, jobs=jobs))
        jobs.start(create_app(front))
        methods = GrpcMethods()
        methods.open_grpc(front)
        server = grpc.aio.server()
        add_PacelineServicer_to_server(methods, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return engine, front, source, jobs, server, port

    engine, front, source, jobs, server, port = run(opened())
    headers = {"authorization": f"Bearer {KEY}"}
    with (
        listening(front, loop) as url,
        httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=60) as client,
    ):
        yield Served(url, f"127.0.0.1:{port}", client, front, source, engine)
        run(wait_idle(engine))
    for ending in (server.stop(1), jobs.close(), engine.close()):
        run(ending)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()
