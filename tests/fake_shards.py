"""A shard that drafts by rule and remembers everything, for tests of the scheduler.

It knows only what the messages told it. Its memory holds, for each slot, what the row written there stands
for; before each draft it reads the whole window back. So a hole, a stale or foreign row, a page shared while
it is written, or a base position one off fails an assertion, in the step in which it happens.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fake_ranks import VOCAB_SIZE, FakeRanks, fingerprints, next_token

from paceline.cluster.messages import Commit, Draft, Drafts, Open, Propose, ShardPlan, ShardReady

Proposal = Callable[[Sequence[int], int, int], Draft]  # tokens, seed, num_drafts -> draft (any sequence id)


def right(tokens: Sequence[int], seed: int, num_drafts: int) -> Draft:
    """What the target will say."""
    drafted: list[int] = []
    for _ in range(num_drafts):
        drafted.append(next_token([*tokens, *drafted], seed))
    return Draft(0, drafted, [0.9] * num_drafts)


def wrong(tokens: Sequence[int], seed: int, num_drafts: int) -> Draft:
    """Anything but what the target will say."""
    drafted = [(token + 1) % VOCAB_SIZE for token in right(tokens, seed, num_drafts).token_ids]
    return Draft(0, drafted, [0.9] * num_drafts)


def mixed(tokens: Sequence[int], seed: int, num_drafts: int) -> Draft:
    """Right for a while, then wrong, and sometimes shorter than asked; any history decides."""
    chance = zlib.crc32(repr((tokens, "mixed")).encode())
    drafted = right(tokens, seed, num_drafts).token_ids
    for place in range(chance % (num_drafts + 1), num_drafts):
        drafted[place] = (drafted[place] + 1) % VOCAB_SIZE
    return Draft(0, drafted[: num_drafts - chance // 64 % 2], [0.5] * num_drafts)


def broken(tokens: Sequence[int], seed: int, num_drafts: int) -> Draft:  # noqa: ARG001 - a Proposal
    """Not a number."""
    return Draft(0, [], [], "not_finite")


def flaky(tokens: Sequence[int], seed: int, num_drafts: int) -> Draft:
    """Often mixed, at times failed, empty, or not a number."""
    match zlib.crc32(repr((tokens, "flaky")).encode()) % 6:
        case 0:
            return Draft(0, [], [], "failed")
        case 1:
            return Draft(0, [], [])
        case 2:
            return broken(tokens, seed, num_drafts)
        case _:
            return mixed(tokens, seed, num_drafts)


@dataclass
class Context:
    """What a shard holds for one sequence."""

    tokens: list[int]
    seed: int
    start: int
    end: int
    pages: list[int] = field(default_factory=list)


class FakeShard:
    """One life of a shard beside `ranks`, whose tap rows it reads; asserts that every plan is legal."""

    def __init__(self, ready: ShardReady, ranks: FakeRanks, proposal: Proposal = right) -> None:
        self.ready = ready
        self.contexts: dict[int, Context] = {}
        self.memory: dict[int, tuple[int, int]] = {}  # slot -> position, fingerprint of all tokens up to it
        self.plans: list[ShardPlan] = []
        self._ranks = ranks
        self._page_size = ranks.page_size
        self._proposal = proposal

    def execute(self, plan: ShardPlan) -> Drafts:
        assert plan.number == len(self.plans) + 1, f"plan {plan.number} after {len(self.plans)}"
        self.plans.append(plan)
        for sequence_id in plan.free:
            self.contexts.pop(sequence_id, None)
        for opened in plan.open:
            self._open(opened)
        for commit in plan.commits:
            self._commit(commit)
        for slide in plan.slides:
            context = self.contexts[slide.sequence_id]
            assert slide.new_start % self._page_size == 0
            assert context.start < slide.new_start <= context.end
            num_kept = self._num_held(slide.new_start, context.end)
            context.pages = context.pages[len(context.pages) - num_kept :]
            context.start = slide.new_start
        self._check()
        if plan.propose:
            assert 1 <= plan.num_drafts <= self.ready.max_drafts
        drafts = [self._propose(propose, plan.num_drafts) for propose in plan.propose]
        lookahead = [page for propose in plan.propose for page in propose.lookahead_pages]
        assert len(set(lookahead)) == len(lookahead), "a lookahead page was given twice"
        return Drafts(number=plan.number, drafts=drafts, commit_s=0.001, draft_s=0.002)

    def _open(self, opened: Open) -> None:
        assert opened.sequence_id not in self.contexts, "opened twice"
        assert len(opened.pages) == self._num_held(opened.start, opened.end)
        context = Context(
            list(opened.token_ids), opened.params.seed, opened.start, opened.end, list(opened.pages)
        )
        self.contexts[opened.sequence_id] = context
        if self.ready.tap_layer_ids:
            self._read_back(opened.sequence_id)

    def _commit(self, commit: Commit) -> None:
        assert self.ready.tap_layer_ids, "a commit for a proposer without context"
        assert commit.step == self._ranks.last_step, "rows of a step that are overwritten"
        context = self.contexts[commit.sequence_id]
        if commit.is_restart:
            assert commit.base_position > context.end
            context.start = context.end = commit.base_position
            context.pages = []
        assert commit.base_position == context.end, "a hole, or rows committed twice"
        assert commit.num_rows > 0
        end = context.end + commit.num_rows
        assert len(commit.new_pages) == self._num_held(context.start, end) - len(context.pages)
        self._check_unowned(commit.new_pages)
        context.pages += commit.new_pages
        taps = self._ranks.taps[commit.first_row : commit.first_row + commit.num_rows]
        assert len(taps) == commit.num_rows
        for position, tap in zip(range(context.end, end), taps, strict=True):
            assert (tap.sequence_id, tap.position) == (commit.sequence_id, position), "another row"
            page = context.pages[position // self._page_size - context.start // self._page_size]
            self._check_private(commit.sequence_id, page)
            self.memory[self._slot(context, position)] = (position, tap.fingerprint)
        context.end = end

    def _propose(self, propose: Propose, num_drafts: int) -> Draft:
        context = self.contexts[propose.sequence_id]
        assert propose.new_tokens, "no anchor"
        context.tokens += propose.new_tokens
        if self.ready.tap_layer_ids:
            assert len(context.tokens) == context.end + 1, "the anchor is not behind the context"
            self._read_back(propose.sequence_id)
            self._check_unowned(propose.lookahead_pages)
            last = context.end + num_drafts
            pages = [*context.pages, *propose.lookahead_pages]
            for position in range(context.end, last + 1):
                page = pages[position // self._page_size - context.start // self._page_size]
                self._check_private(propose.sequence_id, page)
                self.memory[page * self._page_size + position % self._page_size] = (position, -1)
        else:
            assert not propose.lookahead_pages
        draft = self._proposal(context.tokens, context.seed, num_drafts)
        return Draft(propose.sequence_id, draft.token_ids, draft.confidences, draft.outcome)

    def _read_back(self, sequence_id: int) -> None:
        context = self.contexts[sequence_id]
        marks = fingerprints(context.tokens)
        for position in range(context.start, context.end):
            found = self.memory[self._slot(context, position)]
            assert found == (position, marks[position]), f"position {position} holds another row: {found}"

    def _check(self) -> None:
        for context in self.contexts.values():
            if not self.ready.tap_layer_ids:
                continue
            assert len(context.pages) == self._num_held(context.start, context.end)
            if self.ready.max_context_len:
                cap = max(self.ready.max_context_len, self._page_size)
                assert context.end - context.start <= cap, "a window above its cap"

    def _check_unowned(self, pages: Sequence[int]) -> None:
        held = {page for context in self.contexts.values() for page in context.pages}
        assert not held & set(pages), f"pages {held & set(pages)} hold context already"
        assert all(0 <= page < self.ready.num_pages for page in pages)

    def _check_private(self, sequence_id: int, page: int) -> None:
        for other_id, other in self.contexts.items():
            assert other_id == sequence_id or page not in other.pages, f"page {page} is shared and written"

    def _slot(self, context: Context, position: int) -> int:
        page = context.pages[position // self._page_size - context.start // self._page_size]
        return page * self._page_size + position % self._page_size

    def _num_held(self, start: int, end: int) -> int:
        return 0 if start == end else -(-end // self._page_size) - start // self._page_size
