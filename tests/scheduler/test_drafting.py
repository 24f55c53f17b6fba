"""A scheduler beside fake ranks and shards: the rules of the draft phase, one by one."""

from fake_ranks import FakeRanks, undisturbed
from fake_shards import FakeShard, Proposal, broken, mixed, right, wrong

from paceline.cluster.messages import (
    Chunk,
    Output,
    Outputs,
    SamplingParams,
    ShardLost,
    ShardPlan,
    ShardReady,
    ShardSilent,
    Shutdown,
    StepPlan,
    Submit,
)
from paceline.scheduler.budget import share_rows
from paceline.scheduler.events import Command, DraftsArrived, DraftsOverdue, Event, ShardUp, ToShard
from paceline.scheduler.limits import Limits
from paceline.scheduler.state import Scheduler

PAGE_SIZE = 4


def ready_of(shard: int = 0, **changes: int) -> ShardReady:
    defaults = {"max_drafts": 3, "num_pages": 32, "max_context_len": 0}
    return ShardReady(shard=shard, tap_layer_ids=[1], **{**defaults, **changes})


class House:
    """A scheduler with everything it talks to, run until it has nothing left to do."""

    def __init__(self, **changes: int | bool | None) -> None:
        defaults: dict[str, int | float | bool | None] = {
            "num_pages": 64,
            "page_size": PAGE_SIZE,
            "max_model_len": 200,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_queued_requests": 16,
            "aging_s": 30.0,
            "draft_budget": False,  # phase by phase as the rules say; what pays is judged in test_budget.py
        }
        limits = Limits(**{**defaults, **changes})  # pyright: ignore[reportArgumentType]
        self.scheduler = Scheduler(limits, check=True)
        self.ranks = FakeRanks(limits.num_pages, PAGE_SIZE)
        self.shards: dict[str, FakeShard] = {}
        self.sent: list[Command] = []  # all commands there were
        self.due: list[StepPlan | tuple[str, ShardPlan]] = []
        self.outputs: dict[str, list[Output]] = {}
        self.retired: list[str] = []

    def start_shard(self, peer: str = "shard0.1", proposal: Proposal = right, **changes: int) -> FakeShard:
        ready = ready_of(int(peer[5 : peer.index(".")]), **changes)
        shard = self.shards[peer] = FakeShard(ready, self.ranks, proposal)
        self.handle(ShardUp(peer, ready))
        return shard

    def submit(
        self,
        request_id: str = "a",
        prompt_ids: list[int] | None = None,
        *,
        max_tokens: int = 12,
        seed: int = 0,
        salt: str = "",
        max_draft_tokens: int | None = None,
        stop_token_ids: list[int] | None = None,
    ) -> None:
        params = SamplingParams(max_tokens=max_tokens, seed=seed, stop_token_ids=stop_token_ids or [])
        self.handle(
            Submit(
                request_id=request_id,
                prompt_ids=prompt_ids or [1, 2, 3],
                params=params,
                cache_salt=salt,
                max_draft_tokens=max_draft_tokens,
            )
        )

    def handle(self, event: Event) -> None:
        for command in self.scheduler.handle(event, 0.0):
            self.sent.append(command)
            match command:
                case StepPlan():
                    self.due.append(command)
                case ToShard(peer, ShardPlan() as plan):
                    self.due.append((peer, plan))
                case ToShard(peer, Shutdown()):
                    self.retired.append(peer)
                case Outputs():
                    for output in command.outputs:
                        self.outputs.setdefault(output.request_id, []).append(output)
                case _:
                    pass

    def answer(self) -> StepPlan | ShardPlan:
        """Answer what has been due for longest; returns what it was."""
        match self.due.pop(0):
            case StepPlan() as plan:
                self.handle(self.ranks.execute(plan))
                return plan
            case (peer, plan):
                self.handle(DraftsArrived(peer, self.shards[peer].execute(plan)))
                return plan

    def run(self) -> None:
        while self.due:
            self.answer()
        assert not self.scheduler.has_work

    def tokens_of(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]


def test_right_drafts_make_blocks() -> None:
    """Each verify emits the block and one more; the text is the undisturbed one; the last block shrinks."""
    house = House()
    shard = house.start_shard()
    house.submit(max_tokens=12)
    house.run()
    assert house.tokens_of("a") == undisturbed([1, 2, 3], SamplingParams(max_tokens=12))[0]
    lens = [(o.num_drafts, o.num_accepted, len(o.token_ids)) for o in house.outputs["a"]]
    assert lens == [(0, 0, 1), (3, 3, 4), (3, 3, 4), (2, 2, 3)]
    stats = house.scheduler.stats()
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 8, 8)
    assert stats.accepted_per_pos == [3, 3, 2]
    assert len(shard.plans) == stats.num_draft_phases


