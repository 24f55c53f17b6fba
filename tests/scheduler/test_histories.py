"""Whatever is cancelled, preempted, drafted, lost or late: every request gets its undisturbed tokens."""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest
from fake_ranks import VOCAB_SIZE, FakeRanks, undisturbed
from fake_shards import FakeShard, Proposal, broken, flaky, mixed, right, wrong
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from paceline.cluster.messages import (
    Cancel,
    Chunk,
    Decision,
    Drafts,
    Output,
    Outputs,
    Refused,
    SamplingParams,
    ShardLost,
    ShardPlan,
    ShardReady,
    ShardSilent,
    Shutdown,
    StepPlan,
    StepResult,
    Submit,
)
from paceline.scheduler import settling, state
from paceline.scheduler.acceptance import num_standing
from paceline.scheduler.context import Computed, ContextLedger
from paceline.scheduler.drafting import Drafting
from paceline.scheduler.events import Command, DraftsArrived, DraftsOverdue, Event, ShardUp, ToShard
from paceline.scheduler.limits import Limits
from paceline.scheduler.pages import PagePool
from paceline.scheduler.planning import Planner
from paceline.scheduler.prefix_cache import KeyChain
from paceline.scheduler.request import Request, State
from paceline.scheduler.shards import Shard
from paceline.scheduler.state import Scheduler

REQUESTS = st.tuples(
    st.integers(1, 10),  # prompt_len
    st.integers(1, 20),  # max_tokens
    st.sampled_from([0, 0, 0, 0, 1, 2, 5, 20]),  # num_emitted
    st.integers(-1, 1),  # priority
    st.integers(0, 2),  # family: prompts of one begin alike
    st.sampled_from([None, None, None, 0, 2]),  # max_draft_tokens
)
ShardArguments = tuple[Proposal, int, int, int, bool]
SHARDS = st.tuples(
    st.sampled_from([right, right, mixed, mixed, wrong, flaky, broken]),
    st.integers(1, 5),  # max_drafts
    st.integers(4, 60),  # tokens that its pages hold
    st.sampled_from([0, 0, 3, 8]),  # max_context_len
    st.sampled_from([True, True, True, False]),  # whether it reads tap rows
)


