"""What a stream tells of each step, if its request says `"speculation": {"steps": true}`.

A client cannot see in the text which of its tokens were drafted. Behind the chunk of a step comes one without
choices, whose field `speculation` says so; clients that did not ask never meet it.
"""

from typing import Any

from .gathered import Piece
from .validate import Job


class Steps:
    """Counts the tokens of every choice of one stream."""

    def __init__(self, job: Job) -> None:
        self._has_steps = job.choices[0].has_steps
        self._lens = [len(choice.prompt_ids) for choice in job.choices]

    def of(self, piece: Piece) -> dict[str, Any] | None:
        """The further fields of a step's chunk; None if nobody asked for it.

        `texts` are what each token added to the choice's text, the first `num_accepted` of them drafted; at
        the end of a stream there may be one more, of text that was held back. `num_drafts` is the k of the
        step, `context_len` the tokens of prompt and output so far.
        """
        if not self._has_steps:
            return None
        self._lens[piece.index] += piece.num_tokens
        told = {
            "index": piece.index,
            "num_drafts": piece.num_drafts,
            "num_accepted": piece.num_accepted,
            "texts": piece.texts,
            "context_len": self._lens[piece.index],
        }
        return {"speculation": told}
