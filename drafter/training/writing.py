"""What training asks of a target: to write behind prompts, and to keep its tap rows.

Who runs the target is not training's business: a `Writer` is handed in.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One sequence to write behind a prompt."""

    prompt_ids: list[int]
    max_tokens: int
    stop_ids: frozenset[int]
    seed: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class Written:
    """A sequence of L tokens, prompt included, and the tap rows [L - 1, taps, H] behind all but its last."""

    index: int  # of its task
    token_ids: list[int]
    prompt_len: int
    is_stopped: bool  # by a stop token, which is its last; else by length
    taps: Tensor | None

    @property
    def answer_ids(self) -> list[int]:
        """Without the prompt and the stop token."""
        return self.token_ids[self.prompt_len : len(self.token_ids) - self.is_stopped]


class Writer(Protocol):
    """A target that writes many sequences at once."""

    @property
    def max_len(self) -> int:
        """Tokens of a sequence, prompt included."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """What ends the target's turn."""
        ...

    def write(self, tasks: Iterator[Task], *, with_taps: bool) -> Iterator[Written]:
        """Each task's sequence, in the order in which they end; tasks are started in their own order."""
        ...
