"""A shard over a channel: plans in order, drafts in answer, failures contained."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny_drafter import HIDDEN_SIZE, config_of, make_drafter, make_target
from torch import Tensor

from paceline.cluster.channel import LocalHub
from paceline.cluster.errors import ProtocolError
from paceline.cluster.messages import (
    Commit,
    Draft,
    Drafts,
    Failed,
    Open,
    Propose,
    SamplingParams,
    ShardPlan,
    ShardReady,
    Shutdown,
    Slide,
    StepPlan,
)
from paceline.drafter.dflash_proposer import DFlashProposer
from paceline.drafter.loop import run_shard
from paceline.drafter.ngram import NgramProposer
from paceline.drafter.proposer import draft_contained
from paceline.drafter.runner import ShardRunner

PAGE = 16
GREEDY = SamplingParams(max_tokens=99, temperature=0.0)


@pytest.fixture
def proposer(tmp_path: Path) -> DFlashProposer:
    path = make_drafter(tmp_path, config_of())
    return DFlashProposer.load(
        path, make_target(), context_bytes=1 << 20, page_size=PAGE, dtype=torch.float32
    )


@pytest.fixture
def taps() -> Tensor:
    return torch.randn(64, 3, HIDDEN_SIZE)


def first_plan() -> ShardPlan:
    """Two prompts of 20 and 5 tokens, whose rows lie one after the other in the scratch."""
    return ShardPlan(
        number=1,
        num_drafts=3,
        open=[Open(1, [7] * 20, 20, GREEDY), Open(2, [8] * 5, 5, GREEDY)],
        commits=[Commit(1, 1, 0, 20, 0, [0, 1]), Commit(2, 1, 20, 5, 0, [2])],
        propose=[Propose(1, [9], [3]), Propose(2, [9], [])],
    )


def test_a_plan_is_applied_in_its_order_and_answered(proposer: DFlashProposer, taps: Tensor) -> None:
    runner = ShardRunner(0, proposer, taps, check=True)

    assert runner.ready == ShardReady(
        shard=0,
        max_drafts=7,
        tap_layer_ids=[1, 3, 5],
        num_pages=proposer.num_pages,
        max_context_len=512,
    )
    answer = runner.execute(first_plan())
    assert answer.number == 1
    assert [(draft.sequence_id, len(draft.token_ids)) for draft in answer.drafts] == [(1, 3), (2, 3)]
    assert answer.commit_s > 0 < answer.draft_s

    answer = runner.execute(
        ShardPlan(
            number=2,
            num_drafts=7,
            free=[2, 2, 77],
            open=[Open(3, [1, 2], 2, GREEDY, 2, 2)],  # page 2 is free again within the same plan
            commits=[Commit(1, 2, 5, 2, 20, []), Commit(3, 2, 0, 1, 2, [2])],
            slides=[Slide(1, 16)],
            propose=[Propose(1, [4, 5], [0]), Propose(3, [6, 7], [])],
        )
    )
    assert [len(draft.token_ids) for draft in answer.drafts] == [7, 7]
    assert proposer.contexts.window(1).pages == [1]


def test_drafts_do_not_depend_on_who_else_drafts(proposer: DFlashProposer, taps: Tensor) -> None:
    both = ShardRunner(0, proposer, taps).execute(first_plan()).drafts
    alone = [proposer._draft([proposal], 3)[0] for proposal in first_plan().propose]

    assert [draft.token_ids for draft in both] == [draft.token_ids for draft in alone]


def test_plans_out_of_order_or_beyond_the_block_are_refused(proposer: DFlashProposer, taps: Tensor) -> None:
    runner = ShardRunner(0, proposer, taps)
    with pytest.raises(ProtocolError, match="expected plan 1, got 2"):
        runner.execute(ShardPlan(number=2))
    runner.execute(first_plan())
    with pytest.raises(ProtocolError, match="drafts 1 to 7 tokens, not 8"):
        runner.execute(ShardPlan(number=2, num_drafts=8, propose=[Propose(1, [4], [5])]))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (ShardPlan(number=2, commits=[Commit(1, 2, 63, 2, 20, [])]), "beyond the 64"),
        (
            ShardPlan(number=2, commits=[Commit(1, 2, 0, 1, 20, []), Commit(2, 3, 1, 1, 5, [])]),
            "several steps",
        ),
        (ShardPlan(number=2, num_drafts=3, propose=[Propose(1, [9, 9], [])]), "the anchor is at 22"),
        (ShardPlan(number=2, num_drafts=3, propose=[Propose(1, [], [])]), "without an anchor"),
        (ShardPlan(number=2, num_drafts=3, propose=[Propose(5, [1], [])]), "not on this shard"),
        (ShardPlan(number=2, open=[Open(1, [1], 1, GREEDY)]), "opened twice"),
    ],
)
def test_messages_that_contradict_the_shard_are_refused(
    proposer: DFlashProposer, taps: Tensor, plan: ShardPlan, message: str
) -> None:
    runner = ShardRunner(0, proposer, taps)
    runner.execute(first_plan())
    with pytest.raises(ProtocolError, match=message):
        runner.execute(plan)


def test_context_that_is_not_finite_stays_with_its_sequence(proposer: DFlashProposer, taps: Tensor) -> None:
    clean = ShardRunner(0, proposer, taps).execute(first_plan()).drafts
    for sequence_id in (1, 2):
        proposer.free(sequence_id)
    taps[22] = float("nan")  # a row of the second prompt
    first, second = ShardRunner(0, proposer, taps).execute(first_plan()).drafts

    assert first == clean[0]
    assert second == Draft(2, [], [], "not_finite")


def test_a_failed_batch_is_drafted_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    sizes = []

    def draft(proposals: Sequence[Propose]) -> list[Draft]:
        sizes.append(len(proposals))
        if any(proposal.sequence_id == 2 for proposal in proposals):
            raise RuntimeError("out of memory")
        return [Draft(proposal.sequence_id, [1], [0.5]) for proposal in proposals]

    drafts = draft_contained(draft, [Propose(i, [1], []) for i in (1, 2, 3)])

    assert drafts == [Draft(1, [1], [0.5]), Draft(2, [], [], "failed"), Draft(3, [1], [0.5])]
    assert sizes == [3, 1, 1, 1]
    assert "out of memory" in caplog.text


def test_a_shard_serves_until_shutdown_over_a_channel() -> None:
    hub = LocalHub()
    thread = threading.Thread(
        target=run_shard, args=(hub.link("shard0"), ShardRunner(0, NgramProposer(), None))
    )
    thread.start()

    assert hub.recv(10) == ("shard0", ShardReady(shard=0, max_drafts=8))
    open_, propose = Open(1, [1, 2, 3, 1], 4, GREEDY), Propose(1, [2], [])
    hub.send("shard0", ShardPlan(number=1, num_drafts=2, open=[open_], propose=[propose]))
    received = hub.recv(10)
    assert received is not None
    assert isinstance(received[1], Drafts)
    assert received[1].drafts[0].token_ids == [3, 1]
    hub.send("shard0", Shutdown())
    thread.join(10)
    assert not thread.is_alive()


def test_a_shard_says_why_it_ends() -> None:
    hub = LocalHub()
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            run_shard(hub.link("shard0"), ShardRunner(0, NgramProposer(), None))
        except ProtocolError as error:
            errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    hub.recv(10)
    hub.send("shard0", StepPlan(step=1))
    received = hub.recv(10)
    thread.join(10)

    assert received == (
        "shard0",
        Failed(source="shard0", reason="ProtocolError: shard0 does not take StepPlan"),
    )
    assert len(errors) == 1


def test_a_rank_must_tap_what_its_shard_reads() -> None:
    with pytest.raises(AssertionError, match="taps other layers"):
        ShardRunner(0, NgramProposer(), torch.zeros(4, 3, 8))
