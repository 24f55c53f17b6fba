"""The scheduler: events in, commands out, `now` as an argument; it owns every decision of an engine.

    Submit         -> refused, or finished at once, or waiting
    Cancel         -> finished; if a step is in flight its pages are freed only when that step has ended
    StepResult     -> tokens settled, requests finished, pages freed; then a draft phase, if shards are there
    DraftsArrived  -> the last one ends the draft phase; so does the loss of the shards that are waited for
    and whenever there is work, no step in flight and no draft phase, the next StepPlan is among the commands.

What ranks and shards have to do comes first among the commands, so that they compute while the server is told
what the last step gave. At most one of {step in flight, draft phase} exists. A request's tokens, pages and
place change only here and in the parts owned here. After an exception the state is not to be used again.
"""

from collections.abc import Sequence

import msgspec

from ..cluster.errors import ProtocolError
from ..cluster.messages import (
    Cancel,
    Chunk,
    Output,
    Outputs,
    ShardLost,
    Stats,
    StepPlan,
    StepResult,
    Submit,
)
from .admission import refuse_duplicate, refuse_for_now, refuse_unfit
from .budget import Phase
from .context import Computed
from .counters import Counters
from .drafting import Drafting
from .events import Command, DraftsArrived, DraftsOverdue, Event, ShardUp
from .limits import Limits
from .pages import PagePool
from .planning import Planner
from .queue import WaitingQueue
from .request import Request, State
from .settling import finish_reason, settle
from .story import Stories
from .survival import Verified


