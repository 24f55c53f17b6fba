"""An engine's real parts in one thread: state machine, one rank and its shard, without channels and clocks.

One `advance` is one answer of a rank or a shard, so a test says exactly between which two of them a request
comes, is cancelled, or the shard is lost.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.cluster.messages import (
    Cancel,
    Output,
    Outputs,
    Refused,
    ShardLost,
    ShardPlan,
    ShardSilent,
    Shutdown,
    Stats,
    StepPlan,
    Submit,
    TokenLogprobs,
)
from paceline.drafter.proposer import Proposer
from paceline.drafter.runner import ShardRunner
from paceline.scheduler.events import DraftsArrived, Event, ShardUp, ToShard
from paceline.scheduler.limits import Limits
from paceline.scheduler.state import Scheduler
from paceline.workers.runner import Runner


@dataclass
class Answer:
    """What one request was sent."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    outputs: list[Output] = field(default_factory=list)

    def take(self, output: Output) -> None:
        assert self.finish_reason is None, "an output after the last"
        assert output.first_index == len(self.token_ids)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        self.finish_reason = output.finish_reason
        self.outputs.append(output)


class Lockstep:
    """Every invariant is checked at every event, those of the shard included."""

    def __init__(
        self, runner: Runner, limits: Limits, make_proposer: Callable[[], Proposer] | None = None
    ) -> None:
        self.scheduler = Scheduler(limits, check=True)
        self.answers: dict[str, Answer] = {}
        self.num_lives = 0
        self._runner = runner
        self._make_proposer = make_proposer
        self._shards: dict[str, ShardRunner] = {}
        self._step: StepPlan | None = None
        self._shard_plan: tuple[str, ShardPlan] | None = None
        if make_proposer is not None:
            self.start_shard()

    @property
    def stats(self) -> Stats:
        return self.scheduler.stats()

    @property
    def peer(self) -> str:
        """The shard's newest life."""
        return f"shard0.{self.num_lives - 1}"

    def start_shard(self) -> None:
        """Begin a life; while another one lives this is a hot swap."""
        assert self._make_proposer is not None
        self.num_lives += 1
        shard = ShardRunner(0, self._make_proposer(), self._runner.tap_buffer, check=True)
        self._shards[self.peer] = shard
        self._take(ShardUp(self.peer, shard.ready))

    def lose_shard(self) -> None:
        """The newest life dies, with the answer it owes; nothing happens if it is dead."""
        self._shards.pop(self.peer, None)
        if self._shard_plan is not None and self._shard_plan[0] == self.peer:
            self._shard_plan = None
        self._take(ShardLost(self.peer))

    def submit(self, submit: Submit) -> None:
        self.answers[submit.request_id] = Answer()
        self._take(submit)

    def cancel(self, request_id: str) -> None:
        self._take(Cancel(request_id=request_id))

    def advance(self) -> bool:
        """The rank or the shard answers what it owes; False when nobody owes anything."""
        if self._shard_plan is not None:
            (peer, plan), self._shard_plan = self._shard_plan, None
            self._take(DraftsArrived(peer, self._shards[peer].execute(plan)))
        elif self._step is not None:
            step, self._step = self._step, None
            self._take(self._runner.execute(step))
        else:
            return False
        return True

    def run(self) -> None:
        while self.advance():
            pass

    def _take(self, event: Event) -> None:
        for command in self.scheduler.handle(event, 0.0):
            match command:
                case StepPlan():
                    assert self._step is None, "two steps in flight"
                    self._step = command
                case ToShard(peer, ShardPlan() as plan):
                    assert self._shard_plan is None, "two plans for one shard"
                    self._shard_plan = peer, plan
                case ToShard(peer, Shutdown()):
                    del self._shards[peer]
                case Outputs(outputs):
                    for output in outputs:
                        self.answers[output.request_id].take(output)
                case Refused() | ShardSilent():
                    raise AssertionError(f"unexpected: {command}")
