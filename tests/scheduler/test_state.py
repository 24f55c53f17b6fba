"""The rules of the state machine, one by one: events in, commands compared."""

import pytest
from fake_ranks import FakeRanks, Resident, next_token, undisturbed

from paceline.cluster.errors import ProtocolError
from paceline.cluster.messages import (
    Admit,
    Cancel,
    Chunk,
    Decision,
    Output,
    Outputs,
    Refused,
    SamplingParams,
    StepPlan,
    StepResult,
    Submit,
)
from paceline.scheduler.events import Command
from paceline.scheduler.limits import Limits
from paceline.scheduler.planning import PINNED_AFTER
from paceline.scheduler.state import Scheduler


def limits_of(**changes: int | float) -> Limits:
    defaults = {
        "num_pages": 32,
        "page_size": 4,
        "max_model_len": 100,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_queued_requests": 4,
        "aging_s": 30.0,
    }
    return Limits(**{**defaults, **changes})  # pyright: ignore[reportArgumentType]


def submit_of(
    request_id: str = "a",
    prompt_ids: list[int] | None = None,
    *,
    max_tokens: int = 4,
    emitted_ids: list[int] | None = None,
    priority: int = 0,
    stop_token_ids: list[int] | None = None,
    logprobs: int | None = None,
) -> Submit:
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_token_ids or [], logprobs=logprobs)
    return Submit(
        request_id=request_id,
        prompt_ids=prompt_ids or [1, 2, 3],
        params=params,
        emitted_ids=emitted_ids or [],
        priority=priority,
    )


def plan_in(commands: list[Command]) -> StepPlan:
    assert isinstance(commands[0], StepPlan)
    return commands[0]


def outputs_in(commands: list[Command]) -> list[Output]:
    return [output for command in commands if isinstance(command, Outputs) for output in command.outputs]


def finish_all(scheduler: Scheduler, ranks: FakeRanks, plan: StepPlan, now: float = 0.0) -> list[Output]:
    """Answer plans until there is no work; returns everything emitted."""
    outputs: list[Output] = []
    commands: list[Command] = [plan]
    while commands and isinstance(commands[0], StepPlan):
        commands = scheduler.handle(ranks.execute(commands[0]), now)
        outputs += outputs_in(commands)
    return outputs


def tokens_of(outputs: list[Output], request_id: str) -> list[int]:
    return [token for output in outputs if output.request_id == request_id for token in output.token_ids]


def test_one_request_from_start_to_end() -> None:
    """Admit with the prompt, then rows of one anchor each; a page when a row needs one; the end frees all."""
    scheduler = Scheduler(limits_of(), check=True)
    submit = submit_of(prompt_ids=[1, 2, 3], max_tokens=3)

    commands = scheduler.handle(submit, 0.0)
    assert commands == [
        StepPlan(
            step=1,
            admit=[Admit(0, [1, 2, 3], 3, submit.params)],
            chunks=[Chunk(0, 0, 3, [], [0], 1)],
        )
    ]
    commands = scheduler.handle(StepResult(step=1, decisions=[Decision(0, [11])]), 0.1)
    assert commands == [
        StepPlan(step=2, chunks=[Chunk(0, 3, 1, [11], [], 1)]),
        Outputs([Output(request_id="a", first_index=0, token_ids=[11])]),
    ]
    commands = scheduler.handle(StepResult(step=2, decisions=[Decision(0, [12])]), 0.2)
    assert plan_in(commands) == StepPlan(step=3, chunks=[Chunk(0, 4, 1, [12], [1], 1)])
    commands = scheduler.handle(StepResult(step=3, decisions=[Decision(0, [13])]), 0.3)
    assert commands == [
        Outputs([Output(request_id="a", first_index=2, token_ids=[13], finish_reason="length")])
    ]
    stats = scheduler.stats()
    assert (stats.has_work, stats.num_free_pages, stats.num_generated_tokens) == (False, 32, 3)
    assert (stats.num_steps, stats.num_prompt_tokens) == (3, 3)


