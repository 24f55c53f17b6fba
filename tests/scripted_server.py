"""An OpenAI server for tests of the benchmarks: on a real socket, without a model."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from paceline.deploy.ingress import free_port

COUNTERS = """\
# TYPE paceline:steps_total counter
paceline:steps_total{model_name="m"} 200.0
# TYPE paceline:step_plan_seconds_total counter
paceline:step_plan_seconds_total{model_name="m"} 0.1
# TYPE paceline:step_wait_seconds_total counter
paceline:step_wait_seconds_total{model_name="m"} 8.0
# TYPE paceline:step_compute_seconds_total counter
paceline:step_compute_seconds_total{model_name="m"} 7.9
"""


class ScriptedServer:
    """Says `x` as often as asked, and remembers what it was asked."""

    def __init__(self, fails_at: int | None = None, pause_s: float = 0.0) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.num_running = 0
        self.most_running = 0
        self._fails_at = fails_at
        self._pause_s = pause_s

    @property
    def prompts(self) -> list[Any]:
        return [body["prompt"] for body in self.bodies]

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Yields its URL."""
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"data": [{"id": "scripted"}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        """As if each request were a step, with a block of four drafts of which three stood."""
        del request
        num_steps = len(self.bodies)
        text = COUNTERS.replace("200.0", f"{num_steps}.0")
        for name, value in (("drafts", 1), ("draft_tokens", 4), ("accepted_tokens", 3)):
            name = f"vllm:spec_decode_num_{name}"
            text += f"# TYPE {name} counter\n{name}_total {value * num_steps}.0\n"
        return web.Response(text=text)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        assert body["model"] == "scripted"
        if len(self.bodies) == self._fails_at:
            return web.json_response({"error": {"message": "no room"}}, status=503)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        response = web.StreamResponse()
        await response.prepare(request)
        is_chat = request.path.startswith("/v1/chat")
        if is_chat:
            await response.write(b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n')
        say = b'{"delta":{"content":"x"}}' if is_chat else b'{"text":"x"}'
        for _ in range(body["max_tokens"]):
            await asyncio.sleep(self._pause_s)
            await response.write(b'data: {"choices":[' + say + b"]}\n\n")
        usage = {"completion_tokens": body["max_tokens"], "prompt_tokens": 2}
        self.num_running -= 1
        event = json.dumps({"choices": [], "usage": usage})
        await response.write(f"data: {event}\n\ndata: [DONE]\n\n".encode())
        return response
