"""What drafting gave one stream, as vLLM reports it."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Acceptance:
    """The drafts of one stream that were verified, step by step. Steps without drafts are not among them."""

    drafted: list[int] = field(default_factory=list[int])
    accepted: list[int] = field(default_factory=list[int])  # parallel: of each step's drafts, how many stood

    def add(self, num_drafts: int, num_accepted: int) -> None:
        if num_drafts:
            self.drafted.append(num_drafts)
            self.accepted.append(num_accepted)

    def per_slot(self) -> list[float]:
        """Share of the drafts at each place behind the anchor that stood."""
        rates: list[float] = []
        for slot in range(max(self.drafted, default=0)):
            num_drafted = sum(count > slot for count in self.drafted)
            rates.append(sum(count > slot for count in self.accepted) / num_drafted)
        return rates

    def report(self, *, is_detailed: bool) -> dict[str, Any]:
        """vLLM's `metrics.speculative_decoding`, but `num_spec_tokens` is the longest draft there was.

        Field by field: "Per-Request Acceptance Metrics" in vLLM's documentation.
        """
        num_steps, num_drafts, num_accepted = len(self.drafted), sum(self.drafted), sum(self.accepted)
        longest = max(self.drafted, default=0)
        counts = Counter(self.accepted)
        report = {
            "mean_acceptance_length": 1 + num_accepted / max(num_steps, 1),
            "draft_acceptance_rate": num_accepted / max(num_drafts, 1),
            "acceptance_histogram": [counts[num] for num in range(longest + 1)],
            "num_spec_steps": num_steps,
            "num_accepted_draft_tokens": num_accepted,
            "num_draft_tokens": num_drafts,
            "num_spec_tokens": longest,
        }
        if is_detailed:
            report |= {"per_step_accepted": self.accepted, "per_step_drafted": self.drafted}
        return report
