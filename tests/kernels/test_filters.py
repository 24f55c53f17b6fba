"""Top-k, top-p and min-p keep exactly the tokens that their definition names."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.messages import SamplingParams
from paceline.kernels import filters


def kept_by_definition(logits: list[float], params: SamplingParams) -> set[int]:
    """The filters over a sorted list, one after another, in exact order."""
    scaled = (torch.tensor(logits) / params.temperature).tolist()
    ranked = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    largest = scaled[ranked[0]]
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    if params.top_p < 1:
        weights = [math.exp(scaled[i] - largest) for i in ranked]
        total, mass, num_kept = math.fsum(weights), 0.0, 0
        while num_kept == 0 or mass / total < params.top_p:
            mass += weights[num_kept]
            num_kept += 1
        ranked = ranked[:num_kept]
    if params.min_p > 0:
        floor = torch.tensor(largest) + torch.tensor(math.log(params.min_p))
        ranked = [i for i in ranked if scaled[i] >= floor]
    return {i for i in ranked if scaled[i] > -math.inf}


def kept(logits: torch.Tensor) -> list[set[int]]:
    return [set((row > -math.inf).nonzero().view(-1).tolist()) for row in logits]


ROWS = st.lists(
    st.tuples(
        st.lists(st.integers(-8, 8).map(lambda n: n / 2), min_size=12, max_size=12),  # few values: many ties
        st.builds(
            SamplingParams,
            max_tokens=st.just(1),
            temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
            top_k=st.sampled_from([0, 1, 3, 11, 12, 500]),
            top_p=st.sampled_from([1.0, 0.999, 0.77, 0.31, 1e-6]),
            min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
        ),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=150, deadline=None)
@given(ROWS)
def test_keeps_what_the_definition_keeps(rows: list[tuple[list[float], SamplingParams]]) -> None:
    logits = torch.tensor([row for row, _ in rows])
    before = logits.clone()
    filters.apply(logits, [params for _, params in rows])
    for row, (values, params) in enumerate(rows):
        if filters.has_filter(params):
            assert kept(logits[row : row + 1])[0] == kept_by_definition(values, params)
        else:
            assert torch.equal(logits[row], before[row])
    is_kept = logits > -math.inf
    assert torch.equal(logits[is_kept], before[is_kept])


def test_sets_larger_than_the_first_prefix_are_exact() -> None:
    """Flat rows make top-p look at ever more of the vocabulary; every row stops where it should."""
    logits = torch.randn(4, 9000, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[0.1], [1], [4], [0]]
    )
    wanted = [
        SamplingParams(max_tokens=1, top_p=0.9),
        SamplingParams(max_tokens=1, top_p=0.5),
        SamplingParams(max_tokens=1, top_p=0.9, top_k=3000),
        SamplingParams(max_tokens=1, top_p=0.25),
    ]
    rows = logits.tolist()
    filters.apply(logits, wanted)
    for actual, row, params in zip(kept(logits), rows, wanted, strict=True):
        expected = kept_by_definition(row, params)
        # The mass is summed in another order: where it meets p to the last bit, a token either way is right.
        assert len(actual ^ expected) <= 1
        assert len(actual) > 200 or params.top_k


def test_masked_tokens_stay_masked() -> None:
    logits = torch.full((2, 20), -math.inf)
    logits[:, [3, 7]] = torch.tensor([1.0, 2.0])
    filters.apply(
        logits, [SamplingParams(max_tokens=1, top_k=5), SamplingParams(max_tokens=1, top_p=0.99999)]
    )
    assert kept(logits) == [{3, 7}, {3, 7}]
