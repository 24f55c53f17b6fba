"""The shell over an in-process hub: start, serving, heartbeat, deadline, failure, shutdown."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
import pytest
from fake_ranks import FakeRanks, undisturbed
from fake_shards import FakeShard

from paceline.cluster.channel import LocalHub, LocalLink
from paceline.cluster.config import EngineConfig
from paceline.cluster.errors import EngineError, ProtocolError, RankLost, StepDeadlineExceeded
from paceline.cluster.messages import (
    Cancel,
    Failed,
    Message,
    Outputs,
    Ready,
    Refused,
    SamplingParams,
    ShardLost,
    ShardPlan,
    ShardReady,
    ShardSilent,
    Shutdown,
    Stats,
    StepPlan,
    StepResult,
    Submit,
)
from paceline.scheduler.loop import run_scheduler

ENGINE = EngineConfig(
    max_num_seqs=4, page_size=8, check_invariants=True, step_deadline_s=10.0, start_timeout_s=10.0
)
PATIENCE_S = 10.0
M = TypeVar("M", bound=msgspec.Struct)


class Shell:
    """A loop in a thread, and the links that a test speaks through."""

    def __init__(self, *ranks: str, engine: EngineConfig = ENGINE) -> None:
        self.hub = LocalHub()
        self.server = self.hub.link("server")
        self.ranks = {rank: self.hub.link(rank) for rank in ranks}
        self.error: Exception | None = None
        self._engine = engine
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def get_ready(self, num_pages: int = 32) -> None:
        """Every rank reports; a higher rank has a page more."""
        for index, link in enumerate(self.ranks.values()):
            link.send(Ready(rank=index, num_pages=num_pages + index))

    def start_shard(self, peer: str, ranks: FakeRanks) -> tuple[LocalLink, FakeShard]:
        """A life of shard 0 says that it is ready."""
        ready = ShardReady(shard=0, max_drafts=3, tap_layer_ids=[0], num_pages=16)
        link = self.hub.link(peer)
        link.send(ready)
        return link, FakeShard(ready, ranks)

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the loop does not end"

    def close(self) -> None:
        if self._thread.is_alive():
            self.server.send(Shutdown())
        self.join()
        self.hub.close()

    def _run(self) -> None:
        try:
            run_scheduler(self.hub, list(self.ranks), self._engine, max_model_len=100)
        except Exception as error:
            self.error = error


Open = Callable[..., Shell]


@pytest.fixture
def open_shell() -> Iterator[Open]:
    shells: list[Shell] = []

    def start(*ranks: str, engine: EngineConfig = ENGINE) -> Shell:
        shells.append(Shell(*ranks, engine=engine))
        return shells[-1]

    yield start
    for shell in shells:
        shell.close()


def expect(link: LocalLink, kind: type[M]) -> M:
    """The next message of this kind; what comes before it, such as heartbeats, is skipped."""
    deadline = time.monotonic() + PATIENCE_S
    while (message := link.recv(max(0.0, deadline - time.monotonic()))) is not None:
        if isinstance(message, kind):
            return message
    raise AssertionError(f"no {kind.__name__} came")


def submit_of(request_id: str, max_tokens: int = 3) -> Submit:
    return Submit(request_id=request_id, prompt_ids=[1, 2], params=SamplingParams(max_tokens=max_tokens))


def test_serves_requests_with_two_ranks(open_shell: Open) -> None:
    """Both ranks get every plan; a step is settled when both have answered; the outputs are rank 0's."""
    shell = open_shell("rank0", "rank1")
    shell.get_ready()
    stats = expect(shell.server, Stats)
    assert (stats.num_pages, stats.num_free_pages, stats.has_work) == (32, 32, False)
    shell.server.send(submit_of("a"))
    ranks = FakeRanks(32, 8)
    tokens: list[int] = []
    for step in (1, 2, 3):
        plans = [expect(link, StepPlan) for link in shell.ranks.values()]
        assert plans[0] == plans[1]
        assert plans[0].step == step
        shell.ranks["rank1"].send(StepResult(step=step))
        shell.ranks["rank0"].send(ranks.execute(plans[0]))
        [output] = expect(shell.server, Outputs).outputs
        tokens += output.token_ids
    assert tokens == undisturbed([1, 2], SamplingParams(max_tokens=3))[0]
    while (stats := expect(shell.server, Stats)).has_work:
        pass
    assert (stats.num_steps, stats.num_generated_tokens, stats.num_free_pages) == (3, 3, 32)
    assert stats.compute_s == pytest.approx(0.003)
    assert stats.wait_s > 0
    assert stats.plan_s > 0


