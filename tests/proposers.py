"""Drafters that know what the target will say, and draft it, or never, or only where their context is right.

They are whole proposers: given taps they keep context windows through `drafter.context`, put the tap rows of
each commit where real ones put draft K/V, and assert at every proposal that they read back from the window's
pages what was committed for its positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from paceline.cluster.errors import ProtocolError
from paceline.cluster.messages import Commit, Draft, Open, Propose, SamplingParams, Slide
from paceline.drafter.context import Contexts
from paceline.drafter.history import Histories, History

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Known:
    """What the target says after one prompt, and what a proposer with taps reads on the way."""

    token_ids: list[int]  # of the output
    taps: Tensor | None = None  # [prompt and output, taps, hidden]; row p depends on the tokens up to p


class Continuations:
    """The outputs of requests, by prompt and parameters."""

    def __init__(self) -> None:
        self._known: dict[bytes, Known] = {}

    def learn(self, prompt_ids: Sequence[int], params: SamplingParams, known: Known) -> None:
        self._known[_key(prompt_ids, params)] = known

    def of(self, history: History) -> Known:
        prompt_ids = history.token_ids[: history.prompt_len].tolist()
        return self._known.get(_key(prompt_ids, history.params), Known([]))


@dataclass(frozen=True, slots=True)
class Ahead:
    """One sequence where it is to be drafted for."""

    tokens: list[int]  # so far; the last is the anchor
    true_ids: list[int]  # what the target will say next, as far as it is known
    params: SamplingParams


Rule = Callable[[Ahead, int], list[int]]  # the number of drafts asked for -> drafts, at most so many


def right(ahead: Ahead, num_drafts: int) -> list[int]:
    """The oracle's."""
    return ahead.true_ids[:num_drafts]


def wrong(ahead: Ahead, num_drafts: int) -> list[int]:
    """Never what the target says; a stop token wherever that would be wrong."""
    stops = ahead.params.stop_token_ids or [0]
    drafts = []
    for index in range(num_drafts):
        true_id = ahead.true_ids[index] if index < len(ahead.true_ids) else ahead.tokens[-1]
        stop = stops[index % len(stops)]
        drafts.append(stop if (index + len(ahead.tokens)) % 2 and stop != true_id else _other(true_id))
    return drafts


