"""Drafts are drawn as the target would draw them."""

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.cluster.messages import Open, SamplingParams
from paceline.drafter.dflash2 import Selector
from paceline.drafter.drawing import draw_drafts
from paceline.drafter.history import History
from paceline.kernels import filters, noise, penalties, sampling

VOCAB, MASK, NUM_DRAFTS = 300, 299, 4
NO_STATES = torch.zeros(0)


def history(params: SamplingParams, tokens: list[int] | None = None) -> History:
    tokens = tokens or [5, 6, 7]
    return History(Open(1, tokens, 2, params))


def sampled(**changes: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 99, "temperature": 0.9, "seed": 12} | changes))  # pyright: ignore


def target_draw(logits: Tensor, params: SamplingParams, position: int) -> int:
    """The token the target's sampler decides for one row without penalties."""
    row = logits[None].clone()
    filters.apply(row, [params])
    temperature = torch.tensor([params.temperature])
    seeds, positions = noise.pack_seeds([params.seed]), torch.tensor([position])
    return int(sampling.draw(row, temperature, seeds, positions)[1])


@pytest.mark.parametrize(
    "params", [sampled(), sampled(temperature=0.0), sampled(top_k=5), sampled(top_p=0.6), sampled(min_p=0.2)]
)
def test_equal_logits_give_the_targets_own_tokens(params: SamplingParams) -> None:
    """At every position of the block: the draft of slot j is the token at anchor + 1 + j."""
    logits = 2 * torch.randn(2 * NUM_DRAFTS, VOCAB)
    histories = [history(params), history(sampled(seed=99), [1] * 40)]
    ids, confidences, is_finite = draw_drafts(logits.clone(), NO_STATES, histories, MASK, None)

    for slot in range(NUM_DRAFTS):
        assert int(ids[0, slot]) == target_draw(logits[slot], params, 3 + slot)
        assert int(ids[1, slot]) == target_draw(logits[NUM_DRAFTS + slot], histories[1].params, 40 + slot)
    assert is_finite.tolist() == [True, True]
    assert bool(((confidences > 0) & (confidences <= 1.0001)).all())


def test_the_confidence_is_the_probability_of_the_draft() -> None:
    logits = torch.randn(NUM_DRAFTS, VOCAB)
    for params, scaled in ((sampled(temperature=0.0), logits), (sampled(temperature=0.5), logits / 0.5)):
        ids, confidences, _ = draw_drafts(logits.clone(), NO_STATES, [history(params)], MASK, None)
        expected = scaled.softmax(1).gather(1, ids.T).squeeze(1)
        assert torch.allclose(confidences[0], expected, atol=1e-6)


def test_what_is_known_at_draft_time_is_applied() -> None:
    """Allowed ids and bias in every slot, a bad word whose beginning is already there in the first."""
    logits = torch.zeros(NUM_DRAFTS, VOCAB)
    logits[:, 30], logits[:, 31], logits[:, 32], logits[:, 33] = 9, 8, 7, 6
    greedy = {"max_tokens": 9, "temperature": 0.0}
    cases = {
        30: SamplingParams(**greedy),
        32: SamplingParams(**greedy, allowed_token_ids=[32, 33]),
        33: SamplingParams(**greedy, logit_bias={33: 20.0}),
        31: SamplingParams(**greedy, bad_words=[[30]]),
    }
    for expected, params in cases.items():
        ids, _, _ = draw_drafts(logits.clone(), NO_STATES, [history(params)], MASK, None)
        assert ids[0].tolist() == [expected] * NUM_DRAFTS

    words = SamplingParams(**greedy, bad_words=[[6, 7, 30]])
    ids, _, _ = draw_drafts(logits.clone(), NO_STATES, [history(words)], MASK, None)
    assert ids[0].tolist() == [31, 30, 30, 30]


def test_a_minimum_length_counts_the_drafts_before() -> None:
    logits = torch.zeros(NUM_DRAFTS, VOCAB)
    logits[:, 2], logits[:, 30] = 9, 8
    params = SamplingParams(max_tokens=9, temperature=0.0, min_tokens=3, stop_token_ids=[2])
    ids, _, _ = draw_drafts(logits, NO_STATES, [history(params)], MASK, None)  # one of three is out

    assert ids[0].tolist() == [30, 30, 2, 2]


def test_penalties_are_those_of_the_target_for_the_first_draft() -> None:
    params = sampled(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.3)
    logits = torch.randn(NUM_DRAFTS, VOCAB)
    logits[:, [5, 6, 7]] += 4
    expected = logits[:1].clone()
    penalties.apply(expected, [penalties.RowContext(params, np.array([5, 6, 7]), 2)])
    ids, _, _ = draw_drafts(logits, NO_STATES, [history(params)], MASK, None)

    assert int(ids[0, 0]) == int(expected.argmax())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_block_that_is_not_finite_is_named_and_harms_no_other(value: float) -> None:
    logits = torch.randn(2 * NUM_DRAFTS, VOCAB)
    clean, _, _ = draw_drafts(logits.clone(), NO_STATES, [history(sampled())] * 2, MASK, None)
    logits[2, 7 if value > 0 or value != value else slice(None)] = value
    ids, confidences, is_finite = draw_drafts(logits, NO_STATES, [history(sampled())] * 2, MASK, None)

    assert is_finite.tolist() == [False, True]
    assert ids[1].tolist() == clean[1].tolist()
    assert bool(confidences.isfinite().all())


def test_the_selector_draws_among_its_candidates_with_the_same_noise() -> None:
    """Of two candidates the next slot prefers the successor of what was drawn."""
    torch.manual_seed(0)
    rank, hidden = 4, 8
    selector = Selector(torch.randn(VOCAB, rank), torch.randn(VOCAB, rank), lambda x: x[:, :rank], 6)
    states, logits = torch.randn(NUM_DRAFTS, hidden), torch.randn(NUM_DRAFTS, VOCAB)
    params = sampled(temperature=0.8)
    ids, confidences, _ = draw_drafts(logits.clone(), states, [history(params)], MASK, selector)

    before = 7
    for slot in range(NUM_DRAFTS):
        unary, candidates = logits[slot].topk(6)
        scores = unary + selector.successor[candidates] @ (selector.predecessor[before] * states[slot, :rank])
        keyed = scores / 0.8 + noise.gumbel(
            noise.pack_seeds([params.seed]), torch.tensor([3 + slot]), candidates
        )
        choice = int(keyed.argmax())
        before = int(candidates[choice])
        assert int(ids[0, slot]) == before
        assert abs(float(confidences[0, slot]) - float((scores / 0.8).softmax(-1)[choice])) < 1e-5
