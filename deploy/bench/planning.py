"""`paceline bench scheduler`: what deciding costs, with every place taken by a decoding sequence.

A step is to settle a result and plan the next; with drafts also to make the shard's plan and take its answer.
The times are processor time: deciding never waits, and the machine may be busy with other things.
"""

import time
from collections.abc import Sequence

import msgspec
from rich.table import Table

from ...cluster.messages import (
    Chunk,
    Decision,
    Draft,
    Drafts,
    SamplingParams,
    ShardPlan,
    ShardReady,
    StepPlan,
    StepResult,
    Submit,
)
from ...scheduler.actor import calm_collector
from ...scheduler.events import Command, DraftsArrived, ShardUp, ToShard
from ...scheduler.limits import Limits
from ...scheduler.state import Scheduler
from .measure import quantile
from .planning_mode import PlanningMode

PAGE_SIZE = 16
PROMPT_LEN = 128
DECODE_ONLY = 64  # steps that the admissions and the budget's first steps may take


class PlanningCase(msgspec.Struct, frozen=True, kw_only=True):
    """How the sequences decode: with `num_drafts` drafts each, of which `num_accepted` stand."""

    num_drafts: int = 0
    num_accepted: int = 0
    has_budget: bool = False

    @classmethod
    def of(cls, mode: PlanningMode, num_drafts: int, num_accepted: int) -> "PlanningCase":
        if mode is PlanningMode.PLAIN:
            return cls()
        num_accepted = min(num_accepted, num_drafts)
        return cls(num_drafts=num_drafts, num_accepted=num_accepted, has_budget=mode is PlanningMode.BUDGET)


class PlanningRow(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of processor time per step."""

    mode: PlanningMode
    running: int
    median_ms: float
    p99_ms: float


class PlanningReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    num_drafts: int
    num_accepted: int
    rows: list[PlanningRow]


def measure_planning(
    runnings: Sequence[int], num_steps: int, modes: Sequence[PlanningMode], num_drafts: int, num_accepted: int
) -> PlanningReport:
    """One row for each mode and number of running sequences."""
    rows: list[PlanningRow] = []
    for mode in modes:
        case = PlanningCase.of(mode, num_drafts, num_accepted)
        for num_running in runnings:
            calm_collector()
            times_ms = [1e3 * s for s in step_times_s(num_running, num_steps, case)]
            median_ms, p99_ms = (round(quantile(times_ms, share), 4) for share in (0.5, 0.99))
            rows.append(PlanningRow(mode=mode, running=num_running, median_ms=median_ms, p99_ms=p99_ms))
    return PlanningReport(num_drafts=num_drafts, num_accepted=num_accepted, rows=rows)


def table_of(report: PlanningReport) -> Table:
    """The rows for a terminal."""
    table = Table(box=None, pad_edge=False)
    table.add_column("mode")
    for header in ("running", "median ms", "p99 ms"):
        table.add_column(header, justify="right")
    for row in report.rows:
        table.add_row(row.mode, str(row.running), f"{row.median_ms:.3f}", f"{row.p99_ms:.3f}")
    return table


def step_times_s(num_running: int, num_steps: int, case: PlanningCase) -> list[float]:
    """Seconds that `handle` takes for each of `num_steps` steps, all sequences decoding."""
    scheduler, plan = _begin(num_running, num_steps, case)
    times_s: list[float] = []
    while len(times_s) < num_steps:
        result = StepResult(step=plan.step, decisions=[_decide(chunk, case) for chunk in plan.chunks])
        commands, elapsed_s = _timed(scheduler, result)
        match commands[0]:
            case ToShard(peer, ShardPlan() as shard_plan):
                commands, more_s = _timed(scheduler, DraftsArrived(peer, _draft(shard_plan)))
                elapsed_s += more_s
            case _:
                pass
        assert isinstance(commands[0], StepPlan)
        plan = commands[0]
        if not plan.admit and len(plan.chunks) == num_running and len(result.decisions) == num_running:
            times_s.append(elapsed_s)
    return times_s


def _begin(num_running: int, num_steps: int, case: PlanningCase) -> tuple[Scheduler, StepPlan]:
    """A scheduler with so many requests, and its first plan."""
    max_tokens = (num_steps + DECODE_ONLY) * (case.num_accepted + 1)
    limits = Limits(
        num_pages=num_running * (-(-(PROMPT_LEN + max_tokens) // PAGE_SIZE) + 2),
        page_size=PAGE_SIZE,
        max_model_len=PROMPT_LEN + max_tokens,
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running * PROMPT_LEN,
        max_queued_requests=num_running,
        aging_s=30.0,
        draft_budget=case.has_budget,
    )
    scheduler = Scheduler(limits)
    if case.num_drafts > 0:
        num_pages = limits.num_pages + num_running
        ready = ShardReady(shard=0, max_drafts=case.num_drafts, tap_layer_ids=[0], num_pages=num_pages)
        scheduler.handle(ShardUp("shard0.1", ready), 0.0)
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=[0])
    plans: list[StepPlan] = []
    for index in range(num_running):
        # Lengths differ, or all sequences would fill their pages in the same step.
        prompt_ids = [1 + index, *[1] * (PROMPT_LEN - 1 - index % PAGE_SIZE)]
        submit = Submit(request_id=f"request-{index}", prompt_ids=prompt_ids, params=params)
        plans += [command for command in scheduler.handle(submit, 0.0) if isinstance(command, StepPlan)]
    return scheduler, plans[0]


def _timed(scheduler: Scheduler, event: StepResult | DraftsArrived) -> tuple[list[Command], float]:
    began = time.thread_time()
    commands = scheduler.handle(event, 0.0)
    return commands, time.thread_time() - began


def _decide(chunk: Chunk, case: PlanningCase) -> Decision:
    token_ids = [7] * chunk.num_decided
    if len(token_ids) > case.num_accepted > 0:
        token_ids[case.num_accepted] = 8
    return Decision(chunk.sequence_id, token_ids)


def _draft(plan: ShardPlan) -> Drafts:
    drafts = [Draft(p.sequence_id, [7] * plan.num_drafts, [0.5] * plan.num_drafts) for p in plan.propose]
    return Drafts(number=plan.number, drafts=drafts)
