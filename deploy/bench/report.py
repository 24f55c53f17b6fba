"""The result of a benchmark run: what is stored as JSON, and the tables made of it."""

import os
import platform
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import msgspec
import psutil
from rich.table import Table

from ...cluster.errors import UserError
from .measure import Measurement
from .setting import Workload

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
OURS = "paceline"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where the run took place."""

    cpu: str
    num_cores: int
    memory_gib: float


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """Every peer measured once, one after the other. The keys of both tables are peers."""

    copy_gb_per_s: float  # memory copied before the round, bytes read and written together
    idle_percent: dict[str, float]  # of all cores, just before the peer was started
    measured: dict[str, list[Measurement]]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    date: str
    model: str
    dtype: str
    versions: dict[str, str]
    workload: Workload
    machine: Machine
    rounds: list[Round]
    skipped: dict[str, str]  # peer: why


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One peer at one concurrency: medians over the rounds."""

    peer: str
    concurrency: int
    tokens_per_s: float
    slowest_tokens_per_s: float
    fastest_tokens_per_s: float
    ttft_ms: float
    tpot_ms: float
    gap_p99_ms: float
    ours_over_it: float | None  # our tokens/s over its, the median of the rounds' ratios
    step_us: float | None
    overhead_us: float | None


def rows_of(report: Report) -> list[Row]:
    """All rows, ordered by concurrency, then by peer as measured."""
    peers = list(dict.fromkeys(peer for round_ in report.rounds for peer in round_.measured))
    concurrencies = sorted({m.concurrency for m in _all(report)})
    return [
        _row(report, peer, concurrency)
        for concurrency in concurrencies
        for peer in peers
        if any(_at(round_, peer, concurrency) for round_ in report.rounds)
    ]


def rich_table(report: Report) -> Table:
    """The rows for a terminal."""
    table = Table(title=f"{report.dtype}, {_workload(report)}", box=None, pad_edge=False)
    for header in HEADERS:
        table.add_column(header, justify="left" if header == "server" else "right")
    for row in rows_of(report):
        table.add_row(*_cells(row))
    return table


def markdown(report: Report) -> str:
    """What a run writes into docs/benchmarks.md: conditions, rows, engine overhead, what was left out."""
    lines = [
        *_conditions(report),
        "",
        *_markdown_table(HEADERS, [_cells(row) for row in rows_of(report)]),
    ]
    ours = [row for row in rows_of(report) if row.step_us is not None and row.overhead_us is not None]
    if ours:
        lines += ["", *_markdown_table(STEP_HEADERS, [_step_cells(row) for row in ours])]
    if report.skipped:
        lines += ["", *(f"- {peer}: not measured; {why}" for peer, why in report.skipped.items())]
    return "\n".join(lines) + "\n"


def around_markers(page: Path) -> tuple[str, str]:
    """The text before and after the measured part of `page`. Raises UserError when there is no such part."""
    text = page.read_text() if page.exists() else ""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise UserError(f"{page} lacks the lines {BEGIN!r} and {END!r}; add them where the tables belong")
    return head, tail


def write_into(page: Path, section: str) -> None:
    """Replace the measured part of `page`. Raises UserError when it has none."""
    head, tail = around_markers(page)
    page.write_text(f"{head}{BEGIN}\n{section}{END}{tail}")


def this_machine() -> Machine:
    """Where we are; the processor's name is told by Linux only."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return Machine(
        cpu=names[0] if names else platform.machine(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_gib=psutil.virtual_memory().total / 2**30,
    )


HEADERS = ("streams", "server", "tokens/s", "range", "TTFT ms", "TPOT ms", "gap p99", "ours/it")
STEP_HEADERS = ("streams", "server", "step us", "of it scheduler + channel us", "share")


def _conditions(report: Report) -> list[str]:
    machine = report.machine
    idle = [percent for round_ in report.rounds for percent in round_.idle_percent.values()]
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    return [
        f"{report.model}, {report.dtype}, {_workload(report)}.",
        f"{report.date}, {machine.cpu}, {machine.num_cores} cores, {machine.memory_gib:.0f} GiB;",
        f"memory copy {_span([r.copy_gb_per_s for r in report.rounds])} GB/s (read and written);",
        f"cores {_span(idle)} % idle before a server started. {versions}.",
        f"Medians of {len(report.rounds)} rounds in which the servers took turns.",
    ]


def _row(report: Report, peer: str, concurrency: int) -> Row:
    found = [m for round_ in report.rounds if (m := _at(round_, peer, concurrency))]
    speeds = [m.tokens_per_s for m in found]
    ratios = [
        ours.tokens_per_s / theirs.tokens_per_s
        for round_ in report.rounds
        if (ours := _at(round_, OURS, concurrency)) and (theirs := _at(round_, peer, concurrency))
    ]
    counters = [m.counters for m in found if m.counters and m.counters.num_steps]
    return Row(
        peer=peer,
        concurrency=concurrency,
        tokens_per_s=median(speeds),
        slowest_tokens_per_s=min(speeds),
        fastest_tokens_per_s=max(speeds),
        ttft_ms=1e3 * median(m.ttft_p50_s for m in found),
        tpot_ms=1e3 * median(m.tpot_p50_s for m in found),
        gap_p99_ms=1e3 * median(m.gap_p99_s for m in found),
        ours_over_it=median(ratios) if ratios and peer != OURS else None,
        step_us=1e6 * median(c.step_s for c in counters) if counters else None,
        overhead_us=1e6 * median(c.overhead_s for c in counters) if counters else None,
    )


def _at(round_: Round, peer: str, concurrency: int) -> Measurement | None:
    return next((m for m in round_.measured.get(peer, []) if m.concurrency == concurrency), None)


def _all(report: Report) -> Iterable[Measurement]:
    return (m for round_ in report.rounds for measured in round_.measured.values() for m in measured)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        str(row.concurrency),
        row.peer,
        f"{row.tokens_per_s:.1f}",
        f"{row.slowest_tokens_per_s:.1f}-{row.fastest_tokens_per_s:.1f}",
        f"{row.ttft_ms:.0f}",
        f"{row.tpot_ms:.1f}",
        f"{row.gap_p99_ms:.1f}",
        "" if row.ours_over_it is None else f"{row.ours_over_it:.2f}",
    )


def _step_cells(row: Row) -> tuple[str, ...]:
    assert row.step_us is not None
    assert row.overhead_us is not None
    share = row.overhead_us / row.step_us
    figures = (f"{row.step_us:.0f}", f"{row.overhead_us:.0f}", f"{100 * share:.1f} %")
    return (str(row.concurrency), row.peer, *figures)


def _markdown_table(headers: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (headers, ("---",) * len(headers), *rows)]


def _workload(report: Report) -> str:
    workload = report.workload
    kind = "chat" if workload.is_chat else "prompt"
    return f"{workload.prompt_len} {kind} tokens, {workload.num_new_tokens} new, greedy"


def _span(values: list[float]) -> str:
    return f"{min(values):.0f}-{max(values):.0f}"
