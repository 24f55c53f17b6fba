"""The numbers a scheduler must stay within; known once the ranks have said how many pages they hold."""

from dataclasses import dataclass

from ..cluster.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Frozen for the life of an engine. Lengths count tokens."""

    num_pages: int  # of K/V, over all sequences; each rank holds its share of every page
    page_size: int  # tokens per page
    max_model_len: int  # prompt and output of one request
    max_num_seqs: int  # sequences running at once
    max_num_batched_tokens: int  # rows of one step
    max_queued_requests: int  # alive beyond max_num_seqs; a further one is refused
    aging_s: float  # waiting this long is worth one step of priority
    prefix_cache: bool = True  # pages of known prefixes are kept and shared
    num_draft_tokens: int | None = None  # per step and sequence; None: the most a shard makes
    min_draft_tokens: int = 0  # of the drafts there are, verified whatever the budget says
    draft_budget: bool = True  # verify drafts only as far as that pays
    itl_target_ms: float | None = None  # how long reading prompts may keep those waiting who decode
    context_cap: int = 0  # tokens of context per sequence; 0: no cap

    def __post_init__(self) -> None:
        assert self.num_pages > 0
        assert self.page_size > 0
        assert self.max_num_seqs > 0
        assert self.max_num_batched_tokens >= self.max_num_seqs, "every running sequence needs a row"

    @classmethod
    def of(cls, engine: EngineConfig, *, max_model_len: int, num_pages: int) -> "Limits":
        """Join what was configured with what the model and the ranks' memory allow."""
        return cls(
            num_pages=num_pages,
            page_size=engine.page_size,
            max_model_len=max_model_len,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_queued_requests=engine.max_queued_requests,
            aging_s=engine.aging_s,
            prefix_cache=engine.prefix_cache,
            num_draft_tokens=engine.num_draft_tokens,
            min_draft_tokens=engine.min_draft_tokens,
            draft_budget=engine.draft_budget,
            itl_target_ms=engine.itl_target_ms,
            context_cap=engine.context_cap,
        )

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold the K/V of this many tokens."""
        return -(-num_tokens // self.page_size)
