"""`paceline batch`: one file of requests in, one of answers out, whatever happens in between.

OUT.jsonl          the answers
OUT.errors.jsonl   what was refused, and lines that are no requests
OUT.summary.json   the counts, and which input it was
OUT.parts/         while it runs: what a next run of the same command goes on from
"""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...cluster.config import Config
from ...cluster.errors import ConfigError
from ...cluster.model_source import resolve_model
from ..startup import StartupView
from .answers import local_answer, server_answer
from .job import Answer, Totals, run_batch
from .lines import read_batch
from .segments import write_durably
from .view import BatchView, tokens_per_s

SERVER_CONCURRENCY = 64
EXIT_FAILED_LINES = 3


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """What a batch is asked for beside its engine."""

    source: Path
    output: Path
    url: str | None  # of a server; None: an engine of our own
    concurrency: int | None
    num_replicas: int | None  # at most, on Ray; None: one engine in this process, unless Ray is given
    min_replicas: int | None
    is_ordered: bool
    grace_s: float


def run_command(config: Config, options: BatchOptions) -> int:
    """Run a batch, or go on with it; returns the exit code. Raises UserError, EngineError."""
    if options.source.resolve() == options.output.resolve():
        raise ConfigError(f"{options.output} is the input, too; choose another output")
    if options.output.exists() and not _parts(options.output).exists():
        return _already(options)
    return asyncio.run(_run(config, options))


async def _run(config: Config, options: BatchOptions) -> int:
    async with _answerer(config, options) as (answer, concurrency):
        stopping = asyncio.Event()
        received: list[signal.Signals] = []
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):  # after Ray has put its own

            def stop(number: signal.Signals = number) -> None:
                received.append(number)
                stopping.set()

            loop.add_signal_handler(number, stop)
        with BatchView() as view:
            totals = await run_batch(
                options.source,
                _parts(options.output),
                answer,
                concurrency=concurrency,
                progress=view.update,
                stopping=stopping,
                grace_s=options.grace_s,
                is_ordered=options.is_ordered,
            )
        if not totals.is_complete:
            num_done = totals.num_completed + totals.num_failed
            view.say(f"stopped with {num_done} of {totals.num_lines} lines done; run it again to go on")
            return 128 + received[0]
        _publish(options, totals)
        view.say(_summary(options.output, totals))
        return EXIT_FAILED_LINES if totals.num_failed else 0


@contextlib.asynccontextmanager
async def _answerer(config: Config, options: BatchOptions) -> AsyncIterator[tuple[Answer, int]]:
    """Who answers, and how many lines it should be asked at once."""
    engine = config.engine
    at_once = options.concurrency or min(2 * engine.max_num_seqs, engine.max_queued_requests)
    if options.url is not None:
        at_once = options.concurrency or SERVER_CONCURRENCY
        async with server_answer(options.url, at_once) as answer:
            yield answer, at_once
    elif options.num_replicas is not None or "RAY_ADDRESS" in os.environ:
        num_max = options.num_replicas or 1
        async with _on_ray(config, options.min_replicas or num_max, num_max, at_once) as answer:
            yield answer, at_once * num_max
    else:
        from ..api.app import create_app
        from ..api.front import front_of
        from ..generate import running

        with StartupView() as view:
            path = resolve_model(config.model.model, config.model.revision, view.phase)
            view.phase("starting the engine")
            async with running(config, path) as own:
                view.close()
                yield local_answer(create_app(front_of(config, path, own, "batch"))), at_once


@contextlib.asynccontextmanager
async def _on_ray(config: Config, num_min: int, num_max: int, num_slots: int) -> AsyncIterator[Answer]:
    import ray

    from ..ray_session import start_ray
    from .replicas import ReplicaPool

    with StartupView() as view:
        view.phase("connecting to Ray" if "RAY_ADDRESS" in os.environ else "starting Ray")
        start_ray(config, num_engines=num_max)
        try:
            view.phase(f"starting {num_min} replica(s)")
            pool = ReplicaPool(config, num_min=num_min, num_max=num_max, num_slots=num_slots)
            async with pool.running() as answer:
                view.close()
                yield answer
        finally:
            ray.shutdown()


def _already(options: BatchOptions) -> int:
    """The output exists: a finished batch is not run again, and no other file is overwritten."""
    try:
        summary = msgspec.json.decode(_summary_file(options.output).read_bytes())
    except (OSError, msgspec.DecodeError):
        summary = {}
    if summary.get("input_sha256") != read_batch(options.source).digest:
        raise ConfigError(f"{options.output} exists; remove it or choose another output")
    print(f"{options.output} is complete: {summary['num_completed']} answers", flush=True)
    return EXIT_FAILED_LINES if summary["num_failed"] else 0


def _publish(options: BatchOptions, totals: Totals) -> None:
    """Give the results their names; a crash before the last step is mended by running again."""
    output, parts = options.output, _parts(options.output)
    summary = {
        "input_sha256": msgspec.json.decode((parts / "manifest.json").read_bytes())["input_sha256"],
        "num_lines": totals.num_lines,
        "num_completed": totals.num_completed,
        "num_failed": totals.num_failed,
        "num_resumed": totals.num_resumed,
        "prompt_tokens": totals.prompt_tokens,
        "completion_tokens": totals.completion_tokens,
        "seconds": round(totals.seconds, 3),
        "tokens_per_s": round(tokens_per_s(totals), 1),
    }
    write_durably(_summary_file(output), [msgspec.json.encode(summary) + b"\n"])
    os.replace(parts / "errors.jsonl", output.with_suffix(".errors.jsonl"))
    os.replace(parts / "output.jsonl", output)
    shutil.rmtree(parts)


def _summary(output: Path, totals: Totals) -> str:
    failed = (
        f", {totals.num_failed} failed: {output.with_suffix('.errors.jsonl')}" if totals.num_failed else ""
    )
    speed = (
        f"{totals.completion_tokens} tokens in {totals.seconds:.1f} s, {tokens_per_s(totals):.0f} tokens/s"
    )
    return f"{totals.num_completed} answers in {output}{failed}; {speed}"


def _parts(output: Path) -> Path:
    return output.with_suffix(".parts")


def _summary_file(output: Path) -> Path:
    return output.with_suffix(".summary.json")
