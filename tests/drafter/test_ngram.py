"""Prompt lookup: what it copies, how sure it is, and what it costs."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.errors import ProtocolError
from paceline.cluster.messages import Commit, Open, Propose, SamplingParams, Slide
from paceline.drafter.ngram import MAX_MATCH_LEN, MIN_MATCH_LEN, NgramIndex, NgramProposer

PARAMS = SamplingParams(max_tokens=99)


def draft(prompt: list[int], new_tokens: list[int], num: int, params: SamplingParams = PARAMS) -> list[int]:
    proposer = NgramProposer()
    proposer.open(Open(1, prompt, len(prompt), params))
    return proposer.propose([Propose(1, new_tokens, [])], num)[0].token_ids


def test_it_copies_what_followed_the_same_tokens() -> None:
    assert draft([1, 2, 3, 4, 5, 6, 9, 1, 2], [3], 3) == [4, 5, 6]


def test_the_longest_match_wins_over_a_later_one() -> None:
    assert draft([7, 1, 2, 3, 40, 8, 2, 3, 50, 7, 1, 2], [3], 1) == [40]


def test_of_equal_matches_the_latest_wins() -> None:
    assert draft([1, 2, 30, 1, 2, 40, 1], [2], 1) == [40]


def test_a_single_token_is_no_match() -> None:
    assert draft([1, 2, 3, 9], [2], 4) == []


def test_a_repetition_goes_on_with_itself() -> None:
    assert draft([5, 1, 2, 3, 1, 2], [3], 7) == [1, 2, 3, 1, 2, 3, 1]


def test_a_longer_match_is_surer_and_so_is_every_further_slot() -> None:
    proposer = NgramProposer()
    proposer.open(Open(1, [1, 2, 3, 4, 5, 6, 7, 1, 2], 9, PARAMS))
    (short,) = proposer.propose([Propose(1, [3], [])], 2)
    (longer,) = proposer.propose([Propose(1, [4], [])], 2)

    assert short.confidences[0] < short.confidences[1] == longer.confidences[0] < longer.confidences[1] < 1


def test_drafts_stop_before_a_token_that_may_not_come() -> None:
    params = SamplingParams(max_tokens=9, allowed_token_ids=[3, 4, 6])

    assert draft([1, 2, 3, 4, 5, 6, 1], [2], 4, params) == [3, 4]


def test_short_and_empty_histories_draft_nothing() -> None:
    assert draft([], [1], 3) == []
    assert draft([1], [1], 3) == []


def test_what_it_does_not_take() -> None:
    proposer = NgramProposer()
    proposer.free(3)
    with pytest.raises(ProtocolError):
        proposer.propose([Propose(3, [1], [])], 1)
    with pytest.raises(ProtocolError):
        proposer.slide(Slide(3, 16))
    with pytest.raises(ProtocolError):
        proposer.commit([Commit(3, 1, 0, 1, 0, [])], torch.zeros(1, 1, 1))
    proposer.open(Open(3, [1], 1, PARAMS))
    with pytest.raises(ProtocolError):
        proposer.open(Open(3, [1], 1, PARAMS))


def longest_match(tokens: list[int]) -> tuple[int, int]:
    """Every earlier place compared: the latest of the longest."""
    best = (-1, 0)
    for place in range(len(tokens) - 1):
        length = 0
        while length < min(MAX_MATCH_LEN, place + 1) and tokens[place - length] == tokens[-1 - length]:
            length += 1
        if length >= max(best[1], MIN_MATCH_LEN):
            best = (place, length)
    return best


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=10))
@settings(deadline=None)
def test_the_index_finds_what_a_full_search_finds(tokens: list[int], more: list[int]) -> None:
    index = NgramIndex(tokens, PARAMS)
    index.extend(more)

    assert index.match() == longest_match(tokens + more)


def test_a_step_costs_the_same_however_long_the_sequence_is() -> None:
    """Fastest of many, interleaved: 32,000 tokens against 1,000."""
    indices = {length: NgramIndex([i * i % 997 for i in range(length)], PARAMS) for length in (1000, 32000)}
    best = dict.fromkeys(indices, float("inf"))
    for token_id in range(300):
        for length, index in indices.items():
            began = time.perf_counter()
            index.extend([token_id])
            index.match()
            best[length] = min(best[length], time.perf_counter() - began)

    assert best[32000] < 10 * best[1000]
