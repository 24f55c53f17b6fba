"""What deciding costs: settle one step and plan the next, with every place taken by a decoding sequence.

Run `python tests/bench_scheduler.py`. Prints microseconds per step, median and 99th percentile, of processor
time: deciding never waits, and the machine may be busy with other things. With drafts a step includes the
shard's plan; of its NUM_DRAFTS drafts NUM_ACCEPTED stand.
"""

import gc
import time

from paceline.cluster.messages import (
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
from paceline.scheduler.events import Command, DraftsArrived, ShardUp, ToShard
from paceline.scheduler.limits import Limits
from paceline.scheduler.state import Scheduler

PAGE_SIZE = 16
PROMPT_LEN = 128
NUM_DRAFTS = 7
NUM_ACCEPTED = 3


def step_times_s(
    num_running: int, num_steps: int, *, is_drafting: bool = False, has_budget: bool = False
) -> list[float]:
    """Seconds that `handle` takes for each of `num_steps` results, all sequences decoding."""
    max_tokens = (num_steps + 64) * (NUM_ACCEPTED + 1 if is_drafting else 1)
    limits = Limits(
        num_pages=num_running * (-(-(PROMPT_LEN + max_tokens) // PAGE_SIZE) + 2),
        page_size=PAGE_SIZE,
        max_model_len=PROMPT_LEN + max_tokens,
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running * PROMPT_LEN,
        max_queued_requests=num_running,
        aging_s=30.0,
        draft_budget=has_budget,
    )
    scheduler = Scheduler(limits)
    if is_drafting:
        ready = ShardReady(
            shard=0, max_drafts=NUM_DRAFTS, tap_layer_ids=[0], num_pages=limits.num_pages + num_running
        )
        scheduler.handle(ShardUp("shard0.1", ready), 0.0)
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=[0])
    plans: list[StepPlan] = []
    for i in range(num_running):
        prompt_ids = [1 + i, *[1] * (PROMPT_LEN - 1)]
        submit = Submit(request_id=f"request-{i}", prompt_ids=prompt_ids, params=params)
        plans += [command for command in scheduler.handle(submit, 0.0) if isinstance(command, StepPlan)]
    times_s: list[float] = []
    plan = plans[0]
    while len(times_s) < num_steps:
        result = StepResult(step=plan.step, decisions=[_decide(chunk) for chunk in plan.chunks])
        commands, elapsed_s = _timed(scheduler, result)
        if is_drafting and isinstance(commands[0], ToShard) and isinstance(commands[0].message, ShardPlan):
            arrived = DraftsArrived("shard0.1", _draft(commands[0].message))
            commands, more_s = _timed(scheduler, arrived)
            elapsed_s += more_s
        assert isinstance(commands[0], StepPlan)
        plan = commands[0]
        if not plan.admit and len(plan.chunks) == num_running and len(result.decisions) == num_running:
            times_s.append(elapsed_s)
    return times_s


def _timed(scheduler: Scheduler, event: StepResult | DraftsArrived) -> tuple[list[Command], float]:
    began = time.thread_time()
    commands = scheduler.handle(event, 0.0)
    return commands, time.thread_time() - began


def _decide(chunk: Chunk) -> Decision:
    token_ids = [7] * chunk.num_decided
    if len(token_ids) > NUM_ACCEPTED:
        token_ids[NUM_ACCEPTED] = 8
    return Decision(chunk.sequence_id, token_ids)


def _draft(plan: ShardPlan) -> Drafts:
    drafts = [Draft(p.sequence_id, [7] * plan.num_drafts, [0.5] * plan.num_drafts) for p in plan.propose]
    return Drafts(number=plan.number, drafts=drafts)


def main() -> None:
    stand = f"{NUM_DRAFTS} drafts, {NUM_ACCEPTED} of them stand"
    for title, is_drafting, has_budget in (
        ("no drafts", False, False),
        (stand, True, False),
        (f"{stand}, with the budget", True, True),
    ):
        print(f"{title}:")
        for num_running in (32, 256, 1024):
            gc.collect()
            times_s = sorted(step_times_s(num_running, 200, is_drafting=is_drafting, has_budget=has_budget))
            median_us, p99_us = times_s[len(times_s) // 2] * 1e6, times_s[int(len(times_s) * 0.99)] * 1e6
            print(f"{num_running:5d} running: median {median_us:7.0f} us, p99 {p99_us:7.0f} us per step")


if __name__ == "__main__":
    main()
