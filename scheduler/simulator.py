"""Engines in virtual time: the real scheduler, and ranks and shards that only take the time they would.

    trace -> a group by its load, or the one that has its session -> Submit
    group -> StepPlan or ShardPlan -> so many virtual milliseconds later the answer -> next plan, Outputs

Nothing is computed: each decision is the same token, and a draft is that token with the chance it is given to
stand. So whatever is measured here is the doing of the state machine: who waits, who is preempted, what is
found in the prefix cache, how many drafts are verified. A thousand groups are as exact as one.
"""

import heapq
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import msgspec

from ..cluster.messages import (
    Chunk,
    Decision,
    Draft,
    Drafts,
    Outputs,
    Refused,
    SamplingParams,
    ShardPlan,
    ShardReady,
    StepPlan,
    StepResult,
    Submit,
)
from .events import Command, DraftsArrived, Event, ShardUp, ToShard
from .limits import Limits
from .state import Scheduler
from .traces import Arrival

TOKEN = 1  # what is always decided
PEER = "shard0.1"
CONFIDENCE = 0.7


class Costs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a group's work takes, in milliseconds: lines between measured points, going on behind the last."""

    step: tuple[tuple[float, float], ...]  # (rows, ms)
    draft: tuple[tuple[float, float], ...] = ((1, 0.0),)  # (blocks, ms)
    commit_ms: float = 0.0  # of each draft phase
    context_ms: float = 0.0  # of each thousand positions that the step's rows attend to

    def step_ms(self, num_rows: int, num_attended: int = 0) -> float:
        return _on_line(self.step, num_rows) + self.context_ms * num_attended / 1e3

    def draft_ms(self, num_blocks: int) -> float:
        return self.commit_ms + (_on_line(self.draft, num_blocks) if num_blocks else 0.0)

    @classmethod
    def roofline(
        cls,
        *,
        num_params: float,
        bytes_per_s: float,
        flop_per_s: float,
        draft_share: float = 0.1,
        bytes_per_param: float = 2.0,
        kv_bytes_per_token: float = 0.0,
        overhead_ms: float = 1.0,
    ) -> "Costs":
        """A device that reads all weights once a step or is bound by its products (Williams et al. 2009).

        The drafter is a model of `draft_share` of the parameters whose block has eight rows.
        """
        read_ms = 1e3 * num_params * bytes_per_param / bytes_per_s
        row_ms = 1e3 * 2 * num_params / flop_per_s
        knee = max(1.0, read_ms / row_ms)
        level_ms = read_ms + overhead_ms
        line = ((1.0, level_ms), (knee, level_ms), (2 * knee, level_ms + read_ms))
        blocks = tuple((rows / 8, draft_share * ms) for rows, ms in line)
        return cls(step=line, draft=blocks, context_ms=1e6 * kv_bytes_per_token / bytes_per_s)


@dataclass(frozen=True, kw_only=True)
class Drafter:
    """A shard of which each draft stands with `chance(now)`, if those before it do."""

    chance: Callable[[float], float]
    max_drafts: int = 7
    has_taps: bool = True


@dataclass(slots=True)
class Served:
    """What became of one request; times are seconds of virtual time."""

    arrival: Arrival
    due_s: float  # when it came
    group: int
    prompt_len: int = 0  # with the turns before it
    num_tokens: int = 0
    num_cached: int = 0  # of the prompt, found in the prefix cache
    times_s: list[float] = field(default_factory=list[float])  # since it came, one per output
    finish_reason: str = ""

    @property
    def ttft_s(self) -> float:
        return self.times_s[0]

    @property
    def e2e_s(self) -> float:
        return self.times_s[-1]


