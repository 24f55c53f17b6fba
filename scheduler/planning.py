"""What the next step computes: a budget of rows, handed out by one subtraction, wanted minus computed.

A plan is made in this order, and only between steps, when no rank may touch a page:

    room      preempt until every decode, and the oldest sequence whatever it does, can have its next row
    decode    one row for each sequence whose only pending token is its last, then rows for its drafts
    prefill   what is left of the budget, as far as the pace of the decodes and the free pages allow
    admit     whoever's turn it is, while there are rows, places and pages for all of its tokens, unless
              another is reading the same prefix right now

Drafts never take a row or a page that something certain needs: nobody is preempted for them, and while a
prompt waits to be read they get no more than half of the rows that the decodes leave. They get none while
prompts use up all rows that the pace allows: a draft is worth less than a token, and its row would keep a
prompt waiting whose tokens are all still to come.

A prompt that stays half read has used up the rows or the pages of its step, so nobody is admitted behind it:
at most one prompt is half read at a time, and the pages it still needs are not given away.

The oldest running sequence is never preempted and always gets a row, and a request that cannot fit into the
empty pool was refused at the door: so each plan has a row, and every request ends.
"""

from collections.abc import Sequence

from ..cluster.messages import Admit, Chunk, StepPlan
from .drafting import Drafting
from .limits import Limits
from .pace import Pace
from .pages import PagePool
from .queue import WaitingQueue
from .request import Request
from .story import Stories

PINNED_AFTER = 8  # preemptions, after which others are preempted first


