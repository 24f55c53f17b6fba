"""The contexts of one life of a shard: which positions and pages each window has, and the messages for it.

A window [start, end) is kept in pages aligned with the target's. Its table may go on behind `end`: with the
lookahead pages that the last block was drafted into, which the next commit fills. A plan is made in the order
in which the shard applies it, because a page let go in one part of it may be given away in a later one:

    room      pages for the rows of every window; one that finds none is dropped
    open      sequences without a window, with what the shard's cache knows of them
    commit    the rows; pages that got full and are verified are published
    slide     windows above their cap; and the largest ones, while others lack pages
    propose   lookahead pages for those that draft; who gets none drafts nothing in this step

Memory that is short makes windows shorter, never a request fail.
"""

import heapq
import sys
from dataclasses import dataclass, field

import msgspec

from ..cluster.messages import Commit, Open, Propose, ShardPlan, ShardReady, Slide
from .pages import PagePool
from .request import Request, State


class Computed(msgspec.Struct, frozen=True, gc=False):
    """Rows of the last step that stand: positions base .. base + num_rows - 1, tap rows first_row onwards."""

    request: Request
    base: int
    first_row: int
    num_rows: int

    @property
    def end(self) -> int:
        return self.base + self.num_rows


@dataclass(slots=True)
class Window:
    """What a shard holds of a sequence: context [start, end), and the tokens before `num_told`."""

    start: int
    end: int
    num_told: int
    next_page: int  # of the sequence, the first that may still be published
    covered: int  # positions before it have pages, as far as the context goes
    capacity: int  # the same with lookahead pages; both end with a page


@dataclass(slots=True)
class _Draft:
    """A shard plan in the making."""

    step: int
    open: list[Open] = field(default_factory=list[Open])
    commits: list[Commit] = field(default_factory=list[Commit])
    slides: list[Slide] = field(default_factory=list[Slide])
    propose: list[Propose] = field(default_factory=list[Propose])
    num_drafts: int = 0
    moved_to: dict[int, int] = field(default_factory=dict[int, int])  # sequence -> base of its restart
    restarted: list[tuple[Request, int]] = field(default_factory=list[tuple[Request, int]])
    above_cap: list[int] = field(default_factory=list[int])  # sequences whose windows must slide