class Group:
    """One engine. At most one answer is due at a time: its ranks' or its shard's."""

    def __init__(
        self,
        limits: Limits,
        costs: Costs,
        drafter: Drafter | None = None,
        *,
        seed: int = 0,
        check: bool = False,
        disturb: Callable[[float], float] | None = None,
    ) -> None:
        """`disturb` turns the milliseconds of a step into those it takes this time."""
        self.scheduler = Scheduler(limits, check=check)
        self.costs = costs
        self.due_s: float | None = None  # when the next answer comes
        self.busy_s = 0.0
        self.num_steps = 0
        self.num_phases = 0
        self.num_rows = 0
        self.num_prefill_rows = 0
        self.longest: list[int] = []  # drafts of the longest block, for each step
        self.lost_s = 0.0  # to disturbances
        self._drafter = drafter
        self._disturb = disturb
        self._random = random.Random(seed)
        self._answer: Event | None = None
        if drafter is not None:
            ready = ShardReady(
                shard=0,
                max_drafts=drafter.max_drafts,
                tap_layer_ids=[0] if drafter.has_taps else [],
                num_pages=limits.num_pages,
            )
            self.scheduler.handle(ShardUp(PEER, ready), 0.0)

    def take(self, event: Event, now: float) -> list[Command]:
        """Let the scheduler decide and set the work it orders going; what is for the server is returned."""
        told: list[Command] = []
        for command in self.scheduler.handle(event, now):
            match command:
                case StepPlan():
                    self._run_step(command, now)
                case ToShard(_, ShardPlan() as plan):
                    self._run_shard(plan, now)
                case _:
                    told.append(command)
        return told

    def answer(self) -> list[Command]:
        """Time has come to `due_s`: take the answer that is due."""
        assert self._answer is not None, "no answer is due"
        assert self.due_s is not None
        event, now = self._answer, self.due_s
        self._answer = self.due_s = None
        return self.take(event, now)

    def _run_step(self, plan: StepPlan, now: float) -> None:
        num_rows = sum(chunk.num_rows for chunk in plan.chunks)
        num_attended = sum(chunk.start + chunk.num_rows for chunk in plan.chunks)
        steady_ms = self.costs.step_ms(num_rows, num_attended)
        ms = steady_ms if self._disturb is None else self._disturb(steady_ms)
        self.lost_s += (ms - steady_ms) / 1e3
        self.num_steps += 1
        self.num_rows += num_rows
        self.num_prefill_rows += sum(c.num_rows for c in plan.chunks if not c.tail and c.num_rows > 1)
        self.longest.append(max(0, *(chunk.num_decided - 1 for chunk in plan.chunks), 0))
        decisions = [_decide(chunk) for chunk in plan.chunks if chunk.num_decided]
        self._expect(StepResult(step=plan.step, decisions=decisions, compute_s=ms / 1e3), now, ms)

    def _run_shard(self, plan: ShardPlan, now: float) -> None:
        assert self._drafter is not None
        chance = self._drafter.chance(now)
        drafts = [
            Draft(p.sequence_id, self._tokens(plan.num_drafts, chance), [CONFIDENCE] * plan.num_drafts)
            for p in plan.propose
        ]
        ms = self.costs.draft_ms(len(drafts))
        self.num_phases += 1
        answer = Drafts(number=plan.number, drafts=drafts, draft_s=ms / 1e3)
        self._expect(DraftsArrived(PEER, answer), now, ms)

    def _tokens(self, num_drafts: int, chance: float) -> list[int]:
        return [TOKEN if self._random.random() < chance else TOKEN + 1 for _ in range(num_drafts)]

    def _expect(self, event: Event, now: float, ms: float) -> None:
        assert self._answer is None, "two answers are due"
        self._answer, self.due_s = event, now + ms / 1e3
        self.busy_s += ms / 1e3


