"""What the scheduler counts beside a request's tokens: rows of steps, lengths of blocks, refusals, times."""

from collections.abc import Iterator

import pytest
from fake_ranks import FakeRanks
from fake_shards import FakeShard, right

from paceline.cluster.messages import (
    Output,
    Outputs,
    Refused,
    SamplingParams,
    ShardPlan,
    ShardReady,
    StepPlan,
    Submit,
)
from paceline.scheduler.events import Command, DraftsArrived, Event, ShardUp, ToShard
from paceline.scheduler.limits import Limits
from paceline.scheduler.state import Scheduler

PAGE_SIZE = 4
SHARD = "shard0.1"


class House:
    """A scheduler with a rank and a shard under a clock that a draft phase moves by half a second."""

    def __init__(self) -> None:
        limits = Limits(
            num_pages=64, page_size=PAGE_SIZE, max_model_len=200, max_num_seqs=1, max_num_batched_tokens=8,
            max_queued_requests=1, aging_s=30.0, draft_budget=False,
        )  # fmt: skip
        self.now = 0.0
        self.told: list[Command] = []
        self.scheduler = Scheduler(limits, check=True)
        self._ranks = FakeRanks(limits.num_pages, PAGE_SIZE)
        ready = ShardReady(shard=0, max_drafts=3, tap_layer_ids=[1], num_pages=32)
        self._shard = FakeShard(ready, self._ranks, right)
        self._due: list[StepPlan | ShardPlan] = []
        self.take(ShardUp(SHARD, ready))

    def take(self, event: Event) -> None:
        for command in self.scheduler.handle(event, self.now):
            self.told.append(command)
            match command:
                case StepPlan():
                    self._due.append(command)
                case ToShard(_, ShardPlan() as plan):
                    self._due.append(plan)
                case _:
                    pass

    def submit(self, request_id: str, *, is_traced: bool = False) -> None:
        params = SamplingParams(max_tokens=12)
        self.take(
            Submit(request_id=request_id, prompt_ids=[*range(1, 11)], params=params, is_traced=is_traced)
        )

    def run(self) -> None:
        while self._due:
            match self._due.pop(0):
                case StepPlan() as plan:
                    self.take(self._ranks.execute(plan))
                case plan:
                    self.now += 0.5
                    self.take(DraftsArrived(SHARD, self._shard.execute(plan)))

    def outputs(self, request_id: str) -> Iterator[Output]:
        for command in self.told:
            if isinstance(command, Outputs):
                yield from (output for output in command.outputs if output.request_id == request_id)


def test_steps_and_blocks_are_counted_by_their_size() -> None:
    """A prompt of ten in chunks of 8 and 2; then blocks of 3, 3 and 2 drafts, all of which stand."""
    house = House()
    house.submit("a")
    house.run()
    stats = house.scheduler.stats()
    assert stats.num_rows == 8 + 2 + 4 + 4 + 3
    assert stats.steps_by_rows == [0, 1, 3, 1]  # 1, 2, 3-4, 5-8 rows
    assert stats.blocks_by_len == [0, 0, 1, 2]
    assert (stats.num_verify_steps, stats.verify_s) == (3, pytest.approx(0.003))
    assert stats.num_propose_choices == stats.num_steps
    assert stats.num_proposed_tokens >= stats.num_draft_tokens == 8
    assert stats.budget_mode == "off"  # every draft is verified


def test_a_traced_request_hears_what_its_steps_took() -> None:
    for is_traced in (True, False):
        house = House()
        house.submit("a", is_traced=is_traced)
        house.run()
        told = [(output.draft_s, output.verify_s) for output in house.outputs("a")]
        assert len(told) == 4
        assert told[1:] == ([(0.5, 0.001)] * 3 if is_traced else [(0.0, 0.0)] * 3)


def test_waiting_and_refusals() -> None:
    house = House()
    for request_id in ("a", "b", "c"):
        house.submit(request_id)
    assert [command.request_id for command in house.told if isinstance(command, Refused)] == ["c"]
    assert house.scheduler.stats().num_rejected == 1
    house.run()
    (first_a, *_), (first_b, *_, last_b) = house.outputs("a"), house.outputs("b")
    assert first_a.queue_s == 0.0
    assert first_b.queue_s > 1.0  # while "a" had its place
    assert last_b.queue_s == 0.0