class ContextLedger:
    """Owns the windows and the page pool of one life of a shard, and numbers its plans."""

    def __init__(self, ready: ShardReady, page_size: int, context_cap: int, publishes: bool) -> None:
        self.keeps_context = bool(ready.tap_layer_ids)
        self.pool = PagePool(ready.num_pages if self.keeps_context else 0)
        self.windows: dict[int, Window] = {}
        self.num_commit_rows = 0
        self.num_slides = 0
        self.last_number = 0
        self.restarted: list[tuple[Request, int]] = []  # by the last plan: who, and where its window begins
        caps = [cap for cap in (ready.max_context_len, context_cap) if cap > 0]
        # Prompt and output are a cap as well, one that no window can exceed.
        self._cap = max(page_size, min(caps)) if caps else sys.maxsize
        self._page_size = page_size
        self._publishes = publishes
        self._free: list[int] = []  # sequences the shard has still to be told to drop
        self._num_starved = 0  # sequences that found no page for a window in this plan

    @property
    def num_context_tokens(self) -> int:
        return sum(window.end - window.start for window in self.windows.values())

    def find(self, keys: list[bytes]) -> int:
        """How many cached pages end a prefix of these keys."""
        return len(self.pool.find_last(keys))

    def drop(self, sequence_id: int) -> None:
        """End a context. The shard hears of it with the next plan, before that gives its pages away."""
        if self.windows.pop(sequence_id, None) is not None:
            self.pool.release(sequence_id)
            self._free.append(sequence_id)

    def wants(self, computed: Computed) -> bool:
        """Whether rows of a request that ended are worth a commit: they fill a page that others may find."""
        window = self.windows.get(computed.request.sequence_id)
        fills = computed.end // self._page_size > computed.base // self._page_size
        return self._publishes and self.keeps_context and window is not None and fills

    def plan(self, step: int, computed: list[Computed], num_drafts: int) -> ShardPlan | None:
        """The message after `step`; None if nothing has to be committed or proposed."""
        draft = _Draft(step)
        self.restarted = draft.restarted
        self._num_starved = 0
        if self.keeps_context:
            self._open(draft, self._make_room(draft, computed))
            self._commit(draft, computed)
            self._slide(draft, computed, num_drafts)
        self._propose(draft, computed, num_drafts)
        plan = None
        if draft.open or draft.commits or draft.propose:
            self.last_number += 1
            free, self._free = self._free, []
            plan = ShardPlan(
                number=self.last_number,
                num_drafts=draft.num_drafts,
                free=free,
                open=draft.open,
                commits=draft.commits,
                slides=draft.slides,
                propose=draft.propose,
            )
        for c in computed:
            if c.request.state is State.FINISHED:
                self.drop(c.request.sequence_id)  # after its last rows; told with the next plan
        return plan

    def check(self) -> None:
        """Windows and pages agree; no page that is still written to is shared."""
        self.pool.check()
        if not self.keeps_context:
            return
        assert self.pool.owners() <= set(self.windows), "pages of a sequence without a window"
        for sequence_id, window in self.windows.items():
            assert 0 <= window.start <= window.end, f"sequence {sequence_id}: {window}"
            table = self.pool.table(sequence_id)
            num_held = self._num_held(window.start, window.end)
            assert len(table) >= num_held, f"sequence {sequence_id}: {window} in {len(table)} pages"
            assert window.end - window.start <= self._cap, f"sequence {sequence_id}: {window} > cap"
            first_page = window.start // self._page_size
            assert window.covered == (first_page + num_held) * self._page_size, f"{sequence_id}: {window}"
            assert window.capacity == (first_page + len(table)) * self._page_size, f"{sequence_id}: {window}"
            first = window.end // self._page_size - first_page
            assert not any(map(self.pool.is_shared, table[first:])), (
                f"sequence {sequence_id} shares a page that is not full"
            )

    def _make_room(self, draft: _Draft, computed: list[Computed]) -> list[Computed]:
        """Take pages for the rows of the windows there are; returns the rows of sequences without one."""
        windows, cap = self.windows, self._cap
        others: list[Computed] = []
        for c in computed:
            window = windows.get(c.request.sequence_id)
            if window is None:
                others.append(c)
                continue
            num_rows = c.num_rows
            fits = c.base == window.end and window.end + num_rows <= window.capacity and num_rows <= cap
            if not fits and not self._grow(draft, c, window):
                others.append(c)
        return others

    def _grow(self, draft: _Draft, c: Computed, window: Window) -> bool:
        """Take the pages a window lacks, and skip rows that would be slid away at once.

        False if there are not as many: the window is dropped.
        """
        sequence_id, page_size = c.request.sequence_id, self._page_size
        base = max(c.base, self._lowest_start(c.end))
        if base > window.end:
            self.pool.release(sequence_id)
            window.start = window.end = draft.moved_to[sequence_id] = base
            window.next_page = -(-base // page_size)
            window.covered = window.capacity = base // page_size * page_size
        num_lacking = -((window.capacity - c.end) // page_size)
        if num_lacking > self.pool.num_free:
            draft.moved_to.pop(sequence_id, None)
            self.drop(sequence_id)
            return False
        if num_lacking > 0:
            self.pool.extend(sequence_id, num_lacking)
            window.capacity += num_lacking * page_size
        return True

    def _open(self, draft: _Draft, others: list[Computed]) -> None:
        """Give sequences without a window one at their base, or as far behind it as pages are short."""
        for c in others:
            request = c.request
            if request.state is State.FINISHED:
                continue
            num_last = -(-c.end // self._page_size)
            base = max(c.base, self._lowest_start(c.end), (num_last - self.pool.num_free) * self._page_size)
            if base >= c.end:
                self._num_starved += 1
                continue
            pages = self._cached_pages(c) if base == c.base else []
            start = base - len(pages) * self._page_size
            self.pool.share(request.sequence_id, pages)
            num_lacking = self._num_held(start, c.end) - len(pages)
            self.pool.extend(request.sequence_id, num_lacking)
            told = request.tokens[:-1]  # the anchor always comes with a proposal
            self.windows[request.sequence_id] = Window(
                start,
                base,
                num_told=len(told),
                next_page=-(-base // self._page_size),
                covered=base // self._page_size * self._page_size,
                capacity=num_last * self._page_size,
            )
            draft.open.append(
                Open(request.sequence_id, told, request.prompt_len, request.params, start, base, pages)
            )
            if request.had_context:
                draft.restarted.append((request, start))
            request.had_context = True

    def _cached_pages(self, c: Computed) -> list[int]:
        """Known pages that end where the rows begin, within the cap, and with room left for the rows."""
        if c.base % self._page_size:
            return []
        pages = self.pool.find_last(c.request.keys.upto(c.request.tokens, c.base))
        num_new = self._num_held(c.base, c.end)
        lowest = self._lowest_start(c.end) // self._page_size
        pages = pages[max(0, len(pages) - (c.base // self._page_size - lowest)) :]
        while pages and num_new + self.pool.num_cached(pages) > self.pool.num_free:
            del pages[0]
        return pages

    def _commit(self, draft: _Draft, computed: list[Computed]) -> None:
        windows, page_size, cap = self.windows, self._page_size, self._cap
        step, commits, moved_to = draft.step, draft.commits, draft.moved_to
        publishes = self._publishes
        # Restarts first: the pages that they let go of may be among those of the others.
        ordered = (
            sorted(computed, key=lambda c: c.request.sequence_id not in moved_to) if moved_to else computed
        )
        for c in ordered:
            request = c.request
            sequence_id = request.sequence_id
            window = windows.get(sequence_id)
            if window is None:
                continue
            base = window.end
            num_skipped = base - c.base  # only a restart skips rows
            num_rows = c.num_rows - num_skipped
            window.end = end = base + num_rows
            new_pages = self._cover(sequence_id, window) if end > window.covered else []
            is_restart = sequence_id in moved_to
            first_row = c.first_row + num_skipped
            commits.append(Commit(sequence_id, step, first_row, num_rows, base, new_pages, is_restart))
            if is_restart:
                draft.restarted.append((request, window.start))
            self.num_commit_rows += num_rows
            if end - window.start > cap:
                draft.above_cap.append(sequence_id)
            if publishes and request.verified // page_size > window.next_page:
                self._publish(request, window)

    def _cover(self, sequence_id: int, window: Window) -> list[int]:
        """The pages that a window's new end reaches into, and its last did not."""
        page_size = self._page_size
        first_page, first_new = window.start // page_size, window.covered // page_size
        end_page = -(-window.end // page_size)
        window.covered = end_page * page_size
        return self.pool.part(sequence_id, first_new - first_page, end_page - first_page)

    def _publish(self, request: Request, window: Window) -> None:
        """Make full, verified pages known."""
        num_final = min(window.end, request.verified) // self._page_size
        keys = request.keys.upto(request.tokens, num_final * self._page_size, window.next_page)
        self.pool.publish(request.sequence_id, window.next_page - window.start // self._page_size, keys)
        window.next_page = max(window.next_page, num_final)

    def _slide(self, draft: _Draft, computed: list[Computed], num_drafts: int) -> None:
        """Move windows above their cap, then the largest of all while pages are short."""
        for sequence_id in draft.above_cap:
            window = self.windows[sequence_id]
            self._move(sequence_id, window, self._lowest_start(window.end))
        moved = set(draft.above_cap)
        lookahead = num_drafts + 1
        num_most = 1 + -(-lookahead // self._page_size)
        if (self._num_starved + len(computed)) * num_most > self.pool.num_free:
            found = [self.windows.get(c.request.sequence_id) for c in computed]
            lacking = [w.end + lookahead - w.capacity for w in found if w is not None]
            num_wanted = self._num_starved * num_most
            num_wanted += sum(-(-num // self._page_size) for num in lacking if num > 0)
            self._give_way(moved, num_wanted)
        draft.slides += [Slide(sequence_id, self.windows[sequence_id].start) for sequence_id in sorted(moved)]
        self.num_slides += len(moved)

    def _give_way(self, moved: set[int], num_wanted: int) -> None:
        """Take the first page of whichever window is the longest, until enough are free or none has two."""
        if num_wanted <= self.pool.num_free:
            return
        heap = [(-self._num_held(w.start, w.end), sequence_id) for sequence_id, w in self.windows.items()]
        heapq.heapify(heap)
        while heap and num_wanted > self.pool.num_free:
            size, sequence_id = heap[0]
            if size >= -1:
                return
            window = self.windows[sequence_id]
            self._move(sequence_id, window, (window.start // self._page_size + 1) * self._page_size)
            moved.add(sequence_id)
            heapq.heapreplace(heap, (size + 1, sequence_id))

    def _move(self, sequence_id: int, window: Window, new_start: int) -> None:
        num_pages = new_start // self._page_size - window.start // self._page_size
        self.pool.release_first(sequence_id, num_pages)
        window.start = new_start
        window.next_page = max(window.next_page, new_start // self._page_size)

    def _propose(self, draft: _Draft, computed: list[Computed], num_drafts: int) -> None:
        if num_drafts == 0:
            return
        windows, keeps_context = self.windows, self.keeps_context
        propose, block_len = draft.propose, num_drafts + 1
        for c in computed:
            request = c.request
            tokens, most = request.tokens, request.most_drafts
            if most == 0 or len(tokens) - request.computed > 1:
                continue  # it has ended, or its prompt is being read
            sequence_id = request.sequence_id
            window = windows.get(sequence_id)
            lookahead: list[int] | None = []
            if not keeps_context:
                window = window or self._open_without_context(draft, request)
            elif window is None or (lookahead := self._look_ahead(sequence_id, window, block_len)) is None:
                continue
            propose.append(Propose(sequence_id, tokens[window.num_told :], lookahead))
            window.num_told = len(tokens)
            if most > draft.num_drafts:
                draft.num_drafts = most
        draft.num_drafts = min(draft.num_drafts, num_drafts)

    def _look_ahead(self, sequence_id: int, window: Window, block_len: int) -> list[int] | None:
        """The pages behind a window that its next block is written to; None if they are not to be had."""
        page_size = self._page_size
        if (end := window.end + block_len) > window.capacity:
            num_lacking = -((window.capacity - end) // page_size)
            if num_lacking > self.pool.num_free:
                return None
            self.pool.extend(sequence_id, num_lacking)
            window.capacity += num_lacking * page_size
        if window.capacity == window.covered:
            return []
        first_page = window.start // page_size
        first, last = window.covered // page_size, window.capacity // page_size
        return self.pool.part(sequence_id, first - first_page, last - first_page)

    def _open_without_context(self, draft: _Draft, request: Request) -> Window:
        told = request.tokens[:-1]
        draft.open.append(Open(request.sequence_id, told, request.prompt_len, request.params))
        window = self.windows[request.sequence_id] = Window(
            0, 0, num_told=len(told), next_page=0, covered=0, capacity=0
        )
        return window

    def _lowest_start(self, end: int) -> int:
        """Where a window that ends at `end` may begin: at a whole page, within the cap."""
        if end <= self._cap:
            return 0
        return -(-(end - self._cap) // self._page_size) * self._page_size

    def _num_held(self, start: int, end: int) -> int:
        """Pages of a window."""
        return 0 if start == end else -(-end // self._page_size) - start // self._page_size
