"""The contexts of one shard: which pages hold which positions of which sequence, not what is in them.

A window [start, end) is kept in the pages start // page_size .. (end - 1) // page_size of the sequence, so
that a page holds the same positions as the target's. Which page is free is the scheduler's knowledge; the
shard refuses (ProtocolError) what contradicts its tables: a wrong row would be silent, and only lower
acceptance.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from ..cluster.errors import ProtocolError
from ..cluster.messages import Commit, Open, Propose, Slide
from ..kernels.rows import Rows


@dataclass(slots=True)
class Window:
    """One sequence's context: positions [start, end) in `pages`; no pages when it is empty."""

    start: int
    end: int
    pages: list[int] = field(default_factory=list)


class Contexts:
    """The windows of all sequences of a shard. `num_owners` counts the windows that hold each page."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._windows: dict[int, Window] = {}
        self._num_owners: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._windows)

    def window(self, sequence_id: int) -> Window:
        """The window as it is now; not to be changed. ProtocolError for a sequence that is not here."""
        window = self._windows.get(sequence_id)
        if window is None:
            raise ProtocolError(f"sequence {sequence_id} is not on this shard")
        return window

    def open(self, opened: Open) -> None:
        """Begin with an empty window at `end`, or with the cached pages of [start, end)."""
        if opened.sequence_id in self._windows:
            raise ProtocolError(f"sequence {opened.sequence_id} was opened twice")
        if not 0 <= opened.start <= opened.end or len(opened.pages) != self._num_held(
            opened.start, opened.end
        ):
            raise ProtocolError(
                f"sequence {opened.sequence_id}: {len(opened.pages)} pages cannot hold the context "
                f"{opened.start} .. {opened.end}"
            )
        window = Window(opened.start, opened.end)
        self._windows[opened.sequence_id] = window
        self._append(opened.sequence_id, window, opened.pages)

    def commit(self, commit: Commit) -> NDArray[np.int64]:
        """Lengthen the window; returns the slots [num_rows] its new rows are to be written to."""
        window = self.window(commit.sequence_id)
        if commit.is_restart:
            if commit.base_position <= window.end:
                raise ProtocolError(
                    f"sequence {commit.sequence_id}: a restart at {commit.base_position} is not beyond its "
                    f"context's end {window.end}"
                )
            self._drop(window, len(window.pages))
            window.start = window.end = commit.base_position
        elif commit.base_position != window.end:
            raise ProtocolError(
                f"sequence {commit.sequence_id}: a commit at {commit.base_position}, but its context ends at "
                f"{window.end}"
            )
        end = window.end + commit.num_rows
        num_new = self._num_held(window.start, end) - len(window.pages)
        if commit.num_rows <= 0 or len(commit.new_pages) != num_new:
            raise ProtocolError(
                f"sequence {commit.sequence_id}: {commit.num_rows} rows from {window.end} need {num_new} new "
                f"pages, not {len(commit.new_pages)}"
            )
        positions = np.arange(window.end, end)
        self._check_unowned(commit.sequence_id, commit.new_pages)
        self._check_last_private(commit.sequence_id, window)
        self._append(commit.sequence_id, window, commit.new_pages)
        window.end = end
        return self._slots(np.asarray(window.pages), window, positions)

    def slide(self, slide: Slide) -> None:
        window = self.window(slide.sequence_id)
        if slide.new_start % self.page_size or not window.start <= slide.new_start <= window.end:
            raise ProtocolError(
                f"sequence {slide.sequence_id}: a slide to {slide.new_start} in the context {window.start} "
                f".. {window.end} of pages of {self.page_size}"
            )
        num_kept = self._num_held(slide.new_start, window.end)
        self._drop(window, len(window.pages) - num_kept)
        window.start = slide.new_start

    def free(self, sequence_id: int) -> None:
        """Forget the sequence; one that is not here is ignored."""
        window = self._windows.pop(sequence_id, None)
        if window is not None:
            self._drop(window, len(window.pages))

    def block_rows(self, proposals: Sequence[Propose], block_len: int, device: torch.device) -> Rows:
        """The rows of one block behind each window, chunk after chunk.

        Page tables begin at each window's first page; `positions` are absolute all the same.
        """
        num_chunks, page_size = len(proposals), self.page_size
        windows = [self.window(proposal.sequence_id) for proposal in proposals]
        offsets = [window.start // page_size * page_size for window in windows]
        context_lens = [
            window.end + block_len - offset for window, offset in zip(windows, offsets, strict=True)
        ]
        page_tables = np.zeros((num_chunks, -(-max(context_lens) // page_size)), np.int64)
        slots = np.empty((num_chunks, block_len), np.int64)
        positions = np.asarray([window.end for window in windows])[:, None] + np.arange(block_len)
        for row, (proposal, window) in enumerate(zip(proposals, windows, strict=True)):
            pages = self._block_pages(proposal, window, context_lens[row])
            page_tables[row, : len(pages)] = pages
            slots[row] = self._slots(page_tables[row], window, positions[row])
        if len(np.unique(slots)) != slots.size:
            raise ProtocolError("two proposals were given the same lookahead page")
        return Rows(
            positions=torch.from_numpy(positions.reshape(-1)).to(device),
            slots=torch.from_numpy(slots.reshape(-1)).to(device),
            query_lens=[block_len] * num_chunks,
            context_lens=context_lens,
            page_tables=torch.from_numpy(page_tables).to(device),
            hidden_lens=[window.start - offset for window, offset in zip(windows, offsets, strict=True)],
        )

    def check(self) -> None:
        """Raise AssertionError unless tables, owners and windows agree and no page being filled is shared."""
        owners: Counter[int] = Counter()
        for sequence_id, window in self._windows.items():
            assert 0 <= window.start <= window.end, f"sequence {sequence_id}: {window}"
            assert len(window.pages) == self._num_held(window.start, window.end), f"{sequence_id}: {window}"
            assert len(set(window.pages)) == len(window.pages), f"sequence {sequence_id} holds a page twice"
            owners.update(window.pages)
        assert owners == +self._num_owners, f"owners {self._num_owners}, but tables say {owners}"
        assert all(0 <= page < self.num_pages for page in owners)
        for sequence_id, window in self._windows.items():
            if window.end % self.page_size and window.pages:
                assert owners[window.pages[-1]] == 1, f"sequence {sequence_id} shares the page it writes"

    def _block_pages(self, proposal: Propose, window: Window, context_len: int) -> list[int]:
        """The window's pages and as many lookahead pages as the block needs."""
        num_missing = -(-context_len // self.page_size) - len(window.pages)
        if num_missing > len(proposal.lookahead_pages):
            raise ProtocolError(
                f"sequence {proposal.sequence_id}: its block needs {num_missing} lookahead pages, "
                f"not {len(proposal.lookahead_pages)}"
            )
        lookahead = proposal.lookahead_pages[:num_missing]
        self._check_range(proposal.sequence_id, lookahead)
        self._check_unowned(proposal.sequence_id, lookahead)
        self._check_last_private(proposal.sequence_id, window)
        return window.pages + lookahead

    def _num_held(self, start: int, end: int) -> int:
        """Pages of a window."""
        return 0 if start == end else -(-end // self.page_size) - start // self.page_size

    def _slots(
        self, table: NDArray[np.int64], window: Window, positions: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        local = positions - window.start // self.page_size * self.page_size
        return table[local // self.page_size] * self.page_size + local % self.page_size

    def _append(self, sequence_id: int, window: Window, pages: list[int]) -> None:
        self._check_range(sequence_id, pages)
        if set(pages) & set(window.pages) or len(set(pages)) != len(pages):
            raise ProtocolError(f"sequence {sequence_id}: a page among {pages} is given twice")
        window.pages = window.pages + pages
        self._num_owners.update(pages)

    def _drop(self, window: Window, num_pages: int) -> None:
        self._num_owners.subtract(window.pages[:num_pages])
        window.pages = window.pages[num_pages:]

    def _check_last_private(self, sequence_id: int, window: Window) -> None:
        """The last page is written to while it is not full."""
        if window.pages and window.end % self.page_size and self._num_owners[window.pages[-1]] > 1:
            raise ProtocolError(
                f"sequence {sequence_id} would write to page {window.pages[-1]}, which it shares"
            )

    def _check_unowned(self, sequence_id: int, pages: list[int]) -> None:
        if taken := [page for page in pages if self._num_owners[page]]:
            raise ProtocolError(f"sequence {sequence_id} was given pages {taken}, which hold context already")

    def _check_range(self, sequence_id: int, pages: list[int]) -> None:
        if wrong := [page for page in pages if not 0 <= page < self.num_pages]:
            raise ProtocolError(f"sequence {sequence_id}: pages {wrong} are not among {self.num_pages}")
