"""The shards: who lives, who is waited for, and who owns which sequence.

    absent --up--> ready --lost--> lost --up--> ready ...
                     '--three steps of non-finite drafts--> quarantined --up--> ready ...

An `up` while the last life still runs is a hot swap. The new life then waits until the old one owes no
answer, and begins with nothing: contexts belong to a life, not to a shard.
"""

from ..cluster.messages import Drafts, ShardReady, ShardState, ShardStats, Shutdown
from .context import ContextLedger
from .events import ToShard

QUARANTINE_AFTER = 3  # steps in a row without a finite draft
MAX_IMBALANCE = 2  # a prefix draws no sequence to a shard with more than this many times the least load


class Shard:
    """One shard over all its lives. `ledger` is there while it is ready."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.state: ShardState = "absent"
        self.peer = ""
        self.max_drafts = 0
        self.ledger: ContextLedger | None = None
        self.awaited: int | None = None  # number of the plan it owes an answer to
        self.successor: tuple[str, ShardReady] | None = None
        self.pages_to_come: dict[int, int] = {}  # of sequences it owns and has not opened yet
        self._streak = 0
        self._num_failed = 0
        self._commit_s = 0.0
        self._draft_s = 0.0
        self._past_commit_rows = 0
        self._past_slides = 0

    @property
    def load(self) -> int:
        """Pages its sequences hold, and are about to; of a proposer without context its sequences."""
        if self.ledger is None:
            return 0
        if not self.ledger.keeps_context:
            return len(self.ledger.windows) + len(self.pages_to_come)
        pool = self.ledger.pool
        return pool.num_pages - pool.num_free + sum(self.pages_to_come.values())

    @property
    def num_commit_rows(self) -> int:
        return self._past_commit_rows + (0 if self.ledger is None else self.ledger.num_commit_rows)

    @property
    def num_slides(self) -> int:
        return self._past_slides + (0 if self.ledger is None else self.ledger.num_slides)

    def begin(self, peer: str, ready: ShardReady, ledger: ContextLedger) -> list[ToShard]:
        """Start a life; the one before is sent home if it still runs."""
        assert self.awaited is None, "the last life owes an answer"
        old = [ToShard(self.peer, Shutdown())] if self.state in ("ready", "quarantined") else []
        self.stop("ready")
        self.peer, self.ledger, self.max_drafts = peer, ledger, ready.max_drafts
        self._streak = 0
        return old

    def stop(self, state: ShardState) -> None:
        """End the use of a life: its contexts are gone, and nobody waits for it."""
        self._past_commit_rows, self._past_slides = self.num_commit_rows, self.num_slides
        self.state = state
        self.ledger = None
        self.awaited = None
        self.pages_to_come.clear()

    def answered(self, drafts: Drafts) -> None:
        """Count an answer; drafts that are never finite end in quarantine."""
        self.awaited = None
        self._commit_s += drafts.commit_s
        self._draft_s += drafts.draft_s
        outcomes = {draft.outcome for draft in drafts.drafts}
        self._num_failed += sum(draft.outcome != "drafted" for draft in drafts.drafts)
        if "drafted" in outcomes:
            self._streak = 0
        elif "not_finite" in outcomes:
            self._streak += 1
            if self._streak >= QUARANTINE_AFTER:
                self.stop("quarantined")

    def stats(self) -> ShardStats:
        ledger = self.ledger
        return ShardStats(
            shard=self.index,
            peer=self.peer,
            state=self.state,
            num_sequences=0 if ledger is None else len(ledger.windows),
            num_pages=0 if ledger is None else ledger.pool.num_pages,
            num_free_pages=0 if ledger is None else ledger.pool.num_free,
            num_context_tokens=0 if ledger is None else ledger.num_context_tokens,
            num_failed_drafts=self._num_failed,
            commit_s=self._commit_s,
            draft_s=self._draft_s,
        )


def choose_owner(shards: list[Shard], keys: list[bytes], num_pages: int) -> Shard | None:
    """The ready shard that knows most of a prefix, then the least loaded; None if none is ready.

    `num_pages` are what the sequence will hold. A known prefix may give a shard up to MAX_IMBALANCE times its
    due, so that prompts which all begin alike do not all go to one shard.
    """
    best: tuple[int, int, int] | None = None
    chosen: Shard | None = None
    loads = [(shard, shard.ledger, shard.load) for shard in shards if shard.ledger is not None]
    if not loads:
        return None
    bound = MAX_IMBALANCE * (min(load for _, _, load in loads) + num_pages)
    for shard, ledger, load in loads:
        num_known = ledger.find(keys) if keys and load <= bound else 0
        rank = (-num_known, load, shard.index)
        if best is None or rank < best:
            best, chosen = rank, shard
    return chosen