def test_a_step_is_not_settled_before_the_last_rank_has_answered(open_shell: Open) -> None:
    """No output while a rank may still be writing; its repeated answer is counted and ignored."""
    shell = open_shell("rank0", "rank1")
    shell.get_ready()
    shell.server.send(submit_of("a"))
    plan = expect(shell.ranks["rank0"], StepPlan)
    for _ in range(2):
        shell.ranks["rank0"].send(FakeRanks(32, 8).execute(plan))
    while (stats := expect(shell.server, Stats)).num_ignored_messages == 0:
        pass
    assert (stats.num_ignored_messages, stats.num_generated_tokens) == (1, 0)
    shell.ranks["rank1"].send(StepResult(step=1))
    assert expect(shell.server, Outputs).outputs[0].first_index == 0


def test_refusals_and_cancels_reach_the_server(open_shell: Open) -> None:
    """A refusal goes straight back; a cancelled request ends at once."""
    shell = open_shell("rank0")
    shell.get_ready()
    shell.server.send(submit_of("big", max_tokens=99))
    assert expect(shell.server, Refused).status == 400
    shell.server.send(submit_of("a"))
    shell.server.send(Cancel(request_id="a"))
    assert expect(shell.server, Outputs).outputs[0].finish_reason == "cancelled"


def test_requests_may_come_before_the_ranks_are_ready(open_shell: Open) -> None:
    """They wait, and are planned once the ranks are there."""
    shell = open_shell("rank0")
    shell.server.send(submit_of("early"))
    shell.get_ready()
    assert expect(shell.ranks["rank0"], StepPlan).admit[0].token_ids == [1, 2]


def test_heartbeat_comes_every_second_when_idle(open_shell: Open) -> None:
    """The server hears from the scheduler at least once a second without any work."""
    shell = open_shell("rank0")
    shell.get_ready()
    expect(shell.server, Stats)
    began = time.monotonic()
    for _ in range(2):
        expect(shell.server, Stats)
    assert time.monotonic() - began < 2.0


@pytest.mark.parametrize("is_ready", [True, False])
def test_shutdown_reaches_the_ranks(open_shell: Open, is_ready: bool) -> None:
    """At any time, also while the ranks still load."""
    shell = open_shell("rank0", "rank1")
    if is_ready:
        shell.get_ready()
        shell.server.send(submit_of("a"))
    shell.server.send(Shutdown())
    for link in shell.ranks.values():
        expect(link, Shutdown)
    shell.join()
    assert shell.error is None


def test_overdue_step_names_the_silent_rank(open_shell: Open) -> None:
    """The server is told, though requests and other ranks keep the loop busy; then the loop raises."""
    shell = open_shell("rank0", "rank1", engine=msgspec.structs.replace(ENGINE, step_deadline_s=0.3))
    shell.get_ready()
    shell.server.send(submit_of("a"))
    shell.ranks["rank0"].send(FakeRanks(32, 8).execute(expect(shell.ranks["rank0"], StepPlan)))
    failed = expect(shell.server, Failed)
    assert failed == Failed(source="scheduler", reason="rank1 did not answer step 1 within 0.3 s")
    shell.join()
    assert isinstance(shell.error, StepDeadlineExceeded)


def test_rank_that_never_gets_ready(open_shell: Open) -> None:
    """It is named when the start takes too long."""
    shell = open_shell("rank0", "rank1", engine=msgspec.structs.replace(ENGINE, start_timeout_s=0.3))
    shell.ranks["rank0"].send(Ready(rank=0, num_pages=4))
    assert expect(shell.server, Failed).reason == "rank1 did not get ready in 0.3 s"
    shell.join()
    assert isinstance(shell.error, RankLost)


@pytest.mark.parametrize("is_ready", [True, False])
def test_failure_of_a_rank_is_passed_on(open_shell: Open, is_ready: bool) -> None:
    """The server reads the rank's own reason, during the start and later."""
    shell = open_shell("rank0")
    if is_ready:
        shell.get_ready()
    shell.ranks["rank0"].send(Failed(source="rank0", reason="out of memory"))
    assert expect(shell.server, Failed).reason == "rank0: out of memory"
    shell.join()
    assert isinstance(shell.error, RankLost)