class Scheduler:
    """The whole state of an engine. `check=True` verifies every invariant after each event."""

    def __init__(self, limits: Limits, check: bool = False) -> None:
        self.limits = limits
        self._checks_always = check
        self._pool = PagePool(limits.num_pages)
        self._queue = WaitingQueue(limits.aging_s)
        self._stories = Stories()
        self._drafting = Drafting(limits, self._stories)
        self._planner = Planner(limits, self._pool, self._queue, self._drafting, self._stories)
        self._live: dict[str, Request] = {}
        self._in_flight: StepPlan | None = None
        self._doomed: list[int] = []  # sequences whose pages are freed when the step in flight ends
        self._counters = Counters()
        self._num_steps = 0
        self._num_submitted = 0

    def learn(self, step_costs: Sequence[tuple[int, float]]) -> None:
        """Begin with what the ranks measured before they were ready: (rows, milliseconds of a step)."""
        for num_rows, cost_ms in step_costs:
            self._drafting.budget.verify.observe(num_rows, cost_ms)
        self._planner.pace.learn(step_costs)

    @property
    def has_work(self) -> bool:
        """Whether a request lives, a step is in flight, or a shard owes an answer."""
        return bool(self._live) or self._in_flight is not None or self._drafting.is_waiting

    @property
    def step_in_flight(self) -> int | None:
        """The step the ranks owe an answer to."""
        return None if self._in_flight is None else self._in_flight.step

    @property
    def draft_phase(self) -> int | None:
        """The draft phase in which shards owe answers."""
        return self._drafting.phase if self._drafting.is_waiting else None

    @property
    def shard_peers(self) -> list[str]:
        """The lives of shards that are in use, or soon will be."""
        return self._drafting.peers

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event; returns the commands to perform, in order. `now` is in seconds and never goes back.

        Raises ProtocolError when the ranks' answer does not fit the plan.
        """
        commands: list[Command] = []
        match event:
            case StepResult():
                commands = self._settle(event, now)
            case DraftsArrived():
                self._drafting.answered(event, now)
            case Submit():
                commands = self._submit(event, now)
            case Cancel():
                commands = self._cancel(event, now)
            case ShardUp():
                self._drafting.up(event)
            case ShardLost():
                self._drafting.lost(event)
            case DraftsOverdue():
                commands = [*self._drafting.overdue(event.phase)]
        commands[:0] = self._drafting.switch()
        if self._live and self._in_flight is None and not self._drafting.is_waiting:
            self._num_steps += 1
            self._in_flight = self._planner.plan(self._num_steps, now)
            self._drafting.planned()
            self._counters.plan(self._in_flight)
            commands.insert(0, self._in_flight)
        elif not self._live:
            self._planner.pace.rested()
        if self._checks_always:
            self.check()
        return commands

    def story(self, request_id: str) -> list[str]:
        """What happened to a request, one line per event; also for one that finished not long ago."""
        return self._stories.tell(request_id)

    def stats(self) -> Stats:
        """The counts; the shell adds the times, which are not known here."""
        shards, counters = self._drafting.shards, self._counters
        return Stats(
            num_steps=self._num_steps,
            has_work=self.has_work,
            num_running=len(self._planner.running),
            num_waiting=len(self._queue),
            num_pages=self.limits.num_pages,
            num_free_pages=self._pool.num_free,
            num_preemptions=self._planner.num_preemptions,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_generated_tokens=counters.num_generated_tokens,
            num_ignored_messages=counters.num_ignored,
            num_prefix_queries=self._planner.num_prefix_queries,
            num_prefix_hits=self._planner.num_prefix_hits,
            num_drafts=counters.num_drafts,
            num_draft_tokens=counters.num_draft_tokens,
            num_accepted_tokens=sum(counters.accepted_per_pos),
            accepted_per_pos=counters.accepted_per_pos,
            num_draft_phases=self._drafting.phase,
            num_rows=counters.num_rows,
            steps_by_rows=counters.steps_by_rows,
            num_rejected=counters.num_rejected,
            num_corrupted=counters.num_corrupted,
            num_verify_steps=counters.num_verify_steps,
            verify_s=counters.verify_s,
            blocks_by_len=counters.by_len,
            num_proposed_tokens=self._drafting.num_proposed,
            num_propose_choices=self._drafting.num_choices[Phase.PROPOSE],
            num_commit_choices=self._drafting.num_choices[Phase.COMMIT],
            num_rest_choices=self._drafting.num_choices[Phase.NONE],
            budget_mode=self._drafting.mode,
            last_num_drafts=counters.last_num_drafts,
            num_commit_rows=sum(shard.num_commit_rows for shard in shards),
            num_slides=sum(shard.num_slides for shard in shards),
            num_context_restarts=self._drafting.num_restarts,
            num_late_drafts=self._drafting.num_late,
            shards=[shard.stats() for shard in shards],
        )

    def check(self) -> None:
        """Verify every invariant; AssertionError names the one that broke."""
        self._pool.check()
        running, waiting = self._planner.running, list(self._queue)
        self._check_requests(running, waiting)
        chunks = {} if self._in_flight is None else {c.sequence_id: c for c in self._in_flight.chunks}
        for sequence_id, request in running.items():
            self._check_running(sequence_id, request, chunks.get(sequence_id))
        half_read = [r.request_id for i, r in running.items() if _is_half_read(r, chunks.get(i))]
        assert len(half_read) <= 1, f"{half_read} are half read at once"
        assert self._pool.owners() == set(running) | set(self._doomed), (
            "pages of a sequence that does not run"
        )
        self._drafting.check(running)
        if self._in_flight is None:
            assert not self._doomed, "no step is in flight, yet pages wait for its end"
            assert not self._live or self._drafting.is_waiting, "work without a step in flight"
            assert self._live or self._pool.num_free == self._pool.num_pages, "idle, yet pages are owned"
        else:
            assert not self._drafting.is_waiting, "a draft phase while a step is in flight"
            num_rows = sum(chunk.num_rows for chunk in self._in_flight.chunks)
            assert 1 <= num_rows <= self.limits.max_num_batched_tokens, f"a step of {num_rows} rows"

    def _submit(self, submit: Submit, now: float) -> list[Command]:
        if submit.request_id in self._live:
            return [refuse_duplicate(submit)]
        if refused := refuse_unfit(submit, self.limits):
            return [refused]
        request = Request(submit, arrival_s=now, order=self._num_submitted, page_size=self.limits.page_size)
        if reason := finish_reason(request):
            output = Output(
                request_id=request.request_id, first_index=request.num_output, finish_reason=reason
            )
            return [Outputs([output])]
        # Places are counted over all that live, because a burst into an idle engine waits one step, no more.
        # A resumed stream was let in once already: it is never turned away in the middle.
        num_places = self.limits.max_num_seqs + self.limits.max_queued_requests
        if len(self._live) >= num_places and not submit.emitted_ids:
            self._counters.num_rejected += 1
            return [refuse_for_now(submit, len(self._queue), self._queue.longest_wait_s(now))]
        self._num_submitted += 1
        self._counters.num_prompt_tokens += request.prompt_len
        self._live[request.request_id] = request
        self._stories.begin(
            request.request_id, now, f"submitted: {request.prompt_len} prompt, {request.num_output} emitted"
        )
        self._queue.add(request)
        return []

    def _cancel(self, cancel: Cancel, now: float) -> list[Command]:
        request = self._live.get(cancel.request_id)
        if request is None:
            self._counters.num_ignored += 1
            return []
        output = Output(
            request_id=request.request_id, first_index=request.num_output, finish_reason="cancelled"
        )
        self._finish(request, "cancelled", now)
        return [Outputs([output])]

    def _settle(self, result: StepResult, now: float) -> list[Command]:
        plan = self._in_flight
        if plan is None or result.step != plan.step:
            self._counters.num_ignored += 1
            return []
        self._counters.ended(result.compute_s)
        decisions = {decision.sequence_id: decision for decision in result.decisions}
        self._require(len(decisions) == len(result.decisions), plan.step, "a sequence is decided twice")
        outputs = self._scored(result)
        self._in_flight = None
        for sequence_id in self._doomed:
            self._pool.release(sequence_id)
        self._doomed.clear()
        computed: list[Computed] = []
        verified: list[Verified] = []
        running, is_drafting = self._planner.running, self._drafting.is_active
        first_row = num_decided_rows = 0
        for chunk in plan.chunks:
            sequence_id = chunk.sequence_id
            decision = decisions.pop(sequence_id, None)
            num_decided = 0 if decision is None else len(decision.token_ids)
            if num_decided != chunk.num_decided and (decision is None or decision.is_finite):
                raise self._mismatch(plan.step, chunk, num_decided)
            request = running.get(sequence_id)
            if request is not None:  # else it was cancelled while the step ran
                output = settle(request, chunk, decision)
                if output is not None:
                    if output.num_drafts > 0 and output.finish_reason is None:
                        verified.append((sequence_id, output.num_drafts, output.num_accepted))
                    outputs.append(self._settled(request, output, result.compute_s, now))
                if is_drafting and (output is None or output.finish_reason != "error"):
                    num_rows = request.computed - chunk.start
                    computed.append(Computed(request, chunk.start, first_row, num_rows))
            first_row += chunk.num_rows
            num_decided_rows += chunk.num_decided
        self._require(
            not decisions, plan.step, f"decisions for sequences {sorted(decisions)} not in the plan"
        )
        self._counters.take(outputs)
        commands: list[Command] = []
        if is_drafting:
            self._drafting.settled(verified)
            # Steps that read a prompt are no measure: a row that decides nothing costs less.
            if num_decided_rows == first_row and self.limits.draft_budget:
                self._drafting.budget.verify.observe(first_row, 1e3 * result.compute_s)
            commands += self._drafting.begin(plan.step, computed, now)
        return [*commands, Outputs(outputs)] if outputs else commands

    def _scored(self, result: StepResult) -> list[Output]:
        """What the step told of prompts; of one that is read again after its answer began, nothing new."""
        outputs: list[Output] = []
        for scores in result.scores:
            request = self._planner.running.get(scores.sequence_id)
            if request is not None and request.num_output == 0:
                outputs.append(
                    Output(
                        request_id=request.request_id,
                        first_index=0,
                        prompt_logprobs=scores.logprobs,
                        first_scored=scores.first,
                    )
                )
        return outputs

    def _settled(self, request: Request, output: Output, compute_s: float, now: float) -> Output:
        """Draw the consequences of what a chunk gave its request; returns what the server is told."""
        if self.limits.prefix_cache and request.verified // self.limits.page_size > request.num_published:
            self._publish(request)
        if not request.has_spoken:
            request.has_spoken = True
            output = msgspec.structs.replace(
                output, num_cached_tokens=request.num_cached or 0, queue_s=request.queue_s
            )
            if output.first_index == 0 and output.finish_reason is None:
                self._stories.note(request.request_id, now, "first token")
        if request.is_traced:
            draft_s = self._drafting.last_s if self._drafting.is_active else 0.0
            output = msgspec.structs.replace(output, draft_s=draft_s, verify_s=compute_s)
        if (reason := output.finish_reason) is not None:
            if request.num_preemptions > 0:
                output = msgspec.structs.replace(output, num_preemptions=request.num_preemptions)
            self._counters.num_corrupted += reason == "error"
            self._finish(request, reason, now)
        return output

    def _publish(self, request: Request) -> None:
        """Make the pages known that are full and of which a finite decision was made."""
        keys = request.keys.upto(request.tokens, request.verified, request.num_published)
        self._pool.publish(request.sequence_id, request.num_published, keys)
        request.num_published += len(keys)

    def _finish(self, request: Request, reason: str, now: float) -> None:
        if request.state is State.WAITING:
            self._queue.remove(request)
        else:
            self._planner.drop(request)
            if reason not in ("stop", "length"):
                self._drafting.drop(request)  # else its last rows may still be worth a commit
            if self._in_flight is None:
                self._pool.release(request.sequence_id)
            else:
                self._doomed.append(request.sequence_id)  # a rank may still be writing them
        del self._live[request.request_id]
        request.finish()
        self._stories.end(request.request_id, now, f"{reason} after {request.num_output} tokens")

    def _mismatch(self, step: int, chunk: Chunk, num_decided: int) -> ProtocolError:
        error = ProtocolError(
            f"step {step}: sequence {chunk.sequence_id} decided {num_decided} tokens, not {chunk.num_decided}"
        )
        if request := self._planner.running.get(chunk.sequence_id):
            error.add_note("\n".join([request.request_id, *self.story(request.request_id)]))
        return error

    def _require(self, condition: bool, step: int, what: str) -> None:
        if not condition:
            raise ProtocolError(f"step {step}: {what}")

    def _check_requests(self, running: dict[int, Request], waiting: list[Request]) -> None:
        everyone = [*running.values(), *waiting]
        assert len(running) <= self.limits.max_num_seqs, f"{len(running)} sequences run"
        assert len(waiting) == len(self._queue), "the queue miscounts"
        assert len(everyone) == len(self._live), "a request lives nowhere or twice"
        for request in everyone:
            name = request.request_id
            assert self._live.get(name) is request, f"{name}: unknown request in a list"
            assert finish_reason(request) is None, f"{name}: complete, yet alive"
            assert request.computed < len(request.tokens), f"{name}: nothing left to compute"
            num_left = request.params.max_tokens - request.num_output
            assert request.most_drafts == min(request.max_draft_tokens, num_left - 1), f"{name}: most drafts"
        for request in waiting:
            assert request.state is State.WAITING, f"{request.request_id}: waits as {request.state.value}"
            assert request.sequence_id == -1, f"{request.request_id}: waits, yet has a sequence"
            assert request.computed == request.capacity == 0, f"{request.request_id}: waits, yet computed"

    def _check_running(self, sequence_id: int, request: Request, chunk: Chunk | None) -> None:
        name = request.request_id
        assert request.state is State.RUNNING, f"{name}: runs as {request.state.value}"
        assert request.sequence_id == sequence_id, f"{name}: filed under another sequence"
        num_pages = self._pool.num_owned(sequence_id)
        assert request.capacity == num_pages * self.limits.page_size, (
            f"{name}: capacity differs from its pages"
        )
        assert request.computed <= request.known <= len(request.tokens), f"{name}: known to {request.known}"
        assert request.verified <= request.computed, f"{name}: verified to {request.verified}"
        num_full = request.verified // self.limits.page_size
        assert request.num_published <= num_full, f"{name}: {request.num_published} pages published"
        self._check_private(request)
        end = request.computed
        if chunk is not None:
            assert chunk.start == request.computed, f"{name}: the step in flight starts elsewhere"
            end = chunk.start + chunk.num_rows
        # A rejected draft leaves the page that was taken for it.
        most = self.limits.pages_for(max(end, request.computed + 1 + self._drafting.most_drafts))
        assert self.limits.pages_for(end) <= num_pages <= most, f"{name}: {num_pages} pages for {end} rows"

    def _check_private(self, request: Request) -> None:
        table = self._pool.table(request.sequence_id)[request.verified // self.limits.page_size :]
        assert not any(map(self._pool.is_shared, table)), f"{request.request_id} writes to a shared page"


def _is_half_read(request: Request, chunk: Chunk | None) -> bool:
    """Whether tokens besides the anchor stay unread when the step in flight has ended."""
    if chunk is None:
        return request.num_pending > 1
    return chunk.start + chunk.num_rows < len(request.tokens)