def mixed(ahead: Ahead, num_drafts: int) -> list[int]:
    """Right but for one place, which the sequence's length decides; at times shorter than asked for."""
    length = len(ahead.tokens)
    drafts = right(ahead, num_drafts - length % 3 // 2)
    place = length % (num_drafts + 1)
    if place < len(drafts):
        drafts[place] = _other(drafts[place])
    return drafts


class ScriptedProposer:
    """Implements `drafter.proposer.Proposer` by a rule.

    With `num_recent` it drafts only where the last so many rows of its window are those the target computes
    for their tokens, and nothing elsewhere: its drafts depend on recent context alone.
    """

    def __init__(
        self,
        rule: Rule,
        continuations: Continuations,
        *,
        max_drafts: int = 7,
        tap_layer_ids: tuple[int, ...] = (),
        num_pages: int = 0,
        page_size: int = PAGE_SIZE,
        num_recent: int = 0,
    ) -> None:
        self.max_drafts = max_drafts
        self.tap_layer_ids = tap_layer_ids
        self.num_pages = num_pages if tap_layer_ids else 0
        self.max_context_len = 0
        self.contexts = Contexts(self.num_pages, page_size)
        self._rule = rule
        self._continuations = continuations
        self._num_recent = num_recent
        self._histories = Histories()
        self._memory: Tensor | None = None  # [slots, taps, hidden]
        self._rows: dict[int, dict[int, Tensor]] = {}  # sequence -> position -> the row committed for it

    def open(self, opened: Open) -> None:
        self._histories.open(opened)
        if self.tap_layer_ids:
            self.contexts.open(opened)
            cached = range(opened.start, opened.end)  # what the cache keeps is taken on trust once
            self._rows[opened.sequence_id] = dict(zip(cached, self._window(opened.sequence_id), strict=True))

    def commit(self, commits: Sequence[Commit], taps: Tensor) -> None:
        if not self.tap_layer_ids:
            raise ProtocolError("a proposer without taps keeps no context to commit to")
        if self._memory is None:
            self._memory = torch.zeros(self.num_pages * self.contexts.page_size, *taps.shape[1:])
        for commit in commits:
            slots = self.contexts.commit(commit)
            rows = taps[commit.first_row : commit.first_row + commit.num_rows].float()
            self._memory[torch.from_numpy(slots)] = rows
            positions = range(commit.base_position, commit.base_position + commit.num_rows)
            self._rows[commit.sequence_id].update(zip(positions, rows.clone(), strict=True))

    def slide(self, slide: Slide) -> None:
        self.contexts.slide(slide)
        rows = self._rows[slide.sequence_id]
        self._rows[slide.sequence_id] = {p: row for p, row in rows.items() if p >= slide.new_start}

    def free(self, sequence_id: int) -> None:
        self.contexts.free(sequence_id)
        self._histories.free(sequence_id)
        self._rows.pop(sequence_id, None)

    def propose(self, proposals: Sequence[Propose], num_drafts: int) -> list[Draft]:
        histories = [self._histories.extend(proposal) for proposal in proposals]
        if self.tap_layer_ids:
            self._draw_blocks(proposals, num_drafts + 1)
        return [
            self._propose(proposal.sequence_id, history, num_drafts)
            for proposal, history in zip(proposals, histories, strict=True)
        ]

    def check(self) -> None:
        self.contexts.check()

    def _draw_blocks(self, proposals: Sequence[Propose], block_len: int) -> None:
        """Write a block behind each window, as a network does; whoever reads it as context reads NaN."""
        rows = self.contexts.block_rows(proposals, block_len, torch.device("cpu"))
        assert self._memory is not None, "a proposal before any commit"
        self._memory[rows.slots] = torch.nan

    def _propose(self, sequence_id: int, history: History, num_drafts: int) -> Draft:
        tokens = history.token_ids.tolist()
        known = self._continuations.of(history)
        if self.tap_layer_ids and not self._is_intact(sequence_id, len(tokens) - 1, known):
            return Draft(sequence_id, [], [])
        output = tokens[history.prompt_len :]
        true_ids = known.token_ids[len(output) :] if known.token_ids[: len(output)] == output else []
        drafts = self._rule(Ahead(tokens, true_ids, history.params), num_drafts)
        return Draft(sequence_id, drafts, [0.5] * len(drafts))

    def _is_intact(self, sequence_id: int, end: int, known: Known) -> bool:
        """Whether the last rows are the target's own; asserts that all are those that were committed."""
        window, held = self.contexts.window(sequence_id), self._window(sequence_id)
        assert window.end == end, f"the anchor is at {end}, the window ends at {window.end}"
        assert len(held) > 0, "a window of no rows"
        committed = torch.stack([self._rows[sequence_id][p] for p in range(window.start, window.end)])
        assert torch.equal(held, committed), f"sequence {sequence_id}: rows of {window} are not its own"
        if not self._num_recent:
            return True
        if known.taps is None or len(held) < min(self._num_recent, end):
            return False
        recent = held[-self._num_recent :]
        return torch.allclose(recent, known.taps[end - len(recent) : end], rtol=1e-3, atol=1e-3)

    def _window(self, sequence_id: int) -> Tensor:
        """[end - start, taps, hidden] read back from the pages."""
        window, page_size = self.contexts.window(sequence_id), self.contexts.page_size
        if window.start == window.end:
            return torch.zeros(0)
        assert self._memory is not None
        offset = window.start // page_size * page_size
        pages = self._memory.unflatten(0, (-1, page_size))[window.pages].flatten(0, 1)
        return pages[window.start - offset : window.end - offset]


def _key(prompt_ids: Sequence[int], params: SamplingParams) -> bytes:
    return msgspec.msgpack.encode((list(prompt_ids), params))


def _other(token_id: int) -> int:
    return token_id - 1 if token_id else 1