def test_release_goes_out_with_the_next_plan() -> None:
    """The ranks are told to drop a finished sequence when there is next something to do."""
    scheduler = Scheduler(limits_of(), check=True)
    scheduler.handle(submit_of("a", max_tokens=1), 0.0)
    scheduler.handle(StepResult(step=1, decisions=[Decision(0, [9])]), 0.0)
    plan = plan_in(scheduler.handle(submit_of("b", max_tokens=1), 0.0))
    assert plan.release == [0]
    assert [admit.sequence_id for admit in plan.admit] == [1]


def test_stop_token_ends_and_wins_over_length() -> None:
    """A stop token is emitted, ends the request, and names the reason even at the last place."""
    scheduler = Scheduler(limits_of(), check=True)
    scheduler.handle(submit_of(max_tokens=1, stop_token_ids=[5]), 0.0)
    commands = scheduler.handle(StepResult(step=1, decisions=[Decision(0, [5])]), 0.0)
    assert outputs_in(commands) == [
        Output(request_id="a", first_index=0, token_ids=[5], finish_reason="stop")
    ]


def test_long_prompt_is_read_in_chunks_beside_decodes() -> None:
    """Decodes come first with one row each; the prompt gets what is left of the budget; it decides once."""
    scheduler = Scheduler(limits_of(max_num_batched_tokens=8), check=True)
    ranks = FakeRanks(32, 4)
    plan = plan_in(scheduler.handle(submit_of("short", [1, 2], max_tokens=8), 0.0))
    assert scheduler.handle(submit_of("long", list(range(20)), max_tokens=2), 0.0) == []
    rows: list[list[tuple[int, int, int, int]]] = []
    commands: list[Command] = [plan]
    for _ in range(4):
        commands = scheduler.handle(ranks.execute(plan_in(commands)), 0.0)
        chunks = plan_in(commands).chunks
        rows.append([(c.sequence_id, c.start, c.num_rows, c.num_decided) for c in chunks])
    assert rows == [
        [(0, 2, 1, 1), (1, 0, 7, 0)],
        [(0, 3, 1, 1), (1, 7, 7, 0)],
        [(0, 4, 1, 1), (1, 14, 6, 1)],
        [(0, 5, 1, 1), (1, 20, 1, 1)],
    ]


def test_resumed_request_goes_on_after_what_was_emitted() -> None:
    """Emitted tokens are context, count in max_tokens, and are not sent again."""
    submit = submit_of(max_tokens=6)
    expected, _ = undisturbed(submit.prompt_ids, submit.params)
    scheduler, ranks = Scheduler(limits_of(), check=True), FakeRanks(32, 4)
    plan = plan_in(scheduler.handle(submit_of(max_tokens=6, emitted_ids=expected[:4]), 0.0))
    assert (plan.admit[0].token_ids, plan.admit[0].prompt_len) == ([1, 2, 3, *expected[:4]], 3)
    outputs = finish_all(scheduler, ranks, plan)
    assert tokens_of(outputs, "a") == expected[4:]
    assert outputs[0].first_index == 4


@pytest.mark.parametrize(("emitted_ids", "reason"), [([8, 9], "length"), ([5], "stop")])
def test_resumed_request_that_was_complete_ends_at_once(emitted_ids: list[int], reason: str) -> None:
    """Nothing is computed for a journal that needs nothing more."""
    scheduler = Scheduler(limits_of(), check=True)
    submit = submit_of(max_tokens=2, emitted_ids=emitted_ids, stop_token_ids=[5])
    [output] = outputs_in(scheduler.handle(submit, 0.0))
    assert (output.first_index, output.token_ids, output.finish_reason) == (len(emitted_ids), [], reason)
    assert not scheduler.has_work


