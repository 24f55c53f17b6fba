"""What a request took and what drafting gave it, summed over its pieces."""

from typing import Any

from ..acceptance import Acceptance
from ..observing import current_record
from .gathered import Piece
from .validate import Job


class Account:
    """The totals of one answer."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._num_tokens = 0
        self._num_cached_tokens = 0
        self._num_reasoning = 0
        self._acceptance = Acceptance()
        if (record := current_record.get()) is not None:
            record.usage = self.usage

    def add(self, piece: Piece) -> None:
        self._num_tokens += piece.num_tokens
        self._num_reasoning += piece.num_reasoning
        if piece.index % self._job.num_per_prompt == 0:  # a prompt counts once, however many choices it has
            self._num_cached_tokens += piece.num_cached_tokens
        if self._job.report != "none":
            self._acceptance.add(piece.num_drafts, piece.num_accepted)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        num_prompt_tokens = self._job.num_prompt_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self._num_tokens,
            "total_tokens": num_prompt_tokens + self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens},
        }
        if self._num_reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": self._num_reasoning}
        return usage

    def metrics(self) -> dict[str, Any]:
        """The `metrics` field of the answer; nothing unless a report was asked for."""
        if self._job.report == "none":
            return {}
        report = self._acceptance.report(is_detailed=self._job.report == "detailed")
        return {"metrics": {"speculative_decoding": report}}
