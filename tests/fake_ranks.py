"""A rank that computes nothing but remembers everything, for tests of the scheduler.

It knows only what the messages told it. Its K/V memory holds, for each slot, whose it is, at which position,
and of which token; a decided token is a hash of what is read back through the page table. So a wrong page, a
lost row or a stale sequence changes tokens or fails an assertion.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.cluster.messages import (
    Admit,
    Chunk,
    Decision,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

VOCAB_SIZE = 40


def next_token(token_ids: Sequence[int], seed: int) -> int:
    """The token that follows: any function of all tokens before it will do."""
    return zlib.crc32(repr((seed, list(token_ids))).encode()) % VOCAB_SIZE


def undisturbed(prompt_ids: Sequence[int], params: SamplingParams) -> tuple[list[int], str]:
    """The output of a request that runs alone and is never interrupted, and why it ends."""
    tokens = list(prompt_ids)
    while len(tokens) - len(prompt_ids) < params.max_tokens:
        tokens.append(next_token(tokens, params.seed))
        if tokens[-1] in params.stop_token_ids:
            return tokens[len(prompt_ids) :], "stop"
    return tokens[len(prompt_ids) :], "length"


def fingerprints(token_ids: Sequence[int]) -> list[int]:
    """What K/V at each position stand for: all tokens up to it."""
    marks: list[int] = []
    for token_id in token_ids:
        marks.append(zlib.crc32(token_id.to_bytes(8, "little"), marks[-1] if marks else 0))
    return marks


@dataclass
class Resident:
    """What a rank holds for one sequence."""

    tokens: list[int]
    params: SamplingParams
    pages: list[int] = field(default_factory=list)
    next_start: int | None = None  # where its next chunk begins; before the first the prefix cache decides


@dataclass
class Tap:
    """One row of the tap scratch."""

    sequence_id: int
    position: int
    fingerprint: int


class FakeRanks:
    """Answers plans; asserts that each of them is legal. `taps` are the rows of the last step."""

    def __init__(
        self, num_pages: int, page_size: int, *, is_finite: Callable[[Resident], bool] = lambda _: True
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.sequences: dict[int, Resident] = {}
        self.memory: dict[int, tuple[int, int]] = {}  # slot -> token, fingerprint of all tokens up to it
        self.last_step = 0
        self.taps: list[Tap] = []
        self._seen: set[int] = set()
        self._is_finite = is_finite

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.step == self.last_step + 1, f"step {plan.step} after {self.last_step}"
        self.last_step = plan.step
        self.taps = []
        for sequence_id in plan.release:
            del self.sequences[sequence_id]
        for admit in plan.admit:
            self._admit(admit)
        assert len({chunk.sequence_id for chunk in plan.chunks}) == len(plan.chunks)
        assert {admit.sequence_id for admit in plan.admit} <= {chunk.sequence_id for chunk in plan.chunks}
        for chunk in plan.chunks:  # all rows are written before any is read, as in a real step
            self._write(chunk)
        decisions = [self._decide(chunk) for chunk in plan.chunks if chunk.num_decided]
        return StepResult(step=plan.step, decisions=decisions, compute_s=0.001)

    def _admit(self, admit: Admit) -> None:
        assert admit.sequence_id not in self._seen, f"sequence {admit.sequence_id} was here before"
        assert 0 < admit.prompt_len <= len(admit.token_ids)
        self._seen.add(admit.sequence_id)
        self.sequences[admit.sequence_id] = Resident(list(admit.token_ids), admit.params)

    def _write(self, chunk: Chunk) -> None:
        sequence = self.sequences[chunk.sequence_id]
        end = chunk.start + chunk.num_rows
        assert chunk.num_rows >= 1
        assert len(chunk.tail) <= chunk.num_rows
        if chunk.tail:
            assert end - len(chunk.tail) <= len(sequence.tokens), "a gap in the tokens"
            sequence.tokens[end - len(chunk.tail) :] = chunk.tail
        sequence.pages.extend(chunk.new_pages)
        marks = fingerprints(sequence.tokens)
        if sequence.next_start is None:
            assert chunk.start % self.page_size == 0, "part of a page was found in the prefix cache"
            for position in range(chunk.start):
                _, mark = self.memory[self._slot(sequence, position)]
                assert mark == marks[position], f"position {position} of another prefix in the cache"
        else:
            assert chunk.start == sequence.next_start, f"rows from {chunk.start}, not {sequence.next_start}"
        assert end <= len(sequence.tokens), f"rows to {end}, tokens known to {len(sequence.tokens)}"
        assert (chunk.num_decided > 0) == (end == len(sequence.tokens)), "the last known tokens decide"
        assert chunk.num_decided <= 1 + len(chunk.tail)
        assert len(sequence.pages) * self.page_size >= end, "rows without a page"
        for position in range(chunk.start, end):
            slot = self._slot(sequence, position)
            for other in self.sequences.values():
                is_private = other is sequence or slot // self.page_size not in other.pages
                assert is_private, f"sequence {chunk.sequence_id} writes to a shared page"
            self.memory[slot] = (sequence.tokens[position], marks[position])
            self.taps.append(Tap(chunk.sequence_id, position, marks[position]))
        sequence.next_start = end

    def _decide(self, chunk: Chunk) -> Decision:
        sequence = self.sequences[chunk.sequence_id]
        end = chunk.start + chunk.num_rows
        marks = fingerprints(sequence.tokens)
        read: list[int] = []
        decided: list[int] = []
        for position in range(end):
            token, mark = self.memory[self._slot(sequence, position)]
            assert mark == marks[position], (
                f"sequence {chunk.sequence_id} reads position {position} and finds another prefix"
            )
            read.append(token)
            if position >= end - chunk.num_decided:
                decided.append(next_token(read, sequence.params.seed))
        drafts = sequence.tokens[end - chunk.num_decided + 1 : end]
        num_standing = 0
        while num_standing < len(drafts) and drafts[num_standing] == decided[num_standing]:
            num_standing += 1
        sequence.next_start = end - len(drafts) + num_standing
        logprobs = None
        if sequence.params.logprobs is not None:
            logprobs = [TokenLogprobs(-float(token), [(token, -float(token))]) for token in decided]
        return Decision(chunk.sequence_id, decided, self._is_finite(sequence), logprobs)

    def _slot(self, sequence: Resident, position: int) -> int:
        page = sequence.pages[position // self.page_size]
        assert 0 <= page < self.num_pages
        return page * self.page_size + position % self.page_size
