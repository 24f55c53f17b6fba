"""The draft phase: between two steps, what the last one computed goes to the shards, and drafts come back.

    begin     after a step is settled: one plan for each shard that has rows to commit or blocks to propose
    answered  drafts are kept until the next step is planned
    overdue   who has not answered is lost

While a shard owes an answer no step is planned, because the next step overwrites the tap rows it may still
read. A shard is only ever a gain: whatever it does, lacks or fails at, its sequences go on without drafts.
"""

from collections.abc import Sequence

from ..cluster.messages import BudgetMode, ShardLost, ShardSilent
from .budget import DraftBudget, Phase, most_drafts, share_rows
from .context import Computed, ContextLedger
from .events import DraftsArrived, ShardUp, ToShard
from .limits import Limits
from .request import Request, State
from .shards import Shard, choose_owner
from .story import Stories
from .survival import Offers, Verified


class Drafting:
    """Owns the shards, who owns which sequence, and the drafts that the next step may verify."""

    def __init__(self, limits: Limits, stories: Stories) -> None:
        self.shards: list[Shard] = []
        self.drafts: dict[int, list[int]] = {}  # by sequence id
        self.budget = DraftBudget()
        self.phase = 0  # number of the last draft phase
        self.most_drafts = 0  # the longest that any life of a shard may have made
        self.num_restarts = 0
        self.num_late = 0
        self.num_proposed = 0  # drafts that came
        self.num_choices = dict.fromkeys(Phase, 0)  # what the shards were asked for
        self.last_s = 0.0  # of the last draft phase; 0 if the step in flight had none
        self.yields = False  # prompts used up the rows of the last step that the pace allows: nobody drafts
        self._limits = limits
        self._stories = stories
        self._confidences: dict[int, list[float]] = {}  # of `drafts`
        self._num_asked = 0  # blocks asked for in the last phase
        self._began_at = 0.0  # when the last phase began
        self._shard_s = 0.0  # the longest that a shard says it took for it

    @property
    def is_active(self) -> bool:
        """Whether a shard is ready: without one, what a step computed is of no interest here."""
        return any(shard.ledger is not None for shard in self.shards)

    @property
    def mode(self) -> BudgetMode:
        """Where the draft budget stands; "off" if all drafts are verified or no shard is there."""
        return self.budget.mode.value if self._limits.draft_budget and self.is_active else "off"

    @property
    def has_answered(self) -> bool:
        """Whether the last phase asked for drafts, though none may have come."""
        return self._num_asked > 0

    @property
    def peers(self) -> list[str]:
        """The lives that run as far as is known: used, quarantined, or about to take their place."""
        current = [shard.peer for shard in self.shards if shard.state in ("ready", "quarantined")]
        return current + [shard.successor[0] for shard in self.shards if shard.successor is not None]

    @property
    def is_waiting(self) -> bool:
        """Whether a shard owes an answer: a draft phase is on."""
        return any(shard.awaited is not None for shard in self.shards)

    def up(self, event: ShardUp) -> None:
        """A life is ready; `switch` puts it in its place."""
        index = event.ready.shard
        while len(self.shards) <= index:
            self.shards.append(Shard(len(self.shards)))
        self.shards[index].successor = (event.peer, event.ready)

    def lost(self, event: ShardLost) -> None:
        """A life has ended; of one that is not in use any more that is no news."""
        peer = event.peer
        for shard in self.shards:
            if shard.successor is not None and shard.successor[0] == peer:
                shard.successor = None
            elif shard.peer == peer and shard.state in ("ready", "quarantined"):
                shard.stop("absent" if event.is_dismissed else "lost")

    def switch(self) -> list[ToShard]:
        """Put next lives in the places of last ones, but not of those that are being waited for."""
        commands: list[ToShard] = []
        for shard in self.shards:
            if shard.successor is not None and shard.awaited is None:
                peer, ready = shard.successor
                shard.successor = None
                self.most_drafts = max(self.most_drafts, ready.max_drafts)
                limits = self._limits
                ledger = ContextLedger(ready, limits.page_size, limits.context_cap, limits.prefix_cache)
                commands += shard.begin(peer, ready, ledger)
                self.budget.restart()
        return commands

    def overdue(self, phase: int) -> list[ShardSilent]:
        """The phase has lasted too long: whoever has not answered is not used any more."""
        silent = [shard for shard in self.shards if phase == self.phase and shard.awaited is not None]
        for shard in silent:
            shard.stop("lost")
        return [ShardSilent(shard.peer) for shard in silent]

    def answered(self, event: DraftsArrived, now: float) -> None:
        """Keep a shard's drafts; an answer that is not awaited is counted and ignored."""
        shard = next((shard for shard in self.shards if shard.peer == event.peer), None)
        if shard is None or shard.awaited is None or shard.awaited != event.drafts.number:
            self.num_late += 1
            return
        shard.answered(event.drafts)
        most = shard.max_drafts
        for draft in event.drafts.drafts:
            if draft.outcome == "drafted" and draft.token_ids:
                token_ids = draft.token_ids
                self.num_proposed += len(token_ids)
                self.drafts[draft.sequence_id] = token_ids if len(token_ids) <= most else token_ids[:most]
                if self._limits.draft_budget:
                    self._confidences[draft.sequence_id] = draft.confidences
        self._shard_s = max(self._shard_s, event.drafts.commit_s + event.drafts.draft_s)
        if self.is_waiting:
            return
        self.last_s = max(self._shard_s, now - self._began_at)
        if self._num_asked > 0:
            self.budget.draft.observe(self._num_asked, 1e3 * self.last_s)

    def share(self, decodes: Sequence[Request], num_certain: int, num_rows: int) -> list[int]:
        """How many drafts of each are verified, beside `num_certain` other rows; `num_rows` are left."""
        drafts = self.drafts
        sequence_ids = [r.sequence_id for r in decodes]
        wanted = [
            min(r.most_drafts, len(drafts.get(sequence_id, ())))
            for r, sequence_id in zip(decodes, sequence_ids, strict=True)
        ]
        if not self._limits.draft_budget:
            return share_rows(wanted, num_rows)
        confidences = self._confidences
        offers = Offers(
            sequence_ids, [confidences.get(sequence_id, ()) for sequence_id in sequence_ids], wanted
        )
        num_asked, self._num_asked = self._num_asked, 0
        cuts = self.budget.cut(offers, num_asked, num_certain, num_rows)
        least = self._limits.min_draft_tokens
        if least == 0:
            return cuts
        return share_rows(
            [max(cut, min(most, least)) for cut, most in zip(cuts, wanted, strict=True)], num_rows
        )

    def planned(self) -> None:
        """The drafts are in a plan."""
        self.drafts.clear()
        self._confidences.clear()

    def settled(self, verified: Sequence[Verified]) -> None:
        """What stood of each block; one that ends its request may be cut off before it is put to the test."""
        if self._limits.draft_budget:
            self.budget.settled(verified)

    def assign(self, request: Request, keys: list[bytes]) -> None:
        """Give a sequence an owner when it is admitted; `keys` are those of its cached prefix."""
        request.shard = -1
        if request.most_drafts == 0:
            return
        num_pages = self._limits.pages_for(len(request.tokens))
        if (shard := choose_owner(self.shards, keys, num_pages)) is not None:
            request.shard = shard.index
            shard.pages_to_come[request.sequence_id] = num_pages

    def drop(self, request: Request) -> None:
        """A sequence leaves: its context ends."""
        self.drafts.pop(request.sequence_id, None)
        self._confidences.pop(request.sequence_id, None)
        self.budget.survival.forget(request.sequence_id)
        if request.shard >= 0:
            shard = self.shards[request.shard]
            shard.pages_to_come.pop(request.sequence_id, None)
            if shard.ledger is not None:
                shard.ledger.drop(request.sequence_id)

    def begin(self, step: int, computed: list[Computed], now: float) -> list[ToShard]:
        """Hand out what `step` computed; empty if no shard has anything to do with it."""
        phase = self._next_phase(computed) if self._limits.draft_budget else Phase.PROPOSE
        self.num_choices[phase] += 1
        self._num_asked, self.last_s = 0, 0.0
        if phase is Phase.NONE:
            self._rest(computed)
            return []
        commands: list[ToShard] = []
        parts: list[list[Computed]] = [[] for _ in self.shards]
        for c in computed:
            if (shard := self._owner_for(c)) is not None:
                parts[shard.index].append(c)
        for shard, rows in zip(self.shards, parts, strict=True):
            if rows:
                commands += self._plan(shard, step, rows, phase is Phase.PROPOSE, now)
        self.phase += self.is_waiting
        self._began_at, self._shard_s = now, 0.0
        return commands

    def check(self, running: dict[int, Request]) -> None:
        """Contexts end where their sequences are computed, on the shard that owns them."""
        for shard in self.shards:
            assert (shard.ledger is not None) == (shard.state == "ready"), f"shard {shard.index}"
            if shard.ledger is None:
                assert shard.awaited is None, f"shard {shard.index} is awaited, but {shard.state}"
                continue
            shard.ledger.check()
            for sequence_id, window in shard.ledger.windows.items():
                request = running.get(sequence_id)
                assert request is not None, f"a context of sequence {sequence_id}, which does not run"
                assert request.shard == shard.index, f"{request.request_id}: context with another shard"
                if shard.ledger.keeps_context:
                    assert window.end == request.computed, (
                        f"{request.request_id}: context to {window.end}, computed {request.computed}"
                    )
            assert shard.pages_to_come.keys() <= running.keys(), f"shard {shard.index} expects the dead"

    def _owner_for(self, c: Computed) -> Shard | None:
        """The shard that has to hear of these rows; None if none has."""
        request = c.request
        if request.shard >= 0 and request.state is not State.FINISHED:
            ledger = self.shards[request.shard].ledger
            if ledger is not None and request.sequence_id in ledger.windows:
                return self.shards[request.shard]
        if request.state is State.FINISHED:
            shard = self.shards[request.shard] if request.shard >= 0 else None
            if shard is not None and shard.ledger is not None and shard.ledger.wants(c):
                return shard
            self.drop(request)
            return None
        if request.shard < 0:
            self.assign(request, [])
        if request.shard < 0:
            return None
        shard = self.shards[request.shard]
        if shard.ledger is None:
            return None
        return shard if request.most_drafts > 0 else None

    def _next_phase(self, computed: list[Computed]) -> Phase:
        num_decoding = num_drafting = 0
        for c in computed:
            request = c.request
            if len(request.tokens) - request.computed == 1 and request.state is not State.FINISHED:
                num_decoding += 1
                num_drafting += request.most_drafts > 0
        if num_drafting > 0 and self._limits.min_draft_tokens > 0:
            return Phase.PROPOSE
        keeps_context = any(s.ledger is not None and s.ledger.keeps_context for s in self.shards)
        if self.yields:
            return Phase.COMMIT if keeps_context else Phase.NONE
        return self.budget.next_phase(num_decoding, num_drafting, keeps_context)

    def _rest(self, computed: list[Computed]) -> None:
        """No shard hears of this step; a context that would miss its rows ends."""
        for c in computed:
            if c.request.state is State.FINISHED:
                self.drop(c.request)
        for shard in self.shards:
            if shard.ledger is not None and shard.ledger.keeps_context:
                for sequence_id in list(shard.ledger.windows):
                    shard.ledger.drop(sequence_id)

    def _plan(
        self, shard: Shard, step: int, rows: list[Computed], proposes: bool, now: float
    ) -> list[ToShard]:
        assert shard.ledger is not None
        num_drafts = most_drafts(self._limits.num_draft_tokens, shard.max_drafts)
        plan = shard.ledger.plan(step, rows, num_drafts if proposes else 0)
        for request, base in shard.ledger.restarted:
            self.num_restarts += 1
            if request.state is not State.FINISHED:
                self._stories.note(request.request_id, now, f"context restarts at {base} on {shard.peer}")
        if plan is None:
            return []
        for opened in plan.open:
            shard.pages_to_come.pop(opened.sequence_id, None)
        shard.awaited = plan.number
        self._num_asked += len(plan.propose)
        return [ToShard(shard.peer, plan)]
