"""One shard: executes the scheduler's plans, in order, and decides nothing by itself."""

import time

import torch
from torch import Tensor

from ..cluster.errors import ProtocolError
from ..cluster.messages import Commit, Draft, Drafts, ShardPlan, ShardReady
from .proposer import Proposer


class ShardRunner:
    """A proposer, and the tap rows of the rank beside it. Not thread-safe.

    `taps` [rows, num_taps, hidden] is the rank's scratch: the rows of the target's last step, tapped after
    the proposer's layers. None for a proposer that reads none.
    """

    def __init__(
        self,
        shard: int,
        proposer: Proposer,
        taps: Tensor | None,
        *,
        check: bool = False,
    ) -> None:
        num_taps = 0 if taps is None else taps.shape[1]
        assert num_taps == len(proposer.tap_layer_ids), "the rank taps other layers than its shard reads"
        self.shard = shard
        self._proposer = proposer
        self._taps = taps
        self._check = check
        self._last_number = 0

    @property
    def ready(self) -> ShardReady:
        return ShardReady(
            shard=self.shard,
            max_drafts=self._proposer.max_drafts,
            tap_layer_ids=list(self._proposer.tap_layer_ids),
            num_pages=self._proposer.num_pages,
            max_context_len=self._proposer.max_context_len,
        )

    def execute(self, plan: ShardPlan) -> Drafts:
        """Apply a plan; ProtocolError for one out of order or that contradicts what this shard holds."""
        if plan.number != self._last_number + 1:
            raise ProtocolError(
                f"shard {self.shard} expected plan {self._last_number + 1}, got {plan.number}"
            )
        self._last_number = plan.number
        began = time.perf_counter()
        for sequence_id in plan.free:
            self._proposer.free(sequence_id)
        for opened in plan.open:
            self._proposer.open(opened)
        if plan.commits:
            self._commit(plan.commits)
        for slide in plan.slides:
            self._proposer.slide(slide)
        committed = time.perf_counter()
        drafts = self._propose(plan) if plan.propose else []
        drafted = time.perf_counter()
        if self._check:
            self._proposer.check()
        return Drafts(
            number=plan.number, drafts=drafts, commit_s=committed - began, draft_s=drafted - committed
        )

    def _commit(self, commits: list[Commit]) -> None:
        if self._taps is None:
            raise ProtocolError(f"shard {self.shard} reads no tap rows, but was sent commits")
        if len({commit.step for commit in commits}) > 1:
            raise ProtocolError(f"shard {self.shard}: commits of several steps, but tap rows of one")
        self._proposer.commit(commits, self._taps)
        if self._taps.is_cuda:  # the answer lets the next step overwrite these rows: they must have been read
            torch.cuda.current_stream(self._taps.device).synchronize()

    def _propose(self, plan: ShardPlan) -> list[Draft]:
        if not 1 <= plan.num_drafts <= self._proposer.max_drafts:
            raise ProtocolError(
                f"shard {self.shard} drafts 1 to {self._proposer.max_drafts} tokens, not {plan.num_drafts}"
            )
        return self._proposer.propose(plan.propose, plan.num_drafts)
