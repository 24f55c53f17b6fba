"""The planner's policies: who gives way, who gets in, who gets a row; and what settling leaves behind."""

from fake_ranks import FakeRanks

from paceline.cluster.messages import Admit, Chunk, Decision, SamplingParams, StepPlan, Submit, TokenLogprobs
from paceline.scheduler.events import Command
from paceline.scheduler.limits import Limits
from paceline.scheduler.request import Request
from paceline.scheduler.settling import settle
from paceline.scheduler.state import Scheduler


class Engine:
    """A scheduler with fake ranks, stepped by hand."""

    def __init__(
        self,
        num_pages: int,
        *,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 64,
        prefix_cache: bool = False,
    ) -> None:
        limits = Limits(
            num_pages=num_pages,
            page_size=4,
            max_model_len=100,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_queued_requests=8,
            aging_s=30.0,
            prefix_cache=prefix_cache,
        )
        self.scheduler = Scheduler(limits, check=True)
        self.ranks = FakeRanks(num_pages, 4)
        self.plan: StepPlan | None = None

    def submit(self, request_id: str, prompt_len: int, max_tokens: int = 20, priority: int = 0) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        submit = Submit(request_id=request_id, prompt_ids=[1] * prompt_len, params=params, priority=priority)
        self._keep_plan(self.scheduler.handle(submit, 0.0))
        assert request_id in self.scheduler._live, "refused"

    def step(self) -> StepPlan:
        """Answer the plan in flight; returns the next."""
        assert self.plan is not None
        result, self.plan = self.ranks.execute(self.plan), None
        self._keep_plan(self.scheduler.handle(result, 0.0))
        assert self.plan is not None
        return self.plan

    def run_to_preemption(self) -> list[str]:
        """Step until somebody has been preempted; returns who waits."""
        while self.scheduler.stats().num_preemptions == 0:
            self.step()
        return [request.request_id for request in self.scheduler._queue]

    def sequence_of(self, request_id: str) -> int:
        return self.scheduler._live[request_id].sequence_id

    def _keep_plan(self, commands: list[Command]) -> None:
        if commands and isinstance(commands[0], StepPlan):
            self.plan = commands[0]


def test_a_prompt_that_comes_twice_is_read_once() -> None:
    """The choices of one request are submitted together; a different prompt is not held up by them."""
    engine = Engine(40, prefix_cache=True, max_num_seqs=6, max_num_batched_tokens=20)
    engine.submit("busy", 2)
    for request_id in ("first", "second", "third"):
        engine.submit(request_id, 13)
    engine.submit("other", 3)
    plans = [engine.step(), engine.step(), engine.step()]
    admitted = [[(len(a.token_ids), c.num_rows) for a, c in _admitted(plan)] for plan in plans]
    assert admitted == [[(13, 13), (3, 3)], [(13, 1), (13, 1)], []]
    assert engine.scheduler.stats().num_prefix_hits == 24


def _admitted(plan: StepPlan) -> list[tuple[Admit, Chunk]]:
    chunks = {chunk.sequence_id: chunk for chunk in plan.chunks}
    return [(admit, chunks[admit.sequence_id]) for admit in plan.admit]


def test_the_least_computed_gives_way() -> None:
    """Of two that are not the oldest, the one that loses less work goes, though the other is younger."""
    engine = Engine(10)
    engine.submit("oldest", 5)
    engine.submit("short", 4)
    engine.submit("long", 12)
    assert engine.run_to_preemption() == ["short"]


def test_the_oldest_stays_though_it_has_computed_least() -> None:
    """Somebody must be sure to end."""
    engine = Engine(10)
    engine.submit("oldest", 4)
    engine.submit("young", 12)
    assert engine.run_to_preemption() == ["young"]


def test_the_youngest_of_equals_gives_way() -> None:
    """Equal work lost: the one that came last has the least claim."""
    engine = Engine(12, max_num_seqs=3)
    engine.submit("first", 7)
    engine.submit("second", 6)
    engine.submit("third", 6)
    assert engine.run_to_preemption() == ["third"]


def test_the_less_urgent_gives_way_first() -> None:
    """Priority counts before work lost."""
    engine = Engine(10)
    engine.submit("oldest", 5)
    engine.submit("urgent", 4, priority=-1)
    engine.submit("idle", 12, priority=2)
    assert engine.run_to_preemption() == ["idle"]


def test_a_victim_does_not_return_in_the_plan_it_made_way_for() -> None:
    """Its pages go to those that needed them."""
    engine = Engine(8)
    engine.submit("old", 6)
    engine.submit("young", 5)
    engine.run_to_preemption()
    assert engine.plan is not None
    assert engine.plan.admit == []
    assert len(engine.plan.release) == 1


def test_a_newcomer_needs_pages_for_its_prompt_and_one_for_each_running() -> None:
    """Exactly enough for the prompt alone is not enough; one page more is."""
    for num_pages, is_admitted in ((4, False), (5, True)):
        engine = Engine(num_pages)
        engine.submit("running", 5, max_tokens=2)  # two pages
        engine.submit("newcomer", 8, max_tokens=4)
        assert bool(engine.step().admit) is is_admitted


def test_pages_that_a_half_read_prompt_still_needs_are_not_given_away() -> None:
    """A newcomer that would fit beside what is read so far waits, for the rest of the prompt will come."""
    engine = Engine(8, max_num_batched_tokens=8)
    engine.submit("long", 24, max_tokens=8)
    engine.submit("newcomer", 4, max_tokens=20)
    engine.submit("tiny", 1, max_tokens=2)
    plan = engine.step()
    assert [(chunk.start, chunk.num_rows) for chunk in plan.chunks] == [(8, 8)]
    plan = engine.step()
    assert [(chunk.start, chunk.num_rows) for chunk in plan.chunks] == [(16, 8)]
    assert plan.admit == []


def test_the_oldest_reads_on_while_younger_ones_decode() -> None:
    """A late-admitted elder with a long prompt gets a row in every step, by preemption if need be."""
    engine = Engine(14, max_num_seqs=3, max_num_batched_tokens=3)
    engine.submit("b", 1, max_tokens=40)
    engine.submit("elder", 26, max_tokens=2, priority=5)
    engine.submit("c", 1, max_tokens=40)
    while not any(len(admit.token_ids) >= 26 for admit in engine.step().admit):
        pass
    elder = engine.scheduler._live["elder"]
    # Only b came before it; with that changed, it is the oldest and least computed of all that run.
    elder.order = -1
    while "elder" in engine.scheduler._live:
        assert engine.plan is not None
        assert elder.sequence_id in {chunk.sequence_id for chunk in engine.plan.chunks}
        engine.step()
    assert elder.num_preemptions == 0
    assert engine.scheduler.stats().num_preemptions >= 1


def test_settling_ends_with_the_token_that_completes_the_request() -> None:
    """Of several decided tokens those behind a stop token are dropped, with their logprobs."""
    params = SamplingParams(max_tokens=9, stop_token_ids=[5], logprobs=0)
    request = Request(
        Submit(request_id="a", prompt_ids=[1], params=params), arrival_s=0.0, order=0, page_size=4
    )
    logprobs = [TokenLogprobs(-1.0, []), TokenLogprobs(-2.0, []), TokenLogprobs(-3.0, [])]
    output = settle(request, Chunk(0, 0, 3, [4, 5], [], 3), Decision(0, [4, 5, 6], True, logprobs))
    assert output is not None
    assert (output.token_ids, output.finish_reason) == ([4, 5], "stop")
    assert output.logprobs == logprobs[:2]
    assert request.tokens == [1, 4, 5]
