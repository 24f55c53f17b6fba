"""`paceline bench step`: an engine on one thread, without channel and HTTP, so that a step's parts add up.

    decide      the scheduler: settle the last result, plan the next step, write the shard's plan
    messages    encoding and decoding them, as the channel would
    target      the rank's forward and draws
    commit      the shard: tap rows into contexts
    draft       the shard: a block for each sequence

The state machine, the rank and the shard are the ones that serve; only who calls them differs.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from rich.table import Table

from ...cluster.config import Config
from ...cluster.messages import Message, Output, Outputs, SamplingParams, ShardPlan, StepPlan, Submit
from ...drafter.load import load_proposer
from ...drafter.proposer import Proposer
from ...drafter.runner import ShardRunner
from ...scheduler.events import Command, DraftsArrived, Event, ShardUp, ToShard
from ...scheduler.limits import Limits
from ...scheduler.state import Scheduler
from ...workers.runner import Runner
from ..drafter_source import choose_drafter

PARTS = ("target", "commit", "draft", "decide", "messages")
_WARM_UP_TOKENS = 8


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of one kind at one batch: counts are sums, times are milliseconds per step."""

    batch: int
    kind: str  # "prefill": a prompt was read in it; else "decode"
    num_steps: int
    num_rows: int
    num_tokens: int
    decide_ms: float
    messages_ms: float
    target_ms: float
    commit_ms: float
    draft_ms: float

    @property
    def step_ms(self) -> float:
        return self.decide_ms + self.messages_ms + self.target_ms + self.commit_ms + self.draft_ms

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / (self.num_steps * self.step_ms / 1e3)


class _Sums:
    """What the steps of one kind took, in seconds."""

    def __init__(self) -> None:
        self.num_steps = self.num_rows = self.num_tokens = 0
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)

    def row(self, batch: int, kind: str) -> StepRow:
        per_step = {f"{name}_ms": 1e3 * s / self.num_steps for name, s in self.seconds.items()}
        return StepRow(
            batch=batch,
            kind=kind,
            num_steps=self.num_steps,
            num_rows=self.num_rows,
            num_tokens=self.num_tokens,
            **per_step,
        )


@dataclass(slots=True)
class Answer:
    """What one request got; seconds since it was submitted, on the wall clock."""

    token_ids: list[int] = field(default_factory=list[int])
    ttft_s: float = 0.0