def test_wrong_drafts_change_nothing() -> None:
    """One token for each verify, and the same text."""
    for proposal in (wrong, mixed):
        house = House()
        house.start_shard(proposal=proposal)
        house.submit(max_tokens=12)
        house.run()
        assert house.tokens_of("a") == undisturbed([1, 2, 3], SamplingParams(max_tokens=12))[0]
        assert (house.scheduler.stats().num_accepted_tokens == 0) is (proposal is wrong)


def test_a_request_may_refuse_or_limit_drafts() -> None:
    """0: the shard never hears of it; 2: no block is longer."""
    house = House()
    shard = house.start_shard()
    house.submit("never", max_draft_tokens=0)
    house.run()
    assert shard.plans == []
    house.submit("few", max_draft_tokens=2)
    house.run()
    assert max(output.num_drafts for output in house.outputs["few"]) == 2
    assert house.tokens_of("never") == house.tokens_of("few")


def test_configured_k_and_the_shards_most() -> None:
    """The lesser of the two is asked for."""
    for configured, most, asked in ((2, 3, 2), (None, 3, 3), (5, 3, 3)):
        house = House(num_draft_tokens=configured)
        shard = house.start_shard(max_drafts=most)
        house.submit(max_tokens=30)
        house.run()
        assert max(plan.num_drafts for plan in shard.plans) == asked


def test_drafts_give_way_to_rows_and_prompts() -> None:
    """Decodes keep their row, a waiting prompt at least half of what they leave."""
    assert share_rows([3, 1, 5], 9) == [3, 1, 5]
    assert share_rows([3, 1, 5], 6) == [2, 1, 2]
    assert share_rows([3, 1], 0) == [0, 0]
    house = House(max_num_batched_tokens=9)
    house.start_shard(max_drafts=8)
    house.submit("a", max_tokens=30)
    house.submit("b", list(range(20)), max_tokens=5)
    while not (chunks := _chunks(house)) or len(chunks) < 2 or chunks[0].num_decided < 2:
        house.answer()
    assert (chunks[0].num_rows, chunks[1].num_rows) == (5, 4)
    house.run()


def _chunks(house: House) -> list[Chunk]:
    first = house.due[0] if house.due else None
    return first.chunks if isinstance(first, StepPlan) else []


def test_the_stop_token_inside_a_block_ends_there() -> None:
    """What was drafted and decided behind it is dropped."""
    expected = undisturbed([1, 2, 3], SamplingParams(max_tokens=12))[0]
    house = House()
    house.start_shard(max_drafts=8)
    house.submit(stop_token_ids=[expected[3]])
    house.run()
    assert house.tokens_of("a") == expected[: expected.index(expected[3]) + 1]
    assert house.outputs["a"][-1].finish_reason == "stop"


def test_without_shards_there_is_no_draft_phase() -> None:
    """The plain road: a plan follows each result at once."""
    house = House()
    house.submit()
    house.run()
    assert not [command for command in house.sent if isinstance(command, ToShard)]
    assert house.scheduler.stats().num_draft_phases == 0


def test_outputs_go_out_behind_the_shards_plans() -> None:
    """The shards compute while the server is told."""
    house = House()
    house.start_shard()
    house.submit()
    house.answer()
    assert [type(command) for command in house.sent] == [StepPlan, ToShard, Outputs]


def test_every_prefill_chunk_is_committed() -> None:
    """The first draft has the whole prompt as its context."""
    house = House(max_num_batched_tokens=8)
    shard = house.start_shard()
    house.submit(prompt_ids=list(range(20)))
    house.run()
    commits = [commit for plan in shard.plans for commit in plan.commits]
    assert [(commit.base_position, commit.num_rows) for commit in commits[:4]] == [
        (0, 8),
        (8, 8),
        (16, 4),
        (20, 4),
    ]
    assert [bool(plan.propose) for plan in shard.plans[:3]] == [False, False, True]


def test_windows_slide_by_whole_pages() -> None:
    """The cap holds, memory stays flat, and the right drafts go on being right."""
    house = House(context_cap=10)
    shard = house.start_shard(num_pages=8)
    house.submit(max_tokens=100)
    house.run()
    slides = [slide.new_start for plan in shard.plans for slide in plan.slides]
    assert slides
    assert slides == sorted(slides)
    assert all(new_start % PAGE_SIZE == 0 for new_start in slides)
    stats = house.scheduler.stats()
    assert (stats.num_slides, stats.num_context_restarts) == (len(slides), 0)
    assert stats.num_accepted_tokens == stats.num_draft_tokens


