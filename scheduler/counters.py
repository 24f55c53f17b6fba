"""What a scheduler counts from steps and outputs; what else Stats tells is counted where it happens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ..cluster.messages import Output, StepPlan


@dataclass(slots=True)
class Counters:
    """They only grow, but for `last_num_drafts`."""

    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_ignored: int = 0
    num_rejected: int = 0  # because the queue was full
    num_corrupted: int = 0  # because a logit was not finite
    num_rows: int = 0
    steps_by_rows: list[int] = field(default_factory=list[int])  # 1, 2, 3-4, 5-8, ... rows
    num_verify_steps: int = 0  # steps with drafts
    verify_s: float = 0.0  # what these took
    num_drafts: int = 0
    num_draft_tokens: int = 0
    by_accepted: list[int] = field(default_factory=list[int])  # blocks of which so many drafts stood
    by_len: list[int] = field(default_factory=list[int])  # blocks of so many drafts
    last_num_drafts: int = 0  # of the last step, the longest

    def take(self, outputs: Sequence[Output]) -> None:
        """Count what one step gave."""
        by_accepted, by_len = self.by_accepted, self.by_len
        for output in outputs:
            self.num_generated_tokens += len(output.token_ids)
            num_drafts = output.num_drafts
            if num_drafts == 0:
                continue
            self.num_drafts += 1
            self.num_draft_tokens += num_drafts
            while len(by_len) <= num_drafts:
                by_accepted.append(0)
                by_len.append(0)
            by_accepted[output.num_accepted] += 1
            by_len[num_drafts] += 1

    def plan(self, plan: StepPlan) -> None:
        """Count a step that begins."""
        num_rows = most = 0
        for chunk in plan.chunks:
            num_rows += chunk.num_rows
            if chunk.num_decided > most:
                most = chunk.num_decided
        self.num_rows += num_rows
        self.last_num_drafts = max(0, most - 1)
        place = (num_rows - 1).bit_length()
        while len(self.steps_by_rows) <= place:
            self.steps_by_rows.append(0)
        self.steps_by_rows[place] += 1

    def ended(self, compute_s: float) -> None:
        """The step that `plan` counted last has ended."""
        if self.last_num_drafts > 0:
            self.num_verify_steps += 1
            self.verify_s += compute_s

    @property
    def accepted_per_pos(self) -> list[int]:
        """How many drafts stood at each place behind the anchor."""
        return list(accumulate(reversed(self.by_accepted[1:])))[::-1]