def test_cancel_in_the_queue_and_cancel_of_a_stranger() -> None:
    """A waiting request ends at once; an unknown id is counted and ignored."""
    scheduler = Scheduler(limits_of(max_num_seqs=1), check=True)
    scheduler.handle(submit_of("a"), 0.0)
    scheduler.handle(submit_of("b"), 0.0)
    assert outputs_in(scheduler.handle(Cancel(request_id="b"), 0.0)) == [
        Output(request_id="b", first_index=0, finish_reason="cancelled")
    ]
    assert scheduler.handle(Cancel(request_id="b"), 0.0) == []
    assert scheduler.stats().num_ignored_messages == 1


def test_cancel_in_flight_keeps_the_pages_until_the_step_ends() -> None:
    """A rank may still write them: they are free, and the decision is dropped, when its answer has come."""
    scheduler = Scheduler(limits_of(), check=True)
    scheduler.handle(submit_of(max_tokens=3), 0.0)
    commands = scheduler.handle(Cancel(request_id="a"), 0.0)
    assert outputs_in(commands) == [Output(request_id="a", first_index=0, finish_reason="cancelled")]
    assert scheduler.stats().num_free_pages == 31
    assert scheduler.handle(StepResult(step=1, decisions=[Decision(0, [4])]), 0.0) == []
    assert scheduler.stats().num_free_pages == 32
    assert scheduler.stats().num_generated_tokens == 0


def test_id_may_be_used_again_after_its_end() -> None:
    """A cancelled request's late decision does not reach the next one of the same name."""
    scheduler, ranks = Scheduler(limits_of(), check=True), FakeRanks(32, 4)
    plan = plan_in(scheduler.handle(submit_of("a", [1, 2], max_tokens=2), 0.0))
    scheduler.handle(Cancel(request_id="a"), 0.0)
    assert scheduler.handle(submit_of("a", [3, 4], max_tokens=2), 0.0) == []
    outputs = finish_all(scheduler, ranks, plan)
    assert tokens_of(outputs, "a") == undisturbed([3, 4], SamplingParams(max_tokens=2))[0]


@pytest.mark.parametrize(
    ("submit", "code", "words"),
    [
        (
            Submit(request_id="a", prompt_ids=[], params=SamplingParams(max_tokens=1)),
            "invalid_value",
            "at least one",
        ),
        (submit_of(prompt_ids=[1] * 60, max_tokens=41), "context_length_exceeded", "lower max_tokens to 40"),
        (submit_of(prompt_ids=[1] * 100, max_tokens=1), "context_length_exceeded", "shorten the prompt"),
        (submit_of(prompt_ids=[1] * 30, max_tokens=11), "context_length_exceeded", "--kv-cache-gib"),
    ],
)
def test_what_can_never_run_is_refused(submit: Submit, code: str, words: str) -> None:
    """A 400 with numbers and a remedy; nothing is kept."""
    [refused] = Scheduler(limits_of(num_pages=10), check=True).handle(submit, 0.0)
    assert isinstance(refused, Refused)
    assert (refused.status, refused.code) == (400, code)
    assert words in refused.message
    assert "\n" not in refused.message


def test_a_request_that_just_fits_runs() -> None:
    """The whole pool may serve one request."""
    scheduler, ranks = Scheduler(limits_of(num_pages=10), check=True), FakeRanks(10, 4)
    submit = submit_of(prompt_ids=[1] * 30, max_tokens=10)
    outputs = finish_all(scheduler, ranks, plan_in(scheduler.handle(submit, 0.0)))
    assert tokens_of(outputs, "a") == undisturbed(submit.prompt_ids, submit.params)[0]


def test_live_id_is_refused_and_the_first_is_unharmed() -> None:
    """A duplicate gets a 400; the live request goes on."""
    scheduler, ranks = Scheduler(limits_of(), check=True), FakeRanks(32, 4)
    plan = plan_in(scheduler.handle(submit_of("a"), 0.0))
    [refused] = scheduler.handle(submit_of("a"), 0.0)
    assert isinstance(refused, Refused)
    assert (refused.status, refused.code) == (400, "duplicate_request_id")
    assert len(tokens_of(finish_all(scheduler, ranks, plan), "a")) == 4