class Simulation:
    """Replays a trace. A session stays with its group; everybody else goes where the fewest requests are."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self.served: list[Served] = []
        self.now = 0.0
        self._live: dict[str, Served] = {}
        self._num_live = [0] * len(groups)
        self._turns: dict[str, list[Arrival]] = {}  # of sessions, those that are still to come
        self._history: dict[str, list[int]] = {}
        self._group_of: dict[str, int] = {}
        self._events: list[tuple[float, int, int | Arrival]] = []  # due, order, group or arrival
        self._order = count()

    def run(self, trace: Sequence[Arrival]) -> list[Served]:
        """Serve everything; what became of each request, in the order in which they came."""
        for arrival in trace:
            if arrival.session in self._turns:
                self._turns[arrival.session].append(arrival)
                continue
            if arrival.session:
                self._turns[arrival.session] = []
            self._push(arrival.at_s, arrival)
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            if isinstance(what, Arrival):
                self._arrive(what)
            else:
                self._hear(what, self.groups[what].answer())
        assert not self._live, "everything was served, yet a request lives"
        return self.served

    def _push(self, due_s: float, what: int | Arrival) -> None:
        heapq.heappush(self._events, (due_s, next(self._order), what))

    def _arrive(self, arrival: Arrival) -> None:
        index = self._group_of.get(arrival.session)
        if index is None:
            index = min(range(len(self.groups)), key=self._num_live.__getitem__)
            if arrival.session:
                self._group_of[arrival.session] = index
        prompt_ids = self._prompt(arrival)
        request_id = str(len(self.served))
        served = Served(arrival, self.now, index, prompt_len=len(prompt_ids))
        self.served.append(served)
        self._live[request_id] = served
        self._num_live[index] += 1
        submit = Submit(
            request_id=request_id,
            prompt_ids=prompt_ids,
            params=SamplingParams(max_tokens=arrival.output_len),
            priority=arrival.priority,
        )
        was_due = self.groups[index].due_s
        told = self.groups[index].take(submit, self.now)
        self._hear(index, told, is_due=was_due is not None)

    def _hear(self, index: int, told: Sequence[Command], *, is_due: bool = False) -> None:
        """Take what a group told, and wait for its next answer unless that is waited for already."""
        due_s = self.groups[index].due_s
        if due_s is not None and not is_due:
            self._push(due_s, index)
        for command in told:
            match command:
                case Outputs():
                    for output in command.outputs:
                        served = self._live[output.request_id]
                        served.num_tokens += len(output.token_ids)
                        served.num_cached += output.num_cached_tokens
                        served.times_s.append(self.now - served.due_s)
                        if output.finish_reason is not None:
                            self._end(output.request_id, output.finish_reason)
                case Refused():
                    self._end(command.request_id, "refused")
                case _:
                    raise AssertionError(f"nobody expects {command}")

    def _end(self, request_id: str, reason: str) -> None:
        served = self._live.pop(request_id)
        served.finish_reason = reason
        self._num_live[served.group] -= 1
        session = served.arrival.session
        if session:
            self._history[session] += [TOKEN] * served.num_tokens
            if self._turns[session]:
                following = self._turns[session].pop(0)
                self._push(self.now + following.at_s, following)

    def _prompt(self, arrival: Arrival) -> list[int]:
        """Tokens that no other prompt has, but for what is shared on purpose."""
        first = 100 + 100_000 * (1 + len(self.served))
        own = [first + index for index in range(arrival.prompt_len - arrival.shared_len)]
        shared = [100 + 10_000 * arrival.family + index for index in range(arrival.shared_len)]
        if not arrival.session:
            return shared + own
        history = self._history.setdefault(arrival.session, shared)
        history += own
        return list(history)


def _decide(chunk: Chunk) -> Decision:
    return Decision(chunk.sequence_id, [TOKEN] * chunk.num_decided)


def _on_line(points: Sequence[tuple[float, float]], x: float) -> float:
    """The line through points of rising x: level before the first, going on behind the last."""
    if x <= points[0][0] or len(points) == 1:
        return points[0][1]
    right = min(bisect_right(points, x, key=lambda point: point[0]), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