@dataclass
class Journal:
    """What the server would know of one request."""

    submit: Submit
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class Histories(RuleBasedStateMachine):
    """Drives a scheduler with random events; the fake ranks and `check()` judge every step."""

    has_begun = False

    @initialize(
        num_places=st.integers(20, 40),
        page_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 6),
        extra_rows=st.integers(0, 12),
        max_queued_requests=st.integers(2, 10),
        num_draft_tokens=st.sampled_from([None, None, 2]),
        context_cap=st.sampled_from([0, 0, 5, 9]),
        prefix_cache=st.booleans(),
        draft_budget=st.booleans(),
        min_draft_tokens=st.sampled_from([0, 0, 1]),
        itl_target_ms=st.sampled_from([None, None, 50.0, 2000.0]),
        shards=st.lists(SHARDS, max_size=2),
    )
    def begin(
        self,
        num_places: int,
        page_size: int,
        max_num_seqs: int,
        extra_rows: int,
        max_queued_requests: int,
        num_draft_tokens: int | None,
        context_cap: int,
        prefix_cache: bool,
        draft_budget: bool,
        min_draft_tokens: int,
        itl_target_ms: float | None,
        shards: list[ShardArguments],
    ) -> None:
        self.limits = Limits(
            num_pages=num_places // page_size,
            page_size=page_size,
            max_model_len=30,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_rows,
            max_queued_requests=max_queued_requests,
            aging_s=5.0,
            prefix_cache=prefix_cache,
            draft_budget=draft_budget,
            min_draft_tokens=min_draft_tokens,
            itl_target_ms=itl_target_ms,
            num_draft_tokens=num_draft_tokens,
            context_cap=context_cap,
        )
        self.scheduler = Scheduler(self.limits, check=True)
        self.ranks = FakeRanks(self.limits.num_pages, page_size)
        self.now = 0.0
        self.journals: dict[str, Journal] = {}
        self.answer_due: StepResult | None = None
        self.last_answer: StepResult | None = None
        self.shards: dict[str, FakeShard] = {}  # the lives that run
        self.drafts_due: dict[str, ShardPlan] = {}
        self.late: list[tuple[str, int]] = []  # answers that nobody waits for any more
        self.num_lives = 0
        self.has_begun = True
        for index, arguments in enumerate(shards):
            self.start_shard(index, arguments)

    @rule(asked=st.lists(REQUESTS, min_size=1, max_size=5))
    def submit(self, asked: list[tuple[int, int, int, int, int, int | None]]) -> None:
        """Several requests at once; some resumed in the middle of their output, some complete already."""
        for prompt_len, max_tokens, num_emitted, priority, family, max_draft_tokens in asked:
            seed = len(self.journals)
            prompt_ids = [(11 * family + i) % VOCAB_SIZE for i in range(prompt_len)]
            params = SamplingParams(max_tokens=max_tokens, stop_token_ids=[7], seed=seed)
            emitted_ids = undisturbed(prompt_ids, params)[0][:num_emitted]
            submit = Submit(
                request_id=f"r{seed}",
                prompt_ids=prompt_ids,
                params=params,
                emitted_ids=emitted_ids,
                priority=priority,
                max_draft_tokens=max_draft_tokens,
            )
            self.journals[submit.request_id] = Journal(submit, list(emitted_ids))
            self.handle(submit)

    @precondition(lambda self: self.journals)
    @rule(pick=st.integers(0, 1000))
    def cancel(self, pick: int) -> None:
        """Cancel any request, live or not."""
        names = list(self.journals)
        request_id = names[-1 - pick % min(len(names), 6)]
        was_live = self.journals[request_id].finish_reason is None
        self.handle(Cancel(request_id=request_id))
        assert self.journals[request_id].finish_reason is not None
        if was_live:
            assert self.journals[request_id].finish_reason == "cancelled"

    @rule(num_answers=st.integers(1, 12))
    def answer(self, num_answers: int) -> None:
        """The ranks or the shards answer, whoever is asked."""
        for _ in range(num_answers):
            if self.drafts_due:
                peer, plan = self.drafts_due.popitem()
                self.late.append((peer, plan.number))
                self.handle(DraftsArrived(peer, self.shards[peer].execute(plan)))
            elif self.answer_due is not None:
                self.last_answer, self.answer_due = self.answer_due, None
                self.handle(self.last_answer)

    @rule(index=st.integers(0, 1), arguments=SHARDS)
    def start_shard(self, index: int, arguments: ShardArguments) -> None:
        """A first life, one after a loss, or the next while the last still runs."""
        proposal, max_drafts, num_places, max_context_len, has_taps = arguments
        self.num_lives += 1
        ready = ShardReady(
            shard=index,
            max_drafts=max_drafts,
            tap_layer_ids=[0] if has_taps else [],
            num_pages=num_places // self.limits.page_size,
            max_context_len=max_context_len,
        )
        peer = f"shard{index}.{self.num_lives}"
        self.shards[peer] = FakeShard(ready, self.ranks, proposal)
        self.handle(ShardUp(peer, ready))

    @precondition(lambda self: self.shards)
    @rule(pick=st.integers(0, 5))
    def lose_shard(self, pick: int) -> None:
        """A life ends, asked or not, in use or about to be."""
        if pick >= len(self.shards):
            return
        peer = list(self.shards)[pick]
        del self.shards[peer]
        if (plan := self.drafts_due.pop(peer, None)) is not None:
            self.late.append((peer, plan.number))
        self.handle(ShardLost(peer))

    @precondition(lambda self: self.drafts_due)
    @rule()
    def lose_patience(self) -> None:
        """Whoever has not answered by now is named and used no more."""
        phase = self.scheduler.draft_phase
        assert phase is not None
        silent = set(self.drafts_due)
        self.late += [(peer, plan.number) for peer, plan in self.drafts_due.items()]
        self.drafts_due.clear()
        commands = self.handle(DraftsOverdue(phase))
        assert {command.peer for command in commands if isinstance(command, ShardSilent)} == silent

    @precondition(lambda self: self.late)
    @rule(pick=st.integers(0, 1000))
    def answer_late(self, pick: int) -> None:
        """An answer of an old life, or a repeated one, changes nothing."""
        peer, number = self.late[pick % len(self.late)]
        before = self.scheduler.stats()
        assert self.scheduler.handle(DraftsArrived(peer, Drafts(number=number)), self.now) == []
        assert self.scheduler.stats().num_late_drafts == before.num_late_drafts + 1

    @precondition(lambda self: self.last_answer is not None)
    @rule()
    def answer_again(self) -> None:
        """A repeated answer changes nothing."""
        assert self.last_answer is not None
        before = self.scheduler.stats()
        assert self.scheduler.handle(self.last_answer, self.now) == []
        assert self.scheduler.stats().num_ignored_messages == before.num_ignored_messages + 1

    @rule(seconds=st.floats(0.1, 20.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    def teardown(self) -> None:
        """Left alone, every request ends with the right tokens and every page comes home."""
        if not self.has_begun:
            return
        self.drain()
        assert self.scheduler.stats().num_free_pages == self.limits.num_pages
        # What was dropped is released with the next plan: one more request flushes it out.
        self.submit([(1, 1, 0, 0, 0, None)])
        assert len(self.ranks.sequences) <= 1, "the ranks keep a sequence that ended"
        self.drain()
        for shard in self.scheduler.stats().shards:
            assert shard.num_free_pages == shard.num_pages, "a context page did not come home"
            assert shard.num_sequences == 0
        for journal in self.journals.values():
            self.judge(journal)

    def drain(self) -> None:
        for _ in range(2000):
            if self.answer_due is None and not self.drafts_due:
                break
            self.answer(1)
        assert not self.scheduler.has_work

    def judge(self, journal: Journal) -> None:
        expected, reason = undisturbed(journal.submit.prompt_ids, journal.submit.params)
        if journal.finish_reason in ("stop", "length"):
            assert (journal.tokens, journal.finish_reason) == (expected, reason)
        else:
            assert journal.finish_reason in ("cancelled", "refused")
            assert journal.tokens == expected[: len(journal.tokens)]

    def handle(self, event: Event) -> list[Command]:
        running = self.scheduler._planner.running
        oldest = min(running.values(), key=lambda request: request.order, default=None)
        stay = -1 if oldest is None else oldest.sequence_id
        commands = self.scheduler.handle(event, self.now)
        if oldest is not None:
            assert oldest.state is State.FINISHED or oldest.sequence_id == stay, "the oldest was preempted"
        kinds = [isinstance(command, StepPlan | ToShard) for command in commands]
        assert kinds == sorted(kinds, reverse=True), "the plans come first"
        for command in commands:
            self.perform(command)
        assert (self.answer_due is not None or bool(self.drafts_due)) == self.scheduler.has_work
        assert self.answer_due is None or not self.drafts_due, "a step while shards still read"
        return commands

    def perform(self, command: Command) -> None:
        match command:
            case StepPlan():
                assert self.answer_due is None, "one step in flight"
                oldest = min(self.scheduler._planner.running.values(), key=lambda request: request.order)
                served = {chunk.sequence_id for chunk in command.chunks}
                assert oldest.sequence_id in served, "the oldest has no row"
                self.answer_due = self.ranks.execute(command)
            case ToShard(peer, ShardPlan() as plan):
                assert peer not in self.drafts_due, "two plans for one shard"
                self.drafts_due[peer] = plan
                for opened in plan.open:
                    rivals = [shard for name, shard in self.shards.items() if name[:6] != peer[:6]]
                    assert all(
                        shard is self.shards[peer] or opened.sequence_id not in shard.contexts
                        for shard in rivals
                    ), "a sequence with two owners"
            case ToShard(peer, Shutdown()):
                assert peer not in self.drafts_due, "sent home while it owes an answer"
                del self.shards[peer]
            case ShardSilent():
                del self.shards[command.peer]
            case Outputs():
                for output in command.outputs:
                    journal = self.journals[output.request_id]
                    assert journal.finish_reason is None, f"{output.request_id} speaks after its end"
                    assert output.first_index == len(journal.tokens), "a token lost or repeated"
                    assert output.num_accepted <= output.num_drafts
                    journal.tokens.extend(output.token_ids)
                    journal.finish_reason = output.finish_reason
            case Refused():
                self.journals[command.request_id].finish_reason = "refused"


def run_histories(num_histories: int, *, is_fixed: bool = False) -> None:
    """Run this many histories, always the same ones if `is_fixed`; raises at the first broken promise."""
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=num_histories,
            stateful_step_count=20,
            deadline=None,
            database=None,
            derandomize=is_fixed,
            report_multiple_bugs=False,
            phases=(Phase.generate,) if is_fixed else tuple(Phase),
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


def test_two_thousand_random_histories() -> None:
    """No history of events loses, repeats or changes a token, or loses a page."""
    run_histories(2000)


def leak_a_page(patch: pytest.MonkeyPatch) -> None:
    release = PagePool.release

    def leaky(pool: PagePool, sequence_id: int) -> int:
        num_freed = release(pool, sequence_id)
        if num_freed > 1:
            pool._free.pop()
        return num_freed

    patch.setattr(PagePool, "release", leaky)


def free_twice(patch: pytest.MonkeyPatch) -> None:
    release = PagePool.release

    def twice(pool: PagePool, sequence_id: int) -> int:
        pages = pool.table(sequence_id)
        num_freed = release(pool, sequence_id)
        pool._free.extend(pages)
        return num_freed

    patch.setattr(PagePool, "release", twice)


def share_a_page(patch: pytest.MonkeyPatch) -> None:
    extend = PagePool.extend

    def shared(pool: PagePool, sequence_id: int, num_pages: int) -> list[int]:
        pages = extend(pool, sequence_id, num_pages)
        others = [owner for owner in pool.owners() if owner != sequence_id]
        return [pool.table(others[0])[0], *pages[1:]] if pages and others else pages

    patch.setattr(PagePool, "extend", shared)


def repeat_a_token(patch: pytest.MonkeyPatch) -> None:
    def twice(request: Request, chunk: Chunk, decision: Decision | None) -> Output | None:
        output = settling.settle(request, chunk, decision)
        if output is None or output.finish_reason is not None or request.num_output != 2:
            return output
        request.tokens.append(output.token_ids[-1])
        return msgspec.structs.replace(output, token_ids=output.token_ids * 2)

    patch.setattr(state, "settle", twice)


def lose_a_token(patch: pytest.MonkeyPatch) -> None:
    def lost(request: Request, chunk: Chunk, decision: Decision | None) -> Output | None:
        output = settling.settle(request, chunk, decision)
        if output is not None and output.finish_reason is None and request.num_output == 2:
            return msgspec.structs.replace(output, token_ids=[])
        return output

    patch.setattr(state, "settle", lost)


def compute_one_too_many(patch: pytest.MonkeyPatch) -> None:
    def ahead(request: Request, chunk: Chunk, decision: Decision | None) -> Output | None:
        output = settling.settle(request, chunk, decision)
        if request.num_pending > 1:
            request.computed += 1
        return output

    patch.setattr(state, "settle", ahead)


def skip_a_release(patch: pytest.MonkeyPatch) -> None:
    def silent(planner: Planner, request: Request) -> None:
        del planner.running[request.sequence_id]

    patch.setattr(Planner, "drop", silent)


def forget_to_forget(patch: pytest.MonkeyPatch) -> None:
    preempt = Request.preempt

    def remembering(request: Request) -> None:
        computed = request.computed
        preempt(request)
        request.computed = computed

    patch.setattr(Request, "preempt", remembering)


def preempt_the_oldest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Planner, "_victim", lambda _planner, oldest: oldest)


def commit_one_row_further(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state, "Computed", lambda request, base, row, n: Computed(request, base + 1, row, n))


def commit_the_next_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state, "Computed", lambda request, base, row, n: Computed(request, base, row + 1, n))


