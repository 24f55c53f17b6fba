"""The windows of a shard: what they hold after any history, and which messages are refused."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.cluster.errors import ProtocolError
from paceline.cluster.messages import Commit, Open, Propose, SamplingParams, Slide
from paceline.drafter.context import Contexts
from paceline.kernels.rows import Rows

PAGE = 4
PARAMS = SamplingParams(max_tokens=9)
CPU = torch.device("cpu")


def opened(sequence_id: int, start: int = 0, end: int = 0, pages: list[int] | None = None) -> Open:
    return Open(sequence_id, [1] * end, end, PARAMS, start, end, pages or [])


def holding(end: int, start: int = 0, num_pages: int = 16) -> Contexts:
    """Sequence 0 with the context [start, end) in pages 0, 1, .."""
    contexts = Contexts(num_pages, PAGE)
    contexts.open(opened(0, start, start))
    contexts.commit(Commit(0, 1, 0, end - start, start, list(range(-(-end // PAGE) - start // PAGE))))
    return contexts


class Histories(RuleBasedStateMachine):
    """Random lives of sequences beside a model that writes (sequence, position) into every slot.

    The model is what a reader of the memory would find: a position read through a window must be the one
    its own commit wrote there.
    """

    @initialize()
    def start(self) -> None:
        self.contexts = Contexts(24, PAGE)
        self.memory: dict[int, tuple[int, int]] = {}
        self.free = list(range(24))
        self.windows: dict[int, tuple[int, int]] = {}
        self.num_opened = 0

    def take(self, num: int) -> list[int]:
        return [self.free.pop(0) for _ in range(num)]

    def needed(self, start: int, end: int) -> int:
        return 0 if start == end else -(-end // PAGE) - start // PAGE

    @precondition(lambda self: len(self.windows) < 4)
    @rule(end=st.integers(0, 30))
    def open(self, end: int) -> None:
        self.num_opened += 1
        self.contexts.open(opened(self.num_opened, end, end))
        self.windows[self.num_opened] = (end, end)

    @precondition(lambda self: self.windows)
    @rule(data=st.data(), num_rows=st.integers(1, 11), gap=st.sampled_from([0, 0, 0, 1, 3, 9]))
    def commit(self, data: st.DataObject, num_rows: int, gap: int) -> None:
        sequence_id = data.draw(st.sampled_from(sorted(self.windows)))
        start, end = self.windows[sequence_id]
        old_pages = list(self.contexts.window(sequence_id).pages)
        if gap:
            start = end = end + gap
        num_new = self.needed(start, end + num_rows) - (0 if gap else len(old_pages))
        if num_new > len(self.free):
            return
        pages = self.take(num_new)
        slots = self.contexts.commit(Commit(sequence_id, 1, 0, num_rows, end, pages, gap > 0))
        if gap:
            self.free += old_pages
        for position, slot in zip(range(end, end + num_rows), slots.tolist(), strict=True):
            self.memory[slot] = (sequence_id, position)
        self.windows[sequence_id] = (start, end + num_rows)

    @precondition(lambda self: self.windows)
    @rule(data=st.data())
    def slide(self, data: st.DataObject) -> None:
        sequence_id = data.draw(st.sampled_from(sorted(self.windows)))
        start, end = self.windows[sequence_id]
        places = [p for p in range(start, end + 1) if p % PAGE == 0]
        if not places:
            return
        new_start = data.draw(st.sampled_from(places))
        before = list(self.contexts.window(sequence_id).pages)
        self.contexts.slide(Slide(sequence_id, new_start))
        self.free += before[: len(before) - len(self.contexts.window(sequence_id).pages)]
        self.windows[sequence_id] = (new_start, end)

    @precondition(lambda self: self.windows)
    @rule(data=st.data(), is_twice=st.booleans())
    def free_sequence(self, data: st.DataObject, is_twice: bool) -> None:
        sequence_id = data.draw(st.sampled_from(sorted(self.windows)))
        self.free += self.contexts.window(sequence_id).pages
        for _ in range(1 + is_twice):
            self.contexts.free(sequence_id)
        del self.windows[sequence_id]

    @precondition(lambda self: self.windows)
    @rule(block_len=st.integers(2, 9))
    def propose(self, block_len: int) -> None:
        proposals, free = [], list(self.free)
        for sequence_id, (start, end) in self.windows.items():
            num = -(-(end + block_len) // PAGE) - start // PAGE - len(self.contexts.window(sequence_id).pages)
            if num > len(free):
                return
            proposals.append(Propose(sequence_id, [1], [free.pop(0) for _ in range(num)]))
        rows = self.contexts.block_rows(proposals, block_len, CPU)
        slots = rows.slots.tolist()
        for row, sequence_id in enumerate(self.windows):
            self.read(rows, row, sequence_id)
            for slot in slots[row * block_len : (row + 1) * block_len]:
                assert self.memory.get(slot) not in self.held()
                self.memory[slot] = (-1, -1)

    def held(self) -> set[tuple[int, int]]:
        return {(s, p) for s, (start, end) in self.windows.items() for p in range(start, end)}

    def read(self, rows: Rows, row: int, sequence_id: int) -> None:
        """The keys a block sees through its page table are exactly the window's positions, then its own."""
        start, end = self.windows[sequence_id]
        assert rows.hidden_lens is not None
        first, last = rows.hidden_lens[row], rows.context_lens[row] - rows.query_lens[row]
        table = rows.page_tables[row].tolist()
        seen = [self.memory.get(table[key // PAGE] * PAGE + key % PAGE) for key in range(first, last)]
        assert seen == [(sequence_id, position) for position in range(start, end)]
        length = rows.query_lens[row]
        positions = rows.positions.view(-1, length)[row].tolist()
        assert positions == list(range(end, end + length))
        own = [table[key // PAGE] * PAGE + key % PAGE for key in range(last, last + length)]
        assert rows.slots.view(-1, length)[row].tolist() == own

    @invariant()
    def holds(self) -> None:
        self.contexts.check()
        for sequence_id, (start, end) in self.windows.items():
            window = self.contexts.window(sequence_id)
            assert (window.start, window.end) == (start, end)
        held = [page for s in self.windows for page in self.contexts.window(s).pages]
        assert sorted(held + self.free) == list(range(24))


Histories.TestCase.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
TestHistories = Histories.TestCase


def test_a_commit_off_by_one_is_refused() -> None:
    contexts = holding(6)
    for wrong in (5, 7):
        with pytest.raises(ProtocolError, match="ends at 6"):
            contexts.commit(Commit(0, 1, 0, 1, wrong, []))


def test_a_commit_that_comes_twice_is_refused() -> None:
    contexts = holding(6)
    contexts.commit(Commit(0, 2, 0, 2, 6, []))
    with pytest.raises(ProtocolError, match="ends at 8"):
        contexts.commit(Commit(0, 2, 0, 2, 6, []))


def test_a_restart_only_goes_on() -> None:
    contexts = holding(6)
    with pytest.raises(ProtocolError, match="not beyond"):
        contexts.commit(Commit(0, 1, 0, 2, 6, [3], is_restart=True))
    contexts.commit(Commit(0, 1, 0, 2, 9, [3], is_restart=True))

    assert contexts.window(0).pages == [3]
    contexts.check()


@pytest.mark.parametrize("pages", [[], [9, 10], [1], [99], [-1]])
def test_pages_must_be_those_the_window_lacks(pages: list[int]) -> None:
    with pytest.raises(ProtocolError):
        holding(8).commit(Commit(0, 1, 0, 3, 8, pages))


@pytest.mark.parametrize("new_start", [3, 12, -4])
def test_a_slide_is_by_whole_pages_within_the_window(new_start: int) -> None:
    with pytest.raises(ProtocolError, match="slide"):
        holding(10).slide(Slide(0, new_start))


def test_a_slide_never_goes_back() -> None:
    contexts = holding(10)
    contexts.slide(Slide(0, 8))
    with pytest.raises(ProtocolError, match="slide"):
        contexts.slide(Slide(0, 4))


def test_full_pages_are_shared_and_the_last_one_is_not_written() -> None:
    contexts = holding(8)
    contexts.open(opened(1, 0, 8, [0, 1]))
    contexts.commit(Commit(1, 1, 0, 2, 8, [5]))
    contexts.check()
    contexts.slide(Slide(0, 4))  # the other keeps page 0

    assert contexts.window(1).pages == [0, 1, 5]
    contexts.check()


def test_a_shared_page_that_is_not_full_may_not_be_written() -> None:
    contexts = holding(6)
    contexts.open(opened(1, 0, 6, [0, 1]))
    with pytest.raises(AssertionError, match="shares the page"):
        contexts.check()
    with pytest.raises(ProtocolError, match="shares"):
        contexts.commit(Commit(1, 1, 0, 1, 6, []))
    with pytest.raises(ProtocolError, match="shares"):
        contexts.block_rows([Propose(1, [1], [9, 10])], 4, CPU)


def test_lookahead_pages_are_private() -> None:
    contexts = holding(8)
    contexts.open(opened(1))
    with pytest.raises(ProtocolError, match="hold context"):
        contexts.block_rows([Propose(0, [1], [1])], 4, CPU)
    with pytest.raises(ProtocolError, match="same lookahead"):
        contexts.block_rows([Propose(0, [1], [7]), Propose(1, [1], [7])], 4, CPU)
    with pytest.raises(ProtocolError, match="lookahead"):
        contexts.block_rows([Propose(0, [1], [])], 4, CPU)


def test_strangers_are_refused_but_may_be_freed() -> None:
    contexts = holding(8)
    contexts.free(7)
    for late in (lambda: contexts.commit(Commit(7, 1, 0, 1, 0, [9])), lambda: contexts.slide(Slide(7, 0))):
        with pytest.raises(ProtocolError, match="not on this shard"):
            late()
    with pytest.raises(ProtocolError, match="opened twice"):
        contexts.open(opened(0))
    with pytest.raises(ProtocolError, match="cannot hold"):
        contexts.open(opened(1, 0, 9, [9, 10]))
