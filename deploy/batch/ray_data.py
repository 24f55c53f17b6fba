"""A batch stage for Ray Data: a callable class for `Dataset.map_batches` that owns an engine.

    ds.map_batches(Generate, fn_constructor_kwargs={"model": "org/name"}, batch_size=64, concurrency=(1, 4))

Each actor of the stage is a replica as in `replicas.py`; Ray Data starts, feeds, scales and restarts them. A
row that cannot be answered harms no other: its `error` says why.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ...cluster.config import load_config
from ...cluster.model_source import resolve_model
from ..api.app import create_app
from ..api.front import front_of
from ..assemble import start_engine
from .answers import local_answer
from .job import Answer, Line, Response


class Generate:
    """Answers rows; every option of `paceline serve` can be given by its name in the configuration.

    A row has a column `prompt` (text) or `messages` (a list of {"role", "content"}). Added are `generated`
    (text), `finish_reason`, `prompt_tokens`, `completion_tokens`, and `error`, empty when all went well.
    """

    def __init__(self, sampling: Mapping[str, Any] | None = None, **options: Any) -> None:
        """`sampling` are fields of every request, such as max_tokens. Raises ConfigError, ModelError."""
        self._config = load_config(flags=options)
        self._sampling = dict(sampling or {})
        self._starting = asyncio.Lock()
        self._answer: Answer | None = None
        self._model = ""

    async def __call__(self, rows: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Answer these rows together; Ray Data has several batches under way, so the engine has work."""
        answer = await self._started()
        num_rows = len(next(iter(rows.values())))
        lines = [
            self._line({name: column[index] for name, column in rows.items()}) for index in range(num_rows)
        ]
        responses = await asyncio.gather(*map(answer, lines))
        added = [_columns(response) for response in responses]
        yield dict(rows) | {name: [row[name] for row in added] for name in added[0]}

    async def _started(self) -> Answer:
        async with self._starting:
            if self._answer is None:
                model = self._config.model
                path = await asyncio.to_thread(resolve_model, model.model, model.revision)
                engine = await start_engine(self._config, path)  # ends with its actor
                front = front_of(self._config, path, engine, "ray-data")
                self._model = front.served.name
                self._answer = local_answer(create_app(front))
            return self._answer

    def _line(self, row: dict[str, Any]) -> Line:
        body = {"model": self._model, **self._sampling}
        if "messages" in row:
            url, body["messages"] = "/v1/chat/completions", [dict(turn) for turn in row["messages"]]
        else:
            url, body["prompt"] = "/v1/completions", str(row["prompt"])
        return {"custom_id": "", "method": "POST", "url": url, "body": body}


def _columns(response: Response) -> dict[str, Any]:
    body = response["body"]
    if response["status_code"] != 200:
        return {
            "generated": "",
            "finish_reason": "error",
            "prompt_tokens": 0,
            "completion_tokens": 0,
            "error": body["error"]["message"],
        }
    choice = body["choices"][0]
    return {
        "generated": choice["text"] if "text" in choice else choice["message"]["content"],
        "finish_reason": choice["finish_reason"],
        "prompt_tokens": body["usage"]["prompt_tokens"],
        "completion_tokens": body["usage"]["completion_tokens"],
        "error": "",
    }