def commit_rejected_rows(patch: pytest.MonkeyPatch) -> None:
    def all_rows(request: Request, base: int, row: int, num_rows: int) -> Computed:
        request.computed += request.num_output > 3 and num_rows > 1
        return Computed(request, base, row, request.computed - base)

    patch.setattr(state, "Computed", all_rows)


def change_shard_plans(patch: pytest.MonkeyPatch, change: Callable[[ShardPlan], ShardPlan]) -> None:
    plan_of = ContextLedger.plan

    def changed(ledger: ContextLedger, step: int, rows: list[Computed], num_drafts: int) -> ShardPlan | None:
        plan = plan_of(ledger, step, rows, num_drafts)
        return None if plan is None else change(plan)

    patch.setattr(ContextLedger, "plan", changed)


def commit_twice(patch: pytest.MonkeyPatch) -> None:
    change_shard_plans(
        patch, lambda plan: msgspec.structs.replace(plan, commits=plan.commits + plan.commits[:1])
    )


def forget_to_slide(patch: pytest.MonkeyPatch) -> None:
    change_shard_plans(patch, lambda plan: msgspec.structs.replace(plan, slides=[]))


def forget_to_free(patch: pytest.MonkeyPatch) -> None:
    change_shard_plans(patch, lambda plan: msgspec.structs.replace(plan, free=[]))


