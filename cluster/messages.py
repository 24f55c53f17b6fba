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


GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What an output has to match. Whoever masks by it compiles it: it is small, its compiled form is not.

    The server has compiled it once, within limits, before it sends it on.
    """

    kind: GrammarKind
    source: str  # JSON for a schema or a structural tag; EBNF's root rule is named "root"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn. The defaults draw from the model's own distribution.

    A token is `argmax(processed_logits / temperature + gumbel(seed, position))`; temperature 0: plain argmax.
    Processors act in this order: repetition, presence, frequency penalty; logit bias; masks (allowed ids, bad
    words, minimum length, then grammar); temperature; top-k; top-p; min-p.
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
    grammar: Grammar | None = None  # its end is an end-of-sequence token, so those must be stop tokens
    logprobs: int | None = None  # how many alternatives to report; None: no log-probabilities
    prompt_logprobs: int | None = None  # the same for the prompt's own tokens, which are then read anew
    seed: int = 0  # 0 .. 2**64 - 1


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Server to scheduler: a new request, or one resumed from its journal after a lost epoch."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    emitted_ids: list[int] = []  # tokens the client already has; counted in max_tokens, never sent again
    priority: int = 0  # lower runs first
    cache_salt: str = ""  # prefixes are shared only between requests of the same salt
    max_draft_tokens: int | None = None  # per step; None: no limit of its own, 0: this request never drafts
    is_traced: bool = False  # its outputs say what their steps took


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Server to scheduler: the client left, or a stop string was found. Unknown ids are ignored."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Server to scheduler, and scheduler to ranks and shards: end your loop and return."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probabilities of one emitted token under the unprocessed logits."""

    logprob: float
    top: list[tuple[int, float]]  # (token id, logprob), best first


