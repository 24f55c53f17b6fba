"""`paceline bench serve`: one or two servers that are up, under loads they take in turns.

    for each round, for each load: every server in turn, the order reversed from round to round; a fresh slice
    of the prompts for each load of a round, the same for both servers

Both servers meet every drift of the machine, and their ratio is taken within a round.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console
from rich.table import Table

from .client import Asked, Client, Query, connected, read_stream
from .counters import StepCounters, read_step_counters
from .load import Load
from .measure import Measurement, Objective, summarise


class ServeRun(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be measured."""

    urls: list[str]
    loads: list[Load]
    num_requests: int  # per load and round
    num_rounds: int = 1
    num_warm_up: int = 4
    asked: Asked
    objective: Objective = Objective()


class ServeReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run: `measured[url]` holds, for each round, one measurement per load."""

    run: ServeRun
    models: dict[str, str]
    measured: dict[str, list[list[Measurement]]]

    def row(self, url: str, index: int) -> "ServeRow":
        """The medians over rounds of a server under load `index`."""
        rounds = [measured[index] for measured in self.measured[url]]
        first = self.run.urls[0]
        ratios = [
            theirs[index].tokens_per_s / ours[index].tokens_per_s
            for theirs, ours in zip(self.measured[url], self.measured[first], strict=True)
        ]
        drafts = [m.counters.tokens_per_block for m in rounds if m.counters is not None]
        known = [value for value in drafts if value is not None]
        return ServeRow(
            url=url,
            load=self.run.loads[index].name,
            tokens_per_s=median(m.tokens_per_s for m in rounds),
            ttft_p50_s=median(m.ttft_p50_s for m in rounds),
            ttft_p99_s=median(m.ttft_p99_s for m in rounds),
            gap_p50_s=median(m.gap_p50_s for m in rounds),
            gap_p99_s=median(m.gap_p99_s for m in rounds),
            tpot_p50_s=median(m.tpot_p50_s for m in rounds),
            e2e_p50_s=median(m.e2e_p50_s for m in rounds),
            e2e_p99_s=median(m.e2e_p99_s for m in rounds),
            goodput_per_s=median(m.goodput_per_s for m in rounds),
            tokens_per_block=median(known) if known else None,
            over_first=median(ratios) if url != first else None,
        )

    def rows(self) -> list["ServeRow"]:
        """All rows, ordered by load, then by server."""
        return [self.row(url, index) for index in range(len(self.run.loads)) for url in self.run.urls]


class ServeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One server under one load: medians over the rounds."""

    url: str
    load: str
    tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    gap_p50_s: float
    gap_p99_s: float
    tpot_p50_s: float
    e2e_p50_s: float
    e2e_p99_s: float
    goodput_per_s: float
    tokens_per_block: float | None  # what a verified block gave, from the server's /metrics
    over_first: float | None  # tokens/s against the first server, the median of the rounds' ratios


def run_serve(
    run: ServeRun, queries: Sequence[Query], console: Console, json_file: Path | None
) -> ServeReport:
    """Measure and print; `queries` are used up in order, then from the beginning again."""
    report = asyncio.run(measure(run, queries, console))
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    console.print(table_of(report))
    return report


async def measure(run: ServeRun, queries: Sequence[Query], console: Console) -> ServeReport:
    """All rounds. Raises BenchError when a server does not do what it is asked for."""
    models: dict[str, str] = {}
    measured: dict[str, list[list[Measurement]]] = {url: [] for url in run.urls}
    position = 0
    for url in run.urls:
        async with connected(url) as client:
            models[url] = client.model
            warm_up = _slice(queries, 0, run.num_warm_up)
            if warm_up:
                await Load(concurrency=len(warm_up)).run(client, warm_up, run.asked)
    position += run.num_warm_up
    for index in range(run.num_rounds):
        order = run.urls if index % 2 == 0 else run.urls[::-1]
        for url in run.urls:
            measured[url].append([])
        for load in run.loads:
            batch = _slice(queries, position, run.num_requests)
            position += run.num_requests
            for url in order:
                console.print(f"round {index + 1} of {run.num_rounds}: {load.name} at {url}", markup=False)
                async with connected(url) as client:
                    measured[url][-1].append(await _measure_load(client, run, load, batch, seed=index))
    return ServeReport(run=run, models=models, measured=measured)


async def _measure_load(
    client: Client, run: ServeRun, load: Load, batch: Sequence[Query], seed: int
) -> Measurement:
    before = await read_step_counters(client)
    streams, wall_s = await load.run(client, batch, run.asked, seed)
    counters = _difference(before, await read_step_counters(client))
    timings = []
    for stream in streams:
        assert stream.query is not None
        num_tokens = run.asked.tokens_of(stream.query) if run.asked.ignore_eos else None
        timings.append(read_stream(stream, num_tokens))
    return summarise(timings, load, wall_s, counters, run.objective)


def _difference(before: StepCounters | None, after: StepCounters | None) -> StepCounters | None:
    return after.since(before) if before is not None and after is not None else None


def _slice(queries: Sequence[Query], start: int, count: int) -> list[Query]:
    return [queries[(start + index) % len(queries)] for index in range(count)]


def table_of(report: ServeReport) -> Table:
    """The rows for a terminal; milliseconds, medians / 99th percentiles."""
    has_objective = report.run.objective != Objective()
    headers = ["load", "server", "tok/s", "TTFT", "ITL", "TPOT", "e2e"]
    headers += ["good/s"] if has_objective else []
    headers += ["tok/block", "vs first"]
    table = Table(box=None, pad_edge=False)
    for header in headers:
        table.add_column(header, justify="left" if header == "server" else "right", no_wrap=True)
    for row in report.rows():
        cells = [row.load, row.url.partition("//")[2] or row.url, f"{row.tokens_per_s:.1f}"]
        cells += [_both_ms(row.ttft_p50_s, row.ttft_p99_s), _both_ms(row.gap_p50_s, row.gap_p99_s)]
        cells += [f"{1e3 * row.tpot_p50_s:.1f}", _both_ms(row.e2e_p50_s, row.e2e_p99_s)]
        cells += [f"{row.goodput_per_s:.2f}"] if has_objective else []
        cells += ["" if row.tokens_per_block is None else f"{row.tokens_per_block:.2f}"]
        cells += ["" if row.over_first is None else f"{row.over_first:.3f}"]
        table.add_row(*cells)
    return table


def _both_ms(median_s: float, p99_s: float) -> str:
    return f"{1e3 * median_s:.0f}/{1e3 * p99_s:.0f}"
