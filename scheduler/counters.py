"""What a scheduler counts from outputs; everything else that Stats tells is counted where it happens."""

from dataclasses import dataclass, field
from itertools import accumulate

from ..cluster.messages import Output


@dataclass(slots=True)
class Counters:
    """They only grow, but for `last_num_drafts`."""

    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_ignored: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    by_accepted: list[int] = field(default_factory=list[int])  # blocks of which so many drafts stood
    last_num_drafts: int = 0  # of the last step, the longest

    def take(self, output: Output) -> None:
        """Count what one step gave one request."""
        self.num_generated_tokens += len(output.token_ids)
        if output.num_drafts == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += output.num_drafts
        while len(self.by_accepted) <= output.num_drafts:
            self.by_accepted.append(0)
        self.by_accepted[output.num_accepted] += 1

    @property
    def accepted_per_pos(self) -> list[int]:
        """How many drafts stood at each place behind the anchor."""
        return list(accumulate(reversed(self.by_accepted[1:])))[::-1]
