"""DFlash as a proposer: the network, its sequences' histories, and their contexts."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..cluster.choices import BackendChoice
from ..cluster.errors import ModelError, ProtocolError
from ..cluster.messages import Commit, Draft, Open, Propose, Slide
from ..kernels.backend import choose_backend
from .context import Contexts
from .dflash import DFlash, page_bytes
from .drawing import draw_drafts
from .history import Histories
from .proposer import draft_contained
from .spec import DrafterSpec
from .target import Target
from .weights import load_weights


class DFlashProposer:
    """Implements `proposer.Proposer`."""

    def __init__(self, network: DFlash, num_pages: int, page_size: int) -> None:
        self.network = network
        self.contexts = Contexts(num_pages, page_size)
        self._histories = Histories()

    @classmethod
    def load(
        cls,
        path: Path,
        target: Target,
        *,
        context_bytes: int,
        page_size: int,
        block_size: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        backend: BackendChoice = "auto",
    ) -> "DFlashProposer":
        """Load a drafter for `target`; `context_bytes` are spent on pages of context.

        Raises ModelError for a drafter that cannot be loaded, is another target's, or has no room for a page.
        """
        device = torch.device(device)
        spec = DrafterSpec.load(path, target, block_size)
        num_pages = context_bytes // page_bytes(spec, page_size, dtype)
        if num_pages < 1:
            raise ModelError(
                f"{path}: {context_bytes} bytes hold no page of context "
                f"({page_bytes(spec, page_size, dtype)} bytes); give the drafter more memory"
            )
        weights = load_weights(path, spec, target, dtype, device)
        choice = backend if dtype == torch.float32 else "torch"  # our own kernels know no other
        network = DFlash(
            spec, target, weights, choose_backend(device, choice), num_pages=num_pages, page_size=page_size
        )
        return cls(network, num_pages, page_size)

    @property
    def max_drafts(self) -> int:
        return self.network.spec.block_size - 1

    @property
    def tap_layer_ids(self) -> tuple[int, ...]:
        return self.network.spec.tap_layer_ids

    @property
    def num_pages(self) -> int:
        return self.contexts.num_pages

    @property
    def max_context_len(self) -> int:
        return self.network.spec.max_context_len

    def open(self, opened: Open) -> None:
        self.contexts.open(opened)
        self._histories.open(opened)

    def commit(self, commits: Sequence[Commit], taps: Tensor) -> None:
        slots = np.concatenate([self.contexts.commit(commit) for commit in commits])
        row_ids = np.concatenate([commit.first_row + np.arange(commit.num_rows) for commit in commits])
        positions = np.concatenate([commit.base_position + np.arange(commit.num_rows) for commit in commits])
        if row_ids.min() < 0 or row_ids.max() >= len(taps):
            raise ProtocolError(f"a commit names tap rows beyond the {len(taps)} there are")
        self.network.write_context(
            taps[torch.from_numpy(row_ids).to(taps.device)],
            torch.from_numpy(positions).to(self.network.device),
            torch.from_numpy(slots).to(self.network.device),
        )

    def slide(self, slide: Slide) -> None:
        self.contexts.slide(slide)

    def free(self, sequence_id: int) -> None:
        self.contexts.free(sequence_id)
        self._histories.free(sequence_id)

    def propose(self, proposals: Sequence[Propose], num_drafts: int) -> list[Draft]:
        self.take(proposals)
        return self.draft(proposals, num_drafts)

    def take(self, proposals: Sequence[Propose]) -> None:
        """Take in what was emitted since the last proposals."""
        for proposal in proposals:
            history = self._histories.extend(proposal)
            end = self.contexts.window(proposal.sequence_id).end
            if len(history) != end + 1:
                raise ProtocolError(
                    f"sequence {proposal.sequence_id}: the anchor is at {len(history) - 1}, but its context "
                    f"ends at {end}"
                )

    def draft(self, proposals: Sequence[Propose], num_drafts: int) -> list[Draft]:
        """Drafts behind the last token of each; those must have been taken in."""
        if not proposals:
            return []
        return draft_contained(lambda some: self._draft(some, num_drafts), proposals)

    def check(self) -> None:
        self.contexts.check()

    def _draft(self, proposals: Sequence[Propose], num_drafts: int) -> list[Draft]:
        network = self.network
        rows = self.contexts.block_rows(proposals, num_drafts + 1, network.device)
        histories = [self._histories[proposal.sequence_id] for proposal in proposals]
        anchors = torch.tensor([int(history.token_ids[-1]) for history in histories], device=network.device)
        states = network.forward(anchors, rows).flatten(0, 1)
        ids, confidences, is_finite = draw_drafts(
            network.logits(states), states, histories, network.spec.mask_token_id, network.selector
        )
        drafted = zip(proposals, ids.tolist(), confidences.tolist(), is_finite.tolist(), strict=True)
        return [
            Draft(proposal.sequence_id, row_ids, row_confidences)
            if finite
            else Draft(proposal.sequence_id, [], [], "not_finite")
            for proposal, row_ids, row_confidences, finite in drafted
        ]