class Output(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """What one step gave one request."""

    request_id: str
    first_index: int  # index of token_ids[0] among the request's output tokens
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None  # parallel to token_ids when asked for
    finish_reason: FinishReason | None = None
    error: str | None = None  # with finish_reason "error"
    prompt_logprobs: list[TokenLogprobs] = []  # of prompt tokens, when asked for; may come without tokens
    first_scored: int = 0  # position of the first of them
    num_drafts: int = 0  # drafted tokens that this step verified
    num_accepted: int = 0  # how many of them stood and are among token_ids
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache; in a request's first output only
    queue_s: float = 0.0  # from Submit to its first stay on the ranks; in a request's first output only
    num_preemptions: int = 0  # in a request's last output only
    draft_s: float = 0.0  # of a traced request: the draft phase before this step
    verify_s: float = 0.0  # of a traced request: rank 0's measure of this step


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


ShardState = Literal["absent", "ready", "lost", "quarantined"]
BudgetMode = Literal["off", "drafting", "resting", "warming", "probing"]


class ShardStats(msgspec.Struct, frozen=True, kw_only=True):
    """One shard as the scheduler sees it. Counters go on over its lives."""

    shard: int
    peer: str = ""  # "shard{shard}.{life}" of the last life; empty while there was none
    state: ShardState = "absent"
    num_sequences: int = 0  # whose context it holds
    num_pages: int = 0
    num_free_pages: int = 0  # cached ones included
    num_context_tokens: int = 0
    num_failed_drafts: int = 0  # proposals that came back "failed" or "not_finite"
    commit_s: float = 0.0  # its own measure, summed
    draft_s: float = 0.0  # its own measure, summed


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Scheduler to server, at least once a second: a heartbeat and the numbers behind /metrics.

    Counters only grow within an epoch. `num_drafts`, `num_draft_tokens`, `num_accepted_tokens` and
    `accepted_per_pos` count as vLLM's metrics of the same names do.
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
    num_rows: int = 0  # summed over steps
    steps_by_rows: list[int] = []  # how many steps had 1, 2, 3-4, 5-8, 9-16, ... rows
    num_rejected: int = 0  # requests refused because the queue was full
    num_corrupted: int = 0  # requests that ended because a logit was not finite
    num_prefix_queries: int = 0  # tokens that were looked up in the prefix cache
    num_prefix_hits: int = 0  # tokens found there
    num_drafts: int = 0  # blocks verified
    num_draft_tokens: int = 0  # drafted tokens verified
    num_accepted_tokens: int = 0  # of these, how many stood
    accepted_per_pos: list[int] = []  # how many stood at each place behind the anchor
    blocks_by_len: list[int] = []  # how many blocks were verified with 0, 1, 2, ... drafts (none with 0)
    num_proposed_tokens: int = 0  # drafted tokens that came from the shards, verified or not
    num_verify_steps: int = 0  # steps that verified drafts
    verify_s: float = 0.0  # summed over these steps: rank 0's own measure
    num_propose_choices: int = 0  # steps after which the shards were asked for drafts,
    num_commit_choices: int = 0  # only to keep their contexts,
    num_rest_choices: int = 0  # or left alone
    budget_mode: BudgetMode = "off"
    num_draft_phases: int = 0
    draft_s: float = 0.0  # summed over draft phases: shard plans sent to last drafts received
    last_num_drafts: int = 0  # the longest draft verified in the last step: the effective k
    num_commit_rows: int = 0
    num_slides: int = 0
    num_context_restarts: int = 0
    num_late_drafts: int = 0  # answers of a shard that nobody waited for any more
    shards: list[ShardStats] = []


class Admit(msgspec.Struct, frozen=True, array_like=True):
    """A sequence joins the ranks: its tokens so far (prompt, then tokens emitted before a preemption)."""

    sequence_id: int
    token_ids: list[int]
    prompt_len: int
    params: SamplingParams


class Chunk(msgspec.Struct, frozen=True, gc=False, array_like=True):
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


class Decision(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The tokens one chunk decided: the token after each of its last `num_decided` rows.

    `is_finite` is False when a deciding row had a non-finite logit; its tokens are then meaningless.
    """

    sequence_id: int
    token_ids: list[int]
    is_finite: bool = True
    logprobs: list[TokenLogprobs] | None = None


class PromptScores(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """How likely a prompt's own tokens were, from position `first` on; each is told by the row before it."""

    sequence_id: int
    first: int
    logprobs: list[TokenLogprobs]


class StepResult(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank to scheduler. Every rank answers; only rank 0's decisions and scores are filled in."""

    step: int
    decisions: list[Decision] = []
    scores: list[PromptScores] = []
    compute_s: float = 0.0


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank to scheduler, once: weights are loaded, the page pool exists, the first plan may come."""

    rank: int
    num_pages: int
    step_costs: list[tuple[int, float]] = []  # (rows, milliseconds) of steps that were tried out


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank or shard to scheduler, or scheduler to server: this process cannot go on; one line of why."""

    source: str
    reason: str


class ShardLost(msgspec.Struct, frozen=True, tag=True):
    """Server to scheduler: this life of a shard has ended. Said again, or of an unknown one: ignored."""

    peer: str
    is_dismissed: bool = False  # it was ended because no drafter is wanted, not lost


class ShardSilent(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to server: this life of a shard missed the draft deadline and is used no more."""

    peer: str


# Scheduler <-> shard. A sequence's context is the window [start, end) of absolute positions whose draft K/V
# the shard holds, in pages aligned with the target's: page i of its table covers positions
# (start // page_size + i) * page_size onwards. The scheduler alone knows which page is whose.


class Open(msgspec.Struct, frozen=True, array_like=True):
    """A sequence joins a shard: its tokens so far, and the context it finds there (cached pages, or none).

    The first commit comes at `end`; `end` stays equal to the number of computed tokens from then on.
    """

    sequence_id: int
    token_ids: list[int]
    prompt_len: int
    params: SamplingParams
    start: int = 0
    end: int = 0
    pages: list[int] = []  # of [start, end); whole pages shared with other sequences are never written


class Commit(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Tap rows first_row .. first_row + num_rows - 1 of `step` are the context at base_position onwards.

    base_position equals the window's end, or the shard refuses. A restart drops the window and begins a new
    one at base_position, further on: for rows that were lost. `new_pages` are exactly those the longer window
    lacks.
    """

    sequence_id: int
    step: int
    first_row: int
    num_rows: int
    base_position: int
    new_pages: list[int]
    is_restart: bool = False


class Slide(msgspec.Struct, frozen=True, array_like=True):
    """The window now starts at `new_start`, a multiple of the page size; pages before it are let go."""

    sequence_id: int
    new_start: int


class Propose(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Draft a block behind the window's end, where the anchor is.

    `new_tokens` are those since Open or the last Propose; the last is the anchor. The block's K/V goes behind
    the window into its last page and then `lookahead_pages`: private, as many as the block needs or more.
    """

    sequence_id: int
    new_tokens: list[int]
    lookahead_pages: list[int]


class ShardPlan(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Scheduler to a shard. Applied in this order: free, open, commits, slides, propose. Always answered."""

    number: int  # last + 1, or the shard refuses it
    num_drafts: int = 0  # per proposing sequence; at most ShardReady.max_drafts
    free: list[int] = []  # sequence ids whose state is dropped; unknown ones are ignored
    open: list[Open] = []
    commits: list[Commit] = []
    slides: list[Slide] = []
    propose: list[Propose] = []


class Draft(msgspec.Struct, frozen=True, array_like=True):
    """What follows one anchor: at most num_drafts tokens, none if the outcome is not "drafted".

    A confidence is the probability the shard gives its token, had the drafts before it stood.
    """

    sequence_id: int
    token_ids: list[int]
    confidences: list[float]
    outcome: Literal["drafted", "failed", "not_finite"] = "drafted"


class Drafts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Shard to scheduler: the ShardPlan of this number was applied; one draft per Propose, in its order."""

    number: int
    drafts: list[Draft] = []
    commit_s: float = 0.0
    draft_s: float = 0.0


class ShardReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Shard to scheduler, once: the proposer is loaded, the first plan may come.

    Its peer is named "shard{shard}.{life}", so that no answer of an earlier life is taken for this one's. If
    the earlier life still runs, this one takes its place between two steps, and that one is sent Shutdown.
    A proposer without taps keeps no context: it takes no commits, slides or pages.
    """

    shard: int
    max_drafts: int  # block size - 1
    tap_layer_ids: list[int] = []  # columns of the tap rows it reads, as indices of target blocks
    num_pages: int = 0
    max_context_len: int = 0  # a longer window adds nothing


Message = (
    Submit
    | Cancel
    | Shutdown
    | Outputs
    | Refused
    | Stats
    | StepPlan
    | StepResult
    | Ready
    | Failed
    | ShardLost
    | ShardSilent
    | ShardPlan
    | Drafts
    | ShardReady
)