def commit_to_a_new_life_what_the_old_one_holds(patch: pytest.MonkeyPatch) -> None:
    begin = Shard.begin

    def heir(shard: Shard, peer: str, ready: ShardReady, ledger: ContextLedger) -> list[ToShard]:
        return begin(shard, peer, ready, shard.ledger or ledger)

    patch.setattr(Shard, "begin", heir)


def take_an_old_answer(patch: pytest.MonkeyPatch) -> None:
    answered = Drafting.answered

    def trusting(drafting: Drafting, event: DraftsArrived, now: float) -> None:
        for shard in drafting.shards:
            if shard.awaited is not None:
                event = DraftsArrived(shard.peer, msgspec.structs.replace(event.drafts, number=shard.awaited))
        answered(drafting, event, now)

    patch.setattr(Drafting, "answered", trusting)


def slide_a_shared_page(patch: pytest.MonkeyPatch) -> None:
    def careless(pool: PagePool, sequence_id: int, num_pages: int) -> None:
        for _ in range(num_pages):
            pool._free.append(pool._tables[sequence_id].pop(0))

    patch.setattr(PagePool, "release_first", careless)


def publish_early(patch: pytest.MonkeyPatch) -> None:
    def early(scheduler: Scheduler, request: Request) -> None:
        """Count the anchor, which is known but not computed."""
        keys = request.keys.upto(request.tokens, len(request.tokens))
        num_owned = scheduler._pool.num_owned(request.sequence_id)
        first = request.num_published
        scheduler._pool.publish(request.sequence_id, first, keys[first:num_owned])
        request.num_published = len(keys)

    patch.setattr(Scheduler, "_publish", early)


