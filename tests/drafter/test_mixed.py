"""A network and prompt lookup for the same sequences: who drafts, and who runs at all."""

from pathlib import Path

import pytest
import torch
from tiny_drafter import HIDDEN_SIZE, config_of, make_drafter, make_target

from paceline.cluster.messages import Commit, Draft, Open, Propose, SamplingParams
from paceline.drafter.dflash_proposer import DFlashProposer
from paceline.drafter.mixed import Calibration, MixedProposer, expected_tokens

PAGE = 16
GREEDY = SamplingParams(max_tokens=99, temperature=0.0)
REPETITION = [1, 2, 3, 4] * 4
NOVELTY = list(range(20, 36))


class Pair:
    """A mixed proposer and its network alone, fed with the same sequence."""

    def __init__(self, path: Path, block_size: int | None = None) -> None:
        drafter, target = make_drafter(path, config_of()), make_target()
        self.alone, network = (
            DFlashProposer.load(
                drafter,
                target,
                context_bytes=1 << 20,
                page_size=PAGE,
                block_size=block_size,
                dtype=torch.float32,
            )
            for _ in range(2)
        )
        self.network = network
        self.mixed = MixedProposer(network)
        self.taps = torch.randn(64, 3, HIDDEN_SIZE, generator=torch.Generator().manual_seed(3))
        self.end = 0
        self.num_forwards = 0
        forward = network.network.forward

        def counted(*args: object) -> torch.Tensor:
            self.num_forwards += 1
            return forward(*args)  # type: ignore[arg-type]

        network.network.forward = counted  # type: ignore[method-assign]

    def open(self, prompt: list[int]) -> None:
        """All but the last token of the prompt, which is the first anchor, are computed."""
        for proposer in (self.alone, self.mixed):
            proposer.open(Open(1, prompt[:-1], len(prompt) - 1, GREEDY))
        self._commit(len(prompt) - 1)

    def propose(self, new_tokens: list[int]) -> tuple[Draft, Draft]:
        """(mixed, network alone) behind the last of the new tokens."""
        proposals = [Propose(1, new_tokens, [8, 9])]
        num_alone = min(4, self.alone.max_drafts)
        return self.mixed.propose(proposals, 4)[0], self.alone.propose(proposals, num_alone)[0]

    def emit(self, tokens: list[int]) -> tuple[Draft, Draft]:
        self._commit(len(tokens))
        return self.propose(tokens)

    def _commit(self, num_rows: int) -> None:
        pages = list(range(-(-self.end // PAGE), -(-(self.end + num_rows) // PAGE)))
        for proposer in (self.alone, self.mixed):
            proposer.commit([Commit(1, 1, 0, num_rows, self.end, pages)], self.taps)
        self.end += num_rows


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_without_a_match_the_network_drafts(pair: Pair) -> None:
    pair.open(NOVELTY)
    mixed, alone = pair.propose(NOVELTY[-1:])

    assert mixed.token_ids == alone.token_ids
    assert pair.num_forwards == 1


def test_a_long_match_of_an_unsure_network_is_copied(pair: Pair) -> None:
    pair.open(REPETITION)
    mixed, alone = pair.propose(REPETITION[-1:])

    assert expected_tokens(alone.confidences) < expected_tokens([0.8] * 4), "a random network is not sure"
    assert mixed.token_ids == [1, 2, 3, 4]


def test_a_match_may_be_longer_than_the_blocks_of_the_network(tmp_path: Path) -> None:
    pair = Pair(tmp_path, block_size=3)
    assert pair.network.max_drafts == 2
    assert pair.mixed.max_drafts > 4
    pair.open(NOVELTY)
    mixed, alone = pair.propose(NOVELTY[-1:])
    assert mixed.token_ids == alone.token_ids
    assert len(alone.token_ids) == 2

    pair.mixed.free(1)
    pair.alone.free(1)
    pair.end = 0
    pair.open(REPETITION)
    assert pair.propose(REPETITION[-1:])[0].token_ids == [1, 2, 3, 4]


def test_a_network_that_promised_less_is_not_run_again(pair: Pair) -> None:
    pair.open(REPETITION)
    pair.propose(REPETITION[-1:])
    mixed, _ = pair.emit([1])

    assert mixed.token_ids == [2, 3, 4, 1]
    assert pair.num_forwards == 1


def test_contexts_and_histories_follow_also_where_the_network_did_not_run(pair: Pair) -> None:
    pair.open(REPETITION)
    pair.propose(REPETITION[-1:])
    pair.emit([1])
    mixed, alone = pair.emit([77])  # no pair of tokens has ended in this one before

    assert mixed.token_ids == alone.token_ids
    assert pair.num_forwards == 2
    pair.mixed.check()


def test_a_lookup_that_keeps_failing_loses_to_the_network(pair: Pair) -> None:
    pair.open(REPETITION)
    pair.propose(REPETITION[-1:])
    for _ in range(40):  # "1 2" is never followed by 3 again
        pair.mixed._of_lookup.learn(Draft(1, [3], [0.57]), [5])
        pair.mixed._of_lookup.learn(Draft(1, [3], [0.84]), [5])
    mixed, alone = pair.emit([1])

    assert mixed.token_ids == alone.token_ids


def test_a_draft_that_is_not_finite_is_told(pair: Pair) -> None:
    pair.taps.fill_(float("nan"))
    pair.open(REPETITION)

    assert pair.propose(REPETITION[-1:])[0].outcome == "not_finite"


def test_a_freed_sequence_is_forgotten(pair: Pair) -> None:
    pair.open(NOVELTY)
    pair.mixed.free(1)
    pair.mixed.open(Open(1, NOVELTY, len(NOVELTY), GREEDY))


def test_chances_are_learned_up_to_the_first_wrong_token() -> None:
    calibration = Calibration()
    draft = Draft(1, [1, 2, 3], [0.95, 0.45, 0.15])
    before = calibration.chances(draft)
    for _ in range(50):
        calibration.learn(draft, [1, 9, 3])
    first, second, third = calibration.chances(draft)

    assert before == [pytest.approx(0.95), pytest.approx(0.45), pytest.approx(0.15)]
    assert first > 0.98
    assert second < 0.05
    assert third == before[2], "it was never put to the test"


def test_expected_tokens_is_the_sum_of_the_products() -> None:
    assert expected_tokens([0.5, 0.5, 1.0]) == pytest.approx(0.5 + 0.25 + 0.25)
    assert expected_tokens([]) == 0.0