def test_a_chunk_longer_than_the_cap_restarts_the_window() -> None:
    """Rows that would be slid away at once are not committed."""
    house = House(context_cap=8, max_num_batched_tokens=16)
    shard = house.start_shard()
    house.submit(prompt_ids=list(range(40)))
    house.run()
    commits = [commit for plan in shard.plans for commit in plan.commits][:3]
    assert [(c.base_position, c.num_rows, c.is_restart) for c in commits] == [
        (8, 8, False),
        (24, 8, True),
        (32, 8, False),
    ]


def test_a_short_pool_makes_short_windows() -> None:
    """Six sequences in ten pages: all end with their tokens, all draft, nobody fails."""
    house = House(num_pages=200)
    house.start_shard(num_pages=16)
    for seed in range(6):
        house.submit(f"r{seed}", list(range(seed, seed + 9)), max_tokens=30, seed=seed)
    house.run()
    for seed in range(6):
        expected = undisturbed(list(range(seed, seed + 9)), SamplingParams(max_tokens=30, seed=seed))[0]
        assert house.tokens_of(f"r{seed}") == expected
        assert sum(output.num_accepted for output in house.outputs[f"r{seed}"]) > 5


def test_no_pages_at_all_means_no_drafts() -> None:
    """A pool too small for one block is used by nobody."""
    house = House()
    house.start_shard(num_pages=1)
    house.submit()
    house.run()
    assert house.scheduler.stats().num_drafts == 0
    assert len(house.tokens_of("a")) == 12


def test_a_lost_shard_costs_speed_only_and_its_next_life_restarts() -> None:
    """The context begins again where the sequence stands, and the story says so."""
    house = House()
    house.start_shard("shard0.1")
    house.submit(max_tokens=40)
    for _ in range(4):
        house.answer()
    house.due = [due for due in house.due if isinstance(due, StepPlan)]
    house.handle(ShardLost("shard0.1"))
    for _ in range(3):
        assert isinstance(house.answer(), StepPlan)
    second = house.start_shard("shard0.2")
    house.run()
    opened = second.plans[0].open[0]
    assert opened.start == opened.end > 3
    assert house.tokens_of("a") == undisturbed([1, 2, 3], SamplingParams(max_tokens=40))[0]
    stats = house.scheduler.stats()
    assert (stats.num_context_restarts, stats.shards[0].state) == (1, "ready")
    assert any("context restarts" in line for line in house.scheduler.story("a"))


def test_hot_swap_sends_the_old_life_home_between_two_steps() -> None:
    """It still answers what it was asked."""
    house = House()
    first = house.start_shard("shard0.1")
    house.submit(max_tokens=40)
    house.answer()
    assert house.scheduler.draft_phase == 1
    second = house.start_shard("shard0.2")
    assert house.retired == []
    house.answer()
    house.answer()
    assert house.retired == ["shard0.1"]
    num_plans = len(first.plans)
    house.run()
    assert (len(first.plans), len(second.plans) > 5) == (num_plans, True)
    assert house.tokens_of("a") == undisturbed([1, 2, 3], SamplingParams(max_tokens=40))[0]


def test_three_steps_of_non_finite_drafts_are_quarantined() -> None:
    """The service goes on; a new life is used again."""
    house = House()
    shard = house.start_shard("shard0.1", broken)
    house.submit(max_tokens=10)
    house.run()
    stats = house.scheduler.stats()
    assert (len(shard.plans), stats.shards[0].state, stats.shards[0].num_failed_drafts) == (
        3,
        "quarantined",
        3,
    )
    assert len(house.tokens_of("a")) == 10
    house.start_shard("shard0.2")
    assert house.retired == ["shard0.1"]
    house.submit("b")
    house.run()
    assert house.scheduler.stats().num_accepted_tokens > 0


def test_a_silent_shard_is_named_and_used_no_more() -> None:
    """The step goes on without its drafts; its late answer is counted and ignored."""
    house = House()
    shard = house.start_shard()
    house.submit()
    house.answer()
    due = house.due.pop()
    assert isinstance(due, tuple)
    house.handle(DraftsOverdue(99))
    assert house.due == []
    house.handle(DraftsOverdue(1))
    assert ShardSilent("shard0.1") in house.sent
    house.handle(DraftsArrived("shard0.1", shard.execute(due[1])))
    house.run()
    stats = house.scheduler.stats()
    assert (stats.num_late_drafts, stats.num_drafts, stats.shards[0].state) == (1, 0, "lost")