def forget_who_uses_a_cached_page(patch: pytest.MonkeyPatch) -> None:
    share = PagePool.share

    def forgetful(pool: PagePool, sequence_id: int, pages: list[int]) -> None:
        cached = [page for page in pages if page in pool._cached]
        share(pool, sequence_id, pages)
        pool._cached.update(dict.fromkeys(cached))

    patch.setattr(PagePool, "share", forgetful)


def find_a_page_by_its_own_tokens_alone(patch: pytest.MonkeyPatch) -> None:
    def unchained(chain: KeyChain, tokens: list[int], num_tokens: int, first_page: int = 0) -> list[bytes]:
        size = chain._page_size
        return [bytes(tokens[i * size : (i + 1) * size]) for i in range(first_page, num_tokens // size)]

    patch.setattr(KeyChain, "upto", unchained)


def accept_one_draft_too_many(patch: pytest.MonkeyPatch) -> None:
    def generous(drafts: list[int], decided: list[int]) -> int:
        return min(len(drafts), num_standing(drafts, decided) + 1)

    patch.setattr(settling, "num_standing", generous)


def step_while_shards_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Drafting, "is_waiting", False)


@pytest.mark.parametrize(
    "plant",
    [
        commit_one_row_further,
        commit_the_next_row,
        commit_rejected_rows,
        commit_twice,
        forget_to_slide,
        forget_to_free,
        commit_to_a_new_life_what_the_old_one_holds,
        take_an_old_answer,
        slide_a_shared_page,
        publish_early,
        forget_who_uses_a_cached_page,
        find_a_page_by_its_own_tokens_alone,
        accept_one_draft_too_many,
        step_while_shards_read,
        leak_a_page,
        free_twice,
        share_a_page,
        repeat_a_token,
        lose_a_token,
        compute_one_too_many,
        skip_a_release,
        forget_to_forget,
        preempt_the_oldest,
    ],
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkers above are not blind: each of these faults turns them red."""
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        run_histories(300, is_fixed=True)
