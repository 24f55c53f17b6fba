"""Grammars are compiled once, in a process that may be killed, before a request that has one is submitted.

What a request may cost is then known: the ranks compile the same grammar again, lazily, without a limit.
"""

import asyncio
import contextlib
import re
import select
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import msgspec

from ..cluster.errors import RequestError
from ..cluster.messages import Grammar, Output, SamplingParams
from .api.streaming import TokenSource
from .grammar_worker import COMPILE_CPU_S, Compiled, read_frame, write_frame

MAX_COMPILED_BYTES = 32 << 20
MAX_MASK_S = 0.1  # the steps of all requests wait for the masks of one
MAX_WAITING = 32  # grammars that wait to be compiled; beyond it a request is answered 429
_NUM_KEPT = 256  # outcomes
_START_S = 120.0
_ANSWER_S = 10 * COMPILE_CPU_S  # by the wall clock: the machine may be busy
_NOISE = re.compile(r"^\[[0-9:]+\] \S+:\d+: ")  # time and place in the library's source


class GrammarCheck:
    """A source of tokens that refuses what cannot be compiled before it asks the engine."""

    def __init__(self, engine: TokenSource, compiler: "GrammarCompiler") -> None:
        self._engine = engine
        self._compiler = compiler

    async def stream(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        priority: int = 0,
        *,
        cache_salt: str = "",
        max_draft_tokens: int | None = None,
        is_traced: bool = False,
    ) -> AsyncGenerator[Output, None]:
        """As the engine's; RequestError also for a grammar that is wrong or takes too much."""
        if params.grammar is not None:
            await self._compiler.check(params.grammar)
        outputs = self._engine.stream(
            request_id,
            prompt_ids,
            params,
            priority,
            cache_salt=cache_salt,
            max_draft_tokens=max_draft_tokens,
            is_traced=is_traced,
        )
        async with aclosing(outputs):
            async for output in outputs:
                yield output


class GrammarCompiler:
    """Owns the worker process and remembers what became of the last grammars. Belongs to one event loop."""

    def __init__(self, model_path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._worker = _Worker([str(model_path), str(vocab_size), *map(str, eos_token_ids)])
        self._has_eos = bool(eos_token_ids)
        self._outcomes: OrderedDict[Grammar, RequestError | None] = OrderedDict()
        self._compiling: dict[Grammar, asyncio.Task[RequestError | None]] = {}

    def start_soon(self) -> None:
        """Start the worker now, so that the first grammar does not wait for it."""
        threading.Thread(target=self._worker.start, name="grammar worker", daemon=True).start()

    async def check(self, grammar: Grammar) -> None:
        """Raise RequestError unless the grammar compiles within its limits."""
        if not self._has_eos:
            raise _refused(grammar, "this model has no end-of-sequence token to end it with")
        if grammar not in self._outcomes:
            outcome = await self._compile(grammar)
        else:
            self._outcomes.move_to_end(grammar)
            outcome = self._outcomes[grammar]
        if outcome is not None:
            raise outcome

    async def _compile(self, grammar: Grammar) -> RequestError | None:
        """Once for all who wait for it, even if the first of them leaves."""
        task = self._compiling.get(grammar)
        if task is None:
            if len(self._compiling) >= MAX_WAITING:
                raise RequestError(
                    f"{MAX_WAITING} grammars are waiting to be compiled; try again soon",
                    status=429,
                    code="rate_limit_exceeded",
                    error_type="rate_limit_error",
                    retry_after_s=1,
                )
            task = asyncio.create_task(self._compile_alone(grammar))
            self._compiling[grammar] = task
        return await asyncio.shield(task)

    async def _compile_alone(self, grammar: Grammar) -> RequestError | None:
        try:
            compiled = await asyncio.to_thread(self._worker.compile, grammar)
        finally:
            del self._compiling[grammar]
        outcome: RequestError | None = None
        if compiled is None:
            self.start_soon()
            outcome = _too_complex(
                grammar, f"compiling it takes more than {COMPILE_CPU_S:.0f} s or too much memory"
            )
        elif compiled.problem is not None:
            outcome = _refused(grammar, _NOISE.sub("", compiled.problem).strip().partition("\n")[0][:300])
        elif compiled.worst_mask_s > MAX_MASK_S:
            outcome = _too_complex(grammar, "what may follow an output takes too long to find")
        elif compiled.num_bytes > MAX_COMPILED_BYTES:
            outcome = _too_complex(grammar, f"compiled it takes more than {MAX_COMPILED_BYTES >> 20} MiB")
        self._outcomes[grammar] = outcome
        if len(self._outcomes) > _NUM_KEPT:
            self._outcomes.popitem(last=False)
        return outcome


class _Worker:
    """One process at a time, started when it is needed; safe to use from several threads."""

    def __init__(self, arguments: list[str]) -> None:
        self._command = [sys.executable, "-m", "paceline.deploy.grammar_worker", *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._ended: weakref.finalize[[subprocess.Popen[bytes]], _Worker] | None = None

    def start(self) -> None:
        with self._lock:
            self._running()

    def compile(self, grammar: Grammar) -> Compiled | None:
        """What became of it; None if the process had to die of it."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                write_frame(process.stdin, grammar)  # pyright: ignore[reportArgumentType]
            return self._answer(process, _ANSWER_S)

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._ended = weakref.finalize(self, _kill, self._process)
        if self._answer(self._process, _START_S) is None:
            raise RuntimeError("the process that compiles grammars does not start")
        return self._process

    def _answer(self, process: "subprocess.Popen[bytes]", timeout_s: float) -> Compiled | None:
        assert process.stdout is not None
        is_there, _, _ = select.select([process.stdout], [], [], timeout_s)
        payload = read_frame(process.stdout) if is_there else None  # pyright: ignore[reportArgumentType]
        if payload is not None:
            return msgspec.msgpack.decode(payload, type=Compiled)
        assert self._ended is not None
        self._ended()
        self._process = None
        return None


def _kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def _refused(grammar: Grammar, problem: str) -> RequestError:
    code = "invalid_json_schema" if grammar.kind == "json_schema" else "invalid_grammar"
    return _error(grammar, problem, code)


def _too_complex(grammar: Grammar, problem: str) -> RequestError:
    return _error(grammar, problem, "grammar_too_complex")


def _error(grammar: Grammar, problem: str, code: str) -> RequestError:
    param = {"json_schema": "response_format", "structural_tag": "tools"}.get(
        grammar.kind, "structured_outputs"
    )
    return RequestError(f"The grammar of '{param}' is refused: {problem}.", code=code, param=param)