def test_full_queue_refuses_newcomers_but_no_resumed_stream() -> None:
    """429, to be retried after as long as the eldest has waited; a stream once let in is let in again."""
    scheduler = Scheduler(limits_of(max_num_seqs=1, max_queued_requests=2), check=True)
    for name in ("a", "b", "c"):
        scheduler.handle(submit_of(name), 0.0)
    [refused] = scheduler.handle(submit_of("d"), 7.2)
    assert isinstance(refused, Refused)
    assert (refused.status, refused.code, refused.retry_after_s) == (429, "rate_limit_exceeded", 8)
    assert scheduler.handle(submit_of("e", emitted_ids=[9]), 7.2) == []
    assert scheduler.stats().num_waiting == 3


def test_priority_runs_first_and_waiting_outweighs_it() -> None:
    """Lower runs first; each aging_s of waiting is worth one step."""
    for waited_s, first in ((10.0, "urgent"), (31.0, "patient")):
        scheduler = Scheduler(limits_of(max_num_seqs=1), check=True)
        scheduler.handle(submit_of("running", max_tokens=1), 0.0)
        scheduler.handle(submit_of("patient", [1], priority=0), 0.0)
        scheduler.handle(submit_of("urgent", [2], priority=-1), waited_s)
        commands = scheduler.handle(StepResult(step=1, decisions=[Decision(0, [4])]), waited_s)
        expected = [2] if first == "urgent" else [1]
        assert plan_in(commands).admit[0].token_ids == expected


def test_nobody_overtakes_one_that_does_not_fit_yet() -> None:
    """A big request at the head waits for pages, and a small one behind it waits with it."""
    scheduler = Scheduler(limits_of(num_pages=8, max_num_batched_tokens=32), check=True)
    scheduler.handle(submit_of("running", [2] * 8, max_tokens=10), 0.0)
    scheduler.handle(submit_of("big", [1] * 24, max_tokens=4), 0.0)
    scheduler.handle(submit_of("small", [1], max_tokens=4), 0.0)
    plan = plan_in(scheduler.handle(StepResult(step=1, decisions=[Decision(0, [4])]), 0.0))
    assert plan.admit == []
    assert scheduler.stats().num_waiting == 2


def test_preempted_request_comes_back_with_the_same_tokens() -> None:
    """When pages run out the least computed goes, never the oldest; both end as if alone."""
    scheduler, ranks = Scheduler(limits_of(num_pages=8), check=True), FakeRanks(8, 4)
    old, young = submit_of("old", [1] * 6, max_tokens=20), submit_of("young", [2] * 5, max_tokens=20)
    plan = plan_in(scheduler.handle(old, 0.0))
    scheduler.handle(young, 0.0)
    outputs = finish_all(scheduler, ranks, plan)
    assert scheduler.stats().num_preemptions >= 1
    for submit in (old, young):
        expected, _ = undisturbed(submit.prompt_ids, submit.params)
        assert tokens_of(outputs, submit.request_id) == expected
    assert any("preempted" in line for line in scheduler.story("young"))
    assert not any("preempted" in line for line in scheduler.story("old"))


def test_preempted_request_returns_before_later_arrivals() -> None:
    """It keeps its place by arrival, as a new sequence that knows all its tokens."""
    scheduler, ranks = Scheduler(limits_of(num_pages=8, max_num_seqs=2), check=True), FakeRanks(8, 4)
    commands = scheduler.handle(submit_of("old", [1] * 6, max_tokens=20), 0.0)
    scheduler.handle(submit_of("young", [2] * 5, max_tokens=20), 0.0)
    scheduler.handle(submit_of("late", [3] * 5, max_tokens=20), 0.0)
    admitted: list[Admit] = []
    while commands and isinstance(commands[0], StepPlan):
        admitted += commands[0].admit
        commands = scheduler.handle(ranks.execute(commands[0]), 0.0)
    assert [admit.token_ids[0] for admit in admitted][:4] == [1, 2, 2, 3]
    assert [admit.sequence_id for admit in admitted] == list(range(len(admitted)))
    assert len(admitted[2].token_ids) > admitted[2].prompt_len == 5