def test_sequences_are_spread_over_shards() -> None:
    """Each has one owner, which alone hears of it."""
    house = House()
    shards = [house.start_shard("shard0.1"), house.start_shard("shard1.1")]
    for seed in range(4):
        house.submit(f"r{seed}", [seed] * 6, seed=seed)
    house.run()
    opened = [{o.sequence_id for plan in shard.plans for o in plan.open} for shard in shards]
    assert (len(opened[0]), len(opened[1]), opened[0] & opened[1]) == (2, 2, set())


def test_a_cached_prefix_brings_target_pages_and_context() -> None:
    """The second request computes only what is new, on the shard that knows the prefix."""
    house = House()
    house.start_shard("shard0.1")
    house.start_shard("shard1.1")
    prompt = list(range(17))
    house.submit("first", prompt, max_tokens=8)
    house.run()
    house.submit("second", prompt, max_tokens=8)
    plan = house.due[0]
    assert isinstance(plan, StepPlan)
    assert (plan.chunks[0].start, plan.chunks[0].num_rows, len(plan.chunks[0].new_pages)) == (16, 1, 5)
    house.run()
    assert house.outputs["second"][0].num_cached_tokens == 16
    assert [output.num_cached_tokens for output in house.outputs["second"][1:]] == [0, 0]
    opened = house.shards["shard0.1"].plans[-1 - 2].open[0]
    assert (opened.start, opened.end, len(opened.pages)) == (0, 16, 4)
    assert house.tokens_of("first") == house.tokens_of("second")
    stats = house.scheduler.stats()
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (34, 16)


def test_the_whole_conversation_is_cached() -> None:
    """Output counts as well: the last rows of a request that ended were committed too."""
    house = House()
    shard = house.start_shard()
    house.submit("first", list(range(9)), max_tokens=12)
    house.run()
    house.submit("second", [*range(9), *house.tokens_of("first"), 1], max_tokens=8)
    house.run()
    assert house.outputs["second"][0].num_cached_tokens == 20
    opened = shard.plans[-3].open[0]
    assert (opened.start, opened.end) == (0, 20)


def test_a_hit_without_context_starts_the_context_later() -> None:
    """The drafter never vetoes a hit."""
    house = House()
    house.submit("first", list(range(17)))
    house.run()
    shard = house.start_shard()
    house.submit("second", list(range(17)))
    house.run()
    assert house.outputs["second"][0].num_cached_tokens == 16
    opened = shard.plans[0].open[0]
    assert (opened.start, opened.end, opened.pages) == (16, 16, [])


def test_prefixes_are_shared_within_a_namespace_only() -> None:
    """Another salt finds nothing; without a cache nobody does."""
    house = House()
    for request_id, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        house.submit(request_id, list(range(17)), salt=salt)
        house.run()
    assert [house.outputs[name][0].num_cached_tokens for name in "abc"] == [0, 0, 16]
    house = House(prefix_cache=False)
    for request_id in "ab":
        house.submit(request_id, list(range(17)))
        house.run()
    assert house.outputs["b"][0].num_cached_tokens == 0


def test_prompt_lookup_gets_opens_and_proposals_only() -> None:
    """A proposer without taps keeps no context, and prefill chunks are no news to it."""
    house = House(max_num_batched_tokens=8)
    ready = ShardReady(shard=0, max_drafts=4)
    shard = house.shards["shard0.1"] = FakeShard(ready, house.ranks, right)
    house.handle(ShardUp("shard0.1", ready))
    house.submit(prompt_ids=list(range(20)))
    house.run()
    assert [len(plan.open) for plan in shard.plans] == [1, 0]
    assert all(plan.propose and not plan.commits and not plan.slides for plan in shard.plans)
    assert house.tokens_of("a") == undisturbed(list(range(20)), SamplingParams(max_tokens=12))[0]


def test_a_waiting_life_takes_over_when_the_last_one_dies() -> None:
    """Dead in the middle of a draft phase, with its successor ready: the successor is used from then on."""
    house = House()
    house.start_shard("shard0.1")
    house.submit(max_tokens=40)
    house.answer()
    second = house.start_shard("shard0.2")
    house.due.clear()
    house.handle(ShardLost("shard0.1"))
    house.run()
    assert len(second.plans) > 5
    assert house.retired == []
    assert house.tokens_of("a") == undisturbed([1, 2, 3], SamplingParams(max_tokens=40))[0]