class Planner:
    """Owns who runs and which sequences the ranks still have to be told to drop."""

    def __init__(
        self, limits: Limits, pool: PagePool, queue: WaitingQueue, drafting: Drafting, stories: Stories
    ) -> None:
        self.running: dict[int, Request] = {}  # by sequence id
        self.pace = Pace(limits.itl_target_ms, limits.page_size)
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self._limits = limits
        self._pool = pool
        self._queue = queue
        self._drafting = drafting
        self._stories = stories
        self._release: list[int] = []  # goes out with the next plan; the ranks' state for them is small
        self._next_sequence_id = 0

    def plan(self, step: int, now: float) -> StepPlan:
        """Decide one step. Somebody must be running or waiting; no step may be in flight."""
        decodes, prefills = self._by_need()
        if self._make_room(decodes, now):
            decodes, prefills = self._by_need()
        chunks = self._decode(decodes, prefills)
        num_decode_rows = sum(chunk.num_rows for chunk in chunks)
        num_free_rows = self._limits.max_num_batched_tokens - num_decode_rows
        room = budget = self.pace.room(num_decode_rows, num_free_rows)
        for request in prefills:
            num_rows = min(budget, request.num_pending, self._reach(request))
            if num_rows > 0:
                chunks.append(self._chunk(request, num_rows))
                budget -= num_rows
        admits: list[Admit] = []
        if budget > 0 and len(self._queue) > 0:
            budget = self._admit(admits, chunks, budget, now)
        release, self._release = self._release, []
        self.pace.began(num_decode_rows + room - budget, now)
        self._drafting.yields = budget == 0 and room < num_free_rows
        assert chunks, "there is work, so a plan must have a row"
        return StepPlan(step=step, release=release, admit=admits, chunks=chunks)

    def drop(self, request: Request) -> None:
        """Take a request off the ranks. Its pages stay its own until the caller releases them."""
        del self.running[request.sequence_id]
        self._release.append(request.sequence_id)

    def _decode(self, decodes: list[Request], prefills: list[Request]) -> list[Chunk]:
        """A row for each anchor, and rows for the drafts behind it."""
        drafts = self._drafting.drafts
        if not self._drafting.has_answered:
            return [self._block(request, ()) for request in decodes]
        num_rows = self._limits.max_num_batched_tokens - len(decodes)
        room = self.pace.room(len(decodes), num_rows)  # that prompts would have without drafts
        if prefills or len(self._queue) > 0:
            num_rows = min(room // 2, num_rows - len(prefills))
        num_certain = len(decodes) + min(sum(request.num_pending for request in prefills), room)
        shares = self._drafting.share(decodes, num_certain, max(0, num_rows))
        # Pages that must stay for the anchors, and for a row of the oldest if that is still being read.
        num_spare = self._pool.num_free - sum(r.computed == r.capacity for r in decodes) - bool(prefills)
        page_size = self._limits.page_size
        chunks: list[Chunk] = []
        for request, num_drafts in zip(decodes, shares, strict=True):
            if num_drafts == 0:
                chunks.append(self._block(request, ()))
                continue
            next_row, capacity = request.computed + 1, request.capacity
            if next_row + num_drafts > capacity:
                capacity += page_size if request.computed == capacity else 0
                num_drafts = min(num_drafts, capacity + max(0, num_spare) * page_size - next_row)
                num_spare -= max(0, -(-(next_row + num_drafts - capacity) // page_size))
            block = drafts[request.sequence_id]
            chunks.append(self._block(request, block if num_drafts == len(block) else block[:num_drafts]))
        return chunks

    def _by_need(self) -> tuple[list[Request], list[Request]]:
        """The running requests that want one row, and those that want more."""
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self.running.values():
            (decodes if len(request.tokens) - request.computed == 1 else prefills).append(request)
        return decodes, prefills

    def _make_room(self, decodes: list[Request], now: float) -> bool:
        """Preempt until each decode and the oldest can have one row; says whether anybody was preempted."""
        needy = {request.sequence_id for request in decodes if request.computed == request.capacity}
        if not self.running or len(needy) < self._pool.num_free:
            return False  # one page is left even for an oldest that is no decode
        oldest = min(self.running.values(), key=lambda request: request.order)
        if oldest.computed == oldest.capacity:
            needy.add(oldest.sequence_id)
        has_preempted = False
        while len(needy) > self._pool.num_free:
            victim = self._victim(oldest)
            needy.discard(victim.sequence_id)
            self._preempt(victim, now)
            has_preempted = True
        return has_preempted

    def _victim(self, oldest: Request) -> Request:
        """The least important, least computed, youngest; pinned ones only when no other is left."""
        others = [request for request in self.running.values() if request is not oldest]
        assert others, "the oldest sequence fits into the pool alone"
        return min(
            others,
            key=lambda request: (
                request.num_preemptions >= PINNED_AFTER,
                -request.priority,
                request.computed,
                -request.order,
            ),
        )

    def _preempt(self, request: Request, now: float) -> None:
        self.drop(request)
        self._drafting.drop(request)
        self._pool.release(request.sequence_id)
        self._stories.note(request.request_id, now, f"preempted with {request.computed} computed")
        request.preempt()
        self._queue.add(request)
        self.num_preemptions += 1

    def _admit(self, admits: list[Admit], chunks: list[Chunk], budget: int, now: float) -> int:
        """Let in whoever's turn it is; nobody overtakes one that does not fit yet. Returns the rows left.

        Who needs a page that is being read for another waits until it is read: the choices of one request
        come together, and their prompt is read once.
        """
        limits = self._limits
        being_read = {key for r in self.running.values() if r.num_pending > 1 for key in self._unread(r)}
        held: list[Request] = []
        while budget > 0 and len(self.running) + len(held) < limits.max_num_seqs:
            request = self._queue.best(now)
            if request is None:
                break
            # A page for each running sequence: without it a victim would return in the very plan that it made
            # way for, and a newcomer would be preempted within a few steps.
            headroom = len(self.running)
            keys = self._cacheable(request)
            cached = self._pool.find(keys)
            if len(cached) < len(keys) and keys[len(cached)] in being_read:
                self._queue.remove(request)
                held.append(request)
                continue
            num_new = limits.pages_for(len(request.tokens)) - len(cached)
            if num_new + self._pool.num_cached(cached) + headroom > self._pool.num_free:
                break
            self._queue.remove(request)
            self._start(request, cached, now)
            being_read.update(self._unread(request))
            self._drafting.assign(request, keys[: len(cached)])
            admits.append(
                Admit(request.sequence_id, list(request.tokens), request.prompt_len, request.params)
            )
            num_rows = min(budget, request.num_pending)
            chunk = self._chunk(request, num_rows)
            chunk.new_pages[:0] = cached
            chunks.append(chunk)
            budget -= num_rows
        for request in held:
            self._queue.add(request)
        return budget

    def _unread(self, request: Request) -> list[bytes]:
        """Keys of the full pages that will be known once a running request's prompt is read."""
        if not self._limits.prefix_cache:
            return []
        return request.keys.upto(request.tokens, len(request.tokens), request.num_published)

    def _cacheable(self, request: Request) -> list[bytes]:
        """Keys of the pages worth looking up: at least one token must be left to decide with.

        None of them when the prompt's own log-probabilities are wanted, which only its rows can tell.
        """
        if not self._limits.prefix_cache or request.params.prompt_logprobs is not None:
            return []
        return request.keys.upto(request.tokens, len(request.tokens) - 1)

    def _start(self, request: Request, cached: list[int], now: float) -> None:
        """Begin a stay on the ranks with these pages of the prefix cache."""
        sequence_id = self._next_sequence_id
        self._next_sequence_id += 1
        num_cached = len(cached) * self._limits.page_size
        request.start(sequence_id, num_cached)
        self._pool.share(sequence_id, cached)
        request.num_published = len(cached)
        self.running[sequence_id] = request
        if request.num_cached is None:
            request.num_cached = num_cached
            request.queue_s = now - request.arrival_s
            self.num_prefix_queries += len(request.tokens)
            self.num_prefix_hits += num_cached
        found = f", {num_cached} tokens cached" if num_cached else ""
        self._stories.note(request.request_id, now, f"admitted as sequence {sequence_id}{found}")

    def _chunk(self, request: Request, num_rows: int) -> Chunk:
        """The next rows of a sequence, with the pages they need."""
        start = request.computed
        end = start + num_rows
        new_pages = self._extend(request, end) if end > request.capacity else []
        tail: list[int] = []
        if end > request.known:
            tail = request.tokens[request.known : end]
            request.known = end
        return Chunk(request.sequence_id, start, num_rows, tail, new_pages, int(end == len(request.tokens)))

    def _block(self, request: Request, drafts: Sequence[int]) -> Chunk:
        """An anchor and its drafts, with the pages they need."""
        start = request.computed
        num_rows = 1 + len(drafts)
        end = start + num_rows
        new_pages = self._extend(request, end) if end > request.capacity else []
        tail = [*request.tokens[request.known :], *drafts]
        request.known = start + 1
        return Chunk(request.sequence_id, start, num_rows, tail, new_pages, num_rows)

    def _extend(self, request: Request, end: int) -> list[int]:
        """The pages that rows up to `end` lack."""
        page_size = self._limits.page_size
        num_pages = -(-(end - request.capacity) // page_size)
        request.capacity += num_pages * page_size
        return self._pool.extend(request.sequence_id, num_pages)

    def _reach(self, request: Request) -> int:
        """Rows that its own pages and all free ones can hold."""
        return request.capacity + self._pool.num_free * self._limits.page_size - request.computed
