"""Every message that crosses a process, grouped by direction.

Messages are frozen `msgspec` structs, encoded as MessagePack; nothing on a channel is ever pickled.
The channel stamps each with (epoch, number); see `channel.py`.

Units: lengths and positions count tokens, absolute from the start of the sequence; times are seconds.
A `request_id` is the server's name for one stream of tokens; a `sequence_id` is the scheduler's name for
one stay of that request on the ranks. A request that was preempted comes back as a new sequence.
"""

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "cancelled", "error"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn. The defaults draw from the model's own distribution.

    A token is `argmax(processed_logits / temperature + gumbel(seed, position))`; temperature 0 is plain argmax.
    Processors act in this order: repetition, presence, frequency penalty; logit bias; masks (allowed ids, bad
    words, minimum length); temperature; top-k; top-p; min-p.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: dict[int, float] = {}
    bad_words: list[list[int]] = []  # token sequences that may not be completed
    allowed_token_ids: list[int] | None = None
    stop_token_ids: list[int] = []  # the end-of-sequence ids are put here by the server
    min_tokens: int = 0  # stop tokens are masked until this many are out
    logprobs: int | None = None  # how many alternatives to report; None: no log-probabilities
    seed: int = 0  # 0 .. 2**64 - 1


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Server to scheduler: a new request, or one resumed from its journal after a lost epoch."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    emitted_ids: list[int] = []  # tokens the client already has; counted in max_tokens, never sent again
    priority: int = 0  # lower runs first


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Server to scheduler: the client left, or a stop string was found. Unknown ids are ignored."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Server to scheduler, and scheduler to ranks: end your loop and return."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probabilities of one emitted token under the unprocessed logits."""

    logprob: float
    top: list[tuple[int, float]]  # (token id, logprob), best first


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step gave one request."""

    request_id: str
    first_index: int  # index of token_ids[0] among the request's output tokens
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None  # parallel to token_ids when asked for
    finish_reason: FinishReason | None = None
    error: str | None = None  # with finish_reason "error"


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to server: everything one step emitted."""

    outputs: list[Output]


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Scheduler to server: the request was not executed at all."""

    request_id: str
    status: int
    code: str
    message: str
    retry_after_s: int | None = None


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Scheduler to server, at least once a second: a heartbeat and the numbers behind /metrics.

    Counters only grow within an epoch.
    """

    num_steps: int = 0
    has_work: bool = False
    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_ignored_messages: int = 0
    plan_s: float = 0.0  # summed over steps: deciding
    wait_s: float = 0.0  # summed over steps: plan sent to last result received
    compute_s: float = 0.0  # summed over steps: rank 0's own measure


class Admit(msgspec.Struct, frozen=True, array_like=True):
    """A sequence joins the ranks: its tokens so far (prompt, then tokens emitted before a preemption)."""

    sequence_id: int
    token_ids: list[int]
    prompt_len: int
    params: SamplingParams


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """The rows of one sequence in one step: positions start .. start + num_rows - 1.

    `tail` are the tokens the ranks do not know yet; they end at the chunk's last row. A decode row is
    `num_rows=1, tail=[anchor], num_decided=1`; a drafted block `num_rows=k+1, tail=[anchor, d1..dk],
    num_decided=k+1`; a prefill chunk has an empty tail, and num_decided=1 only if it ends the prompt.
    """

    sequence_id: int
    start: int
    num_rows: int
    tail: list[int]
    new_pages: list[int]  # appended to the sequence's page table before the step
    num_decided: int  # how many of the last rows decide a token


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Scheduler to every rank. Applied in this order: release, admit, chunks."""

    step: int  # last + 1, or the rank refuses it
    release: list[int] = []  # sequence ids whose state is dropped
    admit: list[Admit] = []
    chunks: list[Chunk] = []


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """The tokens one chunk decided: the token after each of its last `num_decided` rows.

    `is_finite` is False when a deciding row had a non-finite logit; its tokens are then meaningless.
    """

    sequence_id: int
    token_ids: list[int]
    is_finite: bool = True
    logprobs: list[TokenLogprobs] | None = None


class StepResult(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank to scheduler. Every rank answers; only rank 0's decisions are filled in."""

    step: int
    decisions: list[Decision] = []
    compute_s: float = 0.0


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank to scheduler, once: weights are loaded, the page pool exists, the first plan may come."""

    rank: int
    num_pages: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank to scheduler, or scheduler to server: this process cannot go on; one line of why."""

    source: str
    reason: str


Message = Submit | Cancel | Shutdown | Outputs | Refused | Stats | StepPlan | StepResult | Ready | Failed
