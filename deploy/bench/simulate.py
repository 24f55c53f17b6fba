"""`paceline bench simulate`: how many groups a load needs, by the scheduler that would serve it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from ...cluster.errors import UserError
from ...scheduler.limits import Limits
from ...scheduler.simulator import Costs, Drafter, Group, Simulation
from ...scheduler.traces import Arrival
from .client import Timing
from .load import Load
from .measure import Measurement, Objective, summarise
from .plot import Panel, draw

SMALL_CPU = Costs(
    step=((1, 17.1), (8, 28.8), (32, 69.4), (512, 560.0)),
    draft=((1, 6.0), (8, 14.0), (32, 40.0)),
    commit_ms=0.5,
)
GPU_8B = Costs.roofline(
    num_params=8e9, bytes_per_s=4.0e12, flop_per_s=4.0e14, draft_share=0.1, kv_bytes_per_token=131_072
)
PROFILES = {"small-cpu": SMALL_CPU, "gpu-8b": GPU_8B}


class SimulatedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One trace against one number of groups."""

    num_groups: int
    measured: Measurement
    busy: float  # share of the groups' time in which they computed
    num_preemptions: int
    met: float  # share of the requests that met the objective


def read_costs(name: str) -> Costs:
    """A profile by its name, or a JSON file of Costs. Raises UserError."""
    if name in PROFILES:
        return PROFILES[name]
    try:
        return msgspec.json.decode(Path(name).read_bytes(), type=Costs)
    except OSError:
        raise UserError(f"costs {name!r}: no profile ({', '.join(PROFILES)}) and no file") from None
    except msgspec.DecodeError as error:
        raise UserError(f'{name}: {error}; write {{"step": [[rows, ms], ...], "draft": ...}}') from None


def simulate(
    trace: Sequence[Arrival],
    num_groups: int,
    limits: Limits,
    costs: Costs,
    chance: float | None,
    objective: Objective,
) -> SimulatedRow:
    """Replay a trace. `chance` is that of a draft to stand; None: no drafter."""
    drafter = None if chance is None else Drafter(chance=lambda _: chance)
    groups = [Group(limits, costs, drafter, seed=index) for index in range(num_groups)]
    simulation = Simulation(groups)
    served = simulation.run(trace)
    timings = [Timing(s.num_tokens, s.times_s, s.prompt_len) for s in served if s.finish_reason == "length"]
    if not timings:
        raise UserError("every request was refused: prompts and outputs do not fit the limits")
    rate = len(trace) / max(arrival.at_s for arrival in trace) if len(trace) > 1 else 0.0
    measured = summarise(timings, Load(rate=rate), simulation.now, objective=objective)
    return SimulatedRow(
        num_groups=num_groups,
        measured=measured,
        busy=sum(group.busy_s for group in groups) / (num_groups * simulation.now),
        num_preemptions=sum(group.scheduler.stats().num_preemptions for group in groups),
        met=sum(objective.is_met(timing) for timing in timings) / len(served),
    )


def table_of(rows: Sequence[tuple[str, SimulatedRow]]) -> Table:
    """The rows for a terminal; milliseconds."""
    table = Table(box=None, pad_edge=False)
    headers = ("case", "groups", "tok/s", "TTFT p50", "p99", "TPOT p50", "p99", "met", "busy", "preempted")
    for header in headers:
        table.add_column(header, justify="right")
    for name, row in rows:
        m = row.measured
        times_s = (m.ttft_p50_s, m.ttft_p99_s, m.tpot_p50_s, m.tpot_p99_s)
        table.add_row(
            name,
            str(row.num_groups),
            f"{m.tokens_per_s:.0f}",
            *(f"{1e3 * s:.1f}" for s in times_s),
            f"{100 * row.met:.0f} %",
            f"{100 * row.busy:.0f} %",
            str(row.num_preemptions),
        )
    return table


def draw_capacity(file: Path, title: str, rows: dict[str, list[SimulatedRow]]) -> None:
    """Service by the rate of requests, a line for each number of groups."""

    def lines(value: Callable[[SimulatedRow], float]) -> dict[str, tuple[Sequence[float], Sequence[float]]]:
        return {
            name: ([row.measured.load.rate for row in found], [value(row) for row in found])
            for name, found in rows.items()
        }

    panels: list[Panel] = [
        ("requests per second", "tokens per second", lines(lambda row: row.measured.tokens_per_s)),
        ("requests per second", "TTFT p99, s", lines(lambda row: row.measured.ttft_p99_s)),
        ("requests per second", "objective met, %", lines(lambda row: 100 * row.met)),
    ]
    draw(file, title, panels)