class BareEngine:
    """A scheduler, a rank and, if one is configured, its shard, taking turns on this thread."""

    def __init__(
        self, config: Config, model_path: Path, wrap: Callable[[Proposer], Proposer] | None = None
    ) -> None:
        """`wrap` puts something around what drafts. Raises ModelError or ConfigError for what cannot load."""
        choice = choose_drafter(config, model_path)
        taps = () if choice is None else choice.tap_layer_ids
        self.runner = Runner(model_path, config, tap_layer_ids=taps)
        limits = Limits.of(
            config.engine, max_model_len=self.runner.max_model_len, num_pages=self.runner.num_pages
        )
        self.scheduler = Scheduler(limits)
        self.sums: dict[str, _Sums] = {}
        self.scheduler.learn(self.runner.step_costs)
        self._shard: ShardRunner | None = None
        self._num_lives = 0
        self._num_requests = 0
        self._answers: dict[str, Answer] = {}
        self._began = 0.0
        self._config, self._model_path, self._choice, self._wrap = config, model_path, choice, wrap
        self.renew_shard()

    def renew_shard(self) -> None:
        """Start the shard's next life, which knows nothing of the contexts before it."""
        if self._choice is None:
            return
        self._num_lives += 1
        runner = self.runner
        proposer = load_proposer(
            self._choice, self._config, self._model_path, runner.max_model_len, runner.device
        )
        if self._wrap is not None:
            proposer = self._wrap(proposer)
        self._shard = ShardRunner(0, proposer, runner.tap_buffer if proposer.tap_layer_ids else None)
        self.scheduler.handle(ShardUp(self._peer, self._shard.ready), time.monotonic())

    def run(
        self, prompts: Sequence[list[int]], max_tokens: int, *, max_draft_tokens: int | None = None
    ) -> list[Answer]:
        """Generate greedily for all prompts together; `sums` tells where the time went."""
        self.sums = {"prefill": _Sums(), "decode": _Sums()}
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        commands: list[Command] = []
        self._began = time.perf_counter()
        self._answers = {}
        for prompt in prompts:
            self._num_requests += 1
            request_id = str(self._num_requests)
            self._answers[request_id] = Answer()
            submit = Submit(
                request_id=request_id,
                prompt_ids=list(prompt),
                params=params,
                max_draft_tokens=max_draft_tokens,
            )
            commands += self.scheduler.handle(submit, time.monotonic())
        plan = next((c for c in commands if isinstance(c, StepPlan)), None)
        while plan is not None:
            plan = self._step(plan)
        return list(self._answers.values())

    @property
    def _peer(self) -> str:
        return f"shard0.{self._num_lives}"

    def _step(self, plan: StepPlan) -> StepPlan | None:
        """Run one plan and what follows it; the next plan, None when there is no work."""
        is_decode = all(chunk.num_decided == chunk.num_rows for chunk in plan.chunks)
        sums = self.sums["decode" if is_decode else "prefill"]
        with _timing(sums, "target"):
            result = self.runner.execute(plan)
        sums.num_steps += 1
        sums.num_rows += sum(chunk.num_rows for chunk in plan.chunks)
        self._carry(sums, plan, result)
        commands = self._decide(sums, result)
        if self._shard is not None:
            for command in commands:
                if isinstance(command, ToShard) and isinstance(command.message, ShardPlan):
                    drafts = self._shard.execute(command.message)
                    sums.seconds["commit"] += drafts.commit_s
                    sums.seconds["draft"] += drafts.draft_s
                    self._carry(sums, command.message, drafts)
                    commands = [*commands, *self._decide(sums, DraftsArrived(self._peer, drafts))]
        for command in commands:
            if isinstance(command, Outputs):
                for output in command.outputs:
                    self._hear(sums, output)
        return next((c for c in commands if isinstance(c, StepPlan)), None)

    def _hear(self, sums: _Sums, output: Output) -> None:
        answer = self._answers[output.request_id]
        if not answer.token_ids:
            answer.ttft_s = time.perf_counter() - self._began
        answer.token_ids += output.token_ids
        sums.num_tokens += len(output.token_ids)

    def _decide(self, sums: _Sums, event: Event) -> list[Command]:
        with _timing(sums, "decide"):
            return self.scheduler.handle(event, time.monotonic())

    def _carry(self, sums: _Sums, *messages: Message) -> None:
        """Encode and decode what would cross the channel."""
        with _timing(sums, "messages"):
            for message in messages:
                _decoder.decode(_encoder.encode(message))


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


@contextmanager
def _timing(sums: _Sums, name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    sums.seconds[name] += time.perf_counter() - began


def measure_steps(
    engine: BareEngine, batches: Sequence[int], prompts: Iterator[list[int]], max_tokens: int
) -> list[StepRow]:
    """Two rows for each batch, after a short warm-up; takes fresh prompts."""
    rows: list[StepRow] = []
    for batch in batches:
        engine.run([next(prompts) for _ in range(batch)], _WARM_UP_TOKENS)
        engine.run([next(prompts) for _ in range(batch)], max_tokens)
        rows += [sums.row(batch, kind) for kind, sums in engine.sums.items() if sums.num_steps]
    return rows


def profile(work: Callable[[], object], num_operations: int = 15) -> str:
    """The torch operations in which this thread spent most of `work`, as a table."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as found:
        work()
    key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    return found.key_averages().table(sort_by=key, row_limit=num_operations)


def table_of(rows: Sequence[StepRow]) -> Table:
    """The rows for a terminal: means per step, times in milliseconds."""
    table = Table(box=None, pad_edge=False)
    for header in ("batch", "steps", "n", "rows", "tokens", "ms", *PARTS, "tok/s"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        parts: list[float] = [getattr(row, f"{part}_ms") for part in PARTS]
        table.add_row(
            str(row.batch),
            row.kind,
            str(row.num_steps),
            f"{row.num_rows / row.num_steps:.1f}",
            f"{row.num_tokens / row.num_steps:.1f}",
            f"{row.step_ms:.2f}",
            *(f"{part:.2f}" for part in parts),
            f"{row.tokens_per_s:.1f}",
        )
    return table