@pytest.mark.parametrize(
    ("peer", "message"),
    [("rank0", submit_of("a")), ("server", StepResult(step=1)), ("rank0", Ready(rank=0, num_pages=4))],
)
def test_a_message_that_is_not_the_peers_to_send(open_shell: Open, peer: str, message: Message) -> None:
    """A rank cannot submit, the server cannot answer a plan, and Ready comes once."""
    shell = open_shell("rank0")
    shell.get_ready()
    link = shell.server if peer == "server" else shell.ranks[peer]
    link.send(message)
    assert type(message).__name__ in expect(shell.server, Failed).reason
    shell.join()
    assert isinstance(shell.error, ProtocolError)


def test_answer_that_does_not_fit_ends_the_epoch(open_shell: Open) -> None:
    """A decision too few is a broken rank: the server hears of it."""
    shell = open_shell("rank0")
    shell.get_ready()
    shell.server.send(submit_of("a"))
    expect(shell.ranks["rank0"], StepPlan)
    shell.ranks["rank0"].send(StepResult(step=1))
    assert "decided 0 tokens" in expect(shell.server, Failed).reason
    shell.join()
    assert isinstance(shell.error, EngineError)


@pytest.mark.parametrize("is_early", [True, False])
def test_a_shard_drafts_between_steps(open_shell: Open, is_early: bool) -> None:
    """It is ready before the ranks or after them; the next step verifies its drafts; it is sent home."""
    shell, ranks = open_shell("rank0"), FakeRanks(32, 8)
    if is_early:
        link, shard = shell.start_shard("shard0.1", ranks)
        shell.get_ready()
    else:
        shell.get_ready()
        link, shard = shell.start_shard("shard0.1", ranks)
    while not (stats := expect(shell.server, Stats)).shards:
        pass
    assert (stats.shards[0].peer, stats.shards[0].state) == ("shard0.1", "ready")
    shell.server.send(submit_of("a", max_tokens=6))
    tokens: list[int] = []
    for num_rows in (2, 4, 1):
        plan = expect(shell.ranks["rank0"], StepPlan)
        assert plan.chunks[0].num_rows == num_rows
        shell.ranks["rank0"].send(ranks.execute(plan))
        [output] = expect(shell.server, Outputs).outputs
        tokens += output.token_ids
        if output.finish_reason is None:
            link.send(shard.execute(expect(link, ShardPlan)))
    assert tokens == undisturbed([1, 2], SamplingParams(max_tokens=6))[0]
    while (stats := expect(shell.server, Stats)).has_work:
        pass
    assert (stats.num_drafts, stats.num_accepted_tokens) == (1, 3)
    assert stats.draft_s > 0
    shell.server.send(Shutdown())
    expect(link, Shutdown)


def test_an_overdue_shard_is_named_and_the_step_goes_on(open_shell: Open) -> None:
    """Its late answer is counted and ignored."""
    shell = open_shell("rank0", engine=msgspec.structs.replace(ENGINE, draft_deadline_s=0.3))
    ranks = FakeRanks(32, 8)
    shell.get_ready()
    link, shard = shell.start_shard("shard0.1", ranks)
    shell.server.send(submit_of("a"))
    shell.ranks["rank0"].send(ranks.execute(expect(shell.ranks["rank0"], StepPlan)))
    plan = expect(link, ShardPlan)
    assert expect(shell.server, ShardSilent).peer == "shard0.1"
    link.send(shard.execute(plan))
    assert expect(shell.ranks["rank0"], StepPlan).chunks[0].num_rows == 1
    while expect(shell.server, Stats).num_late_drafts == 0:
        pass


@pytest.mark.parametrize("teller", ["server", "shard0.1"])
def test_a_dead_shard_is_not_waited_for(open_shell: Open, teller: str) -> None:
    """Whether the gang saw it die or it said so itself, the step goes on at once."""
    shell, ranks = open_shell("rank0"), FakeRanks(32, 8)
    shell.get_ready()
    link, _ = shell.start_shard("shard0.1", ranks)
    while not expect(shell.server, Stats).shards:
        pass
    shell.server.send(submit_of("a"))
    shell.ranks["rank0"].send(ranks.execute(expect(shell.ranks["rank0"], StepPlan)))
    expect(link, ShardPlan)
    if teller == "server":
        shell.server.send(ShardLost("shard0.1"))
    else:
        link.send(Failed(source="shard0", reason="out of memory"))
    assert expect(shell.ranks["rank0"], StepPlan).chunks[0].num_rows == 1


def test_a_shard_cannot_submit(open_shell: Open) -> None:
    """Its messages are its own kinds only."""
    shell, ranks = open_shell("rank0"), FakeRanks(32, 8)
    shell.get_ready()
    link, _ = shell.start_shard("shard0.1", ranks)
    link.send(submit_of("a"))
    assert "Submit" in expect(shell.server, Failed).reason