def test_pinned_request_is_preempted_last() -> None:
    """After its eighth preemption a request stays while any other can go, though it has computed least."""
    scheduler = Scheduler(limits_of(num_pages=9, max_num_seqs=3, max_num_batched_tokens=64), check=True)
    ranks = FakeRanks(9, 4)
    commands = scheduler.handle(submit_of("old", [1] * 7, max_tokens=20), 0.0)
    scheduler.handle(submit_of("second", [2] * 7, max_tokens=20), 0.0)
    scheduler.handle(submit_of("pinned", [3] * 3, max_tokens=20), 0.0)
    scheduler._live["pinned"].num_preemptions = PINNED_AFTER
    while scheduler.stats().num_preemptions == 0:
        commands = scheduler.handle(ranks.execute(plan_in(commands)), 0.0)
    assert [request.request_id for request in scheduler._queue] == ["second"]


def test_non_finite_row_ends_its_request_only() -> None:
    """One request errs; the other gets its tokens."""
    scheduler = Scheduler(limits_of(), check=True)

    def is_finite(sequence: Resident) -> bool:
        return sequence.tokens[0] != 13 or len(sequence.tokens) < 4

    ranks = FakeRanks(32, 4, is_finite=is_finite)
    plan = plan_in(scheduler.handle(submit_of("good", [1, 2]), 0.0))
    scheduler.handle(submit_of("bad", [13, 2]), 0.0)
    outputs = finish_all(scheduler, ranks, plan)
    last = [output for output in outputs if output.request_id == "bad"][-1]
    assert (last.finish_reason, last.token_ids) == ("error", [])
    assert last.error is not None
    assert len(tokens_of(outputs, "bad")) == 2
    assert len(tokens_of(outputs, "good")) == 4


def test_logprobs_travel_with_their_tokens() -> None:
    """They are parallel to the tokens of each output."""
    scheduler, ranks = Scheduler(limits_of(), check=True), FakeRanks(32, 4)
    outputs = finish_all(scheduler, ranks, plan_in(scheduler.handle(submit_of(logprobs=1), 0.0)))
    for output in outputs:
        assert output.logprobs is not None
        assert [logprob.top[0][0] for logprob in output.logprobs] == output.token_ids


def test_answers_that_do_not_fit_the_plan() -> None:
    """Another step's is counted and ignored; missing or foreign decisions raise, with the request's story."""
    scheduler = Scheduler(limits_of(), check=True)
    scheduler.handle(submit_of(), 0.0)
    assert scheduler.handle(StepResult(step=7), 0.0) == []
    assert scheduler.stats().num_ignored_messages == 1
    with pytest.raises(ProtocolError, match="decided 0 tokens, not 1") as caught:
        scheduler.handle(StepResult(step=1), 0.0)
    assert any("submitted" in note for note in caught.value.__notes__)
    for decisions in ([Decision(0, [1]), Decision(5, [1])], [Decision(0, [1]), Decision(0, [1])]):
        scheduler = Scheduler(limits_of(), check=True)
        scheduler.handle(submit_of(), 0.0)
        with pytest.raises(ProtocolError):
            scheduler.handle(StepResult(step=1, decisions=decisions), 0.0)


def test_story_has_the_turns_of_a_life() -> None:
    """Submitted, admitted, first token, end; empty for a stranger."""
    scheduler, ranks = Scheduler(limits_of(), check=True), FakeRanks(32, 4)
    finish_all(scheduler, ranks, plan_in(scheduler.handle(submit_of(), 1.0)), now=1.25)
    assert scheduler.story("a") == [
        "+0.000 s  submitted: 3 prompt, 0 emitted",
        "+0.000 s  admitted as sequence 0",
        "+0.250 s  first token",
        "+0.250 s  length after 4 tokens",
    ]
    assert scheduler.story("nobody") == []


def test_the_fake_target_depends_on_every_token() -> None:
    """The other tests mean something: another history gives another token."""
    assert len({next_token([i, 2, 3], 0) for i in range(40)}) > 20
