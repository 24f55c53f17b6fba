"""Penalties, bias and masks equal a plain loop over tokens, on the whole vocabulary and on its shards."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.messages import SamplingParams
from paceline.kernels import penalties
from paceline.kernels.penalties import RowContext

VOCAB = 24
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=12)


def by_definition(
    logits: list[float], params: SamplingParams, history: list[int], prompt_len: int
) -> list[float]:
    output = history[prompt_len:]
    result = []
    for token, value in enumerate(logits):
        if token in history:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * output.count(token)
        value -= params.presence_penalty * (token in output)
        value += params.logit_bias.get(token, 0.0)
        is_masked = params.allowed_token_ids is not None and token not in params.allowed_token_ids
        is_masked |= len(output) < params.min_tokens and token in params.stop_token_ids
        for word in params.bad_words:
            before = word[:-1]
            is_masked |= token == word[-1] and history[len(history) - len(before) :] == before
        result.append(-math.inf if is_masked else value)
    return result


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(9),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 3.5]), max_size=3),
    bad_words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=3),
    allowed_token_ids=st.none() | st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=2),
    min_tokens=st.integers(0, 6),
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(PARAMS, TOKENS | st.lists(st.integers(0, 3), max_size=9), TOKENS), min_size=1, max_size=4
    )
)
def test_equals_the_definition_whole_and_in_shards(
    rows: list[tuple[SamplingParams, list[int], list[int]]],
) -> None:
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    contexts = [
        RowContext(params, np.array(prompt + output, dtype=np.int32), len(prompt))
        for params, prompt, output in rows
    ]
    expected = torch.tensor(
        [
            by_definition(row, params, prompt + output, len(prompt))
            for row, (params, prompt, output) in zip(logits.tolist(), rows, strict=True)
        ]
    )
    whole = logits.clone()
    penalties.apply(whole, contexts)
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-5)
    shards = [part.contiguous() for part in logits.split(8, dim=1)]
    for shard, part in enumerate(shards):
        penalties.apply(part, contexts, first_id=shard * 8)
    assert torch.equal(torch.cat(shards, dim=1), whole)


def test_rows_of_a_block_see_the_drafts_before_them() -> None:
    params = SamplingParams(max_tokens=9, presence_penalty=1.0)
    tokens = np.array([5, 6, 1, 2, 3], dtype=np.int32)  # prompt 5 6, anchor 1, drafts 2 3
    logits = torch.zeros(3, VOCAB)
    penalties.apply(logits, [RowContext(params, tokens[:length], 2) for length in (3, 4, 5)])
    assert [row.nonzero().view(-1).tolist() for row in logits] == [[1], [1, 2], [1, 2, 3]]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=1, min_tokens=3),
        SamplingParams(max_tokens=1, stop_token_ids=[1]),
    ],
)
def test_a_plain_row_is_not_looked_at(params: SamplingParams) -> None:
    assert not penalties.has_penalty(params)
    logits = torch.randn(1, VOCAB)
    before = logits.clone()
    penalties.apply(logits, [RowContext(params, np.array([1, 2]), 1)])
    assert torch.equal(logits, before)
