"""From a job to its pieces: every door opens its requests here, in the name of a caller."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from ..tracing import RequestTrace
from .front import Front
from .keys import Caller
from .replies import Piece
from .streaming import merge, stream_choice
from .validate import Job


def pieces_of(
    front: Front, caller: Caller, reply_id: str, job: Job, trace: RequestTrace | None
) -> AsyncGenerator[Piece, None]:
    """The pieces of all choices. Closing the generator cancels them.

    Prefixes are shared within the caller's namespace, and its tokens are counted.
    """
    front.metrics.num_choices.observe(job.num_per_prompt)
    pieces = merge(
        [
            stream_choice(
                front.source,
                front.served.tokenizer,
                f"{reply_id}-{choice.index}",
                replace(choice, cache_salt=caller.salt(choice.cache_salt)),
                front.metrics.start(len(choice.prompt_ids), choice.params.max_tokens, trace),
            )
            for choice in job.choices
        ]
    )
    return _metered(pieces, caller, job.num_prompt_tokens) if caller.is_metered else pieces


async def _metered(
    pieces: AsyncGenerator[Piece, None], caller: Caller, num_prompt_tokens: int
) -> AsyncGenerator[Piece, None]:
    """The pieces, counted for their caller: the prompt at once, and what is made until it leaves."""
    caller.charge(num_prompt_tokens)
    async with aclosing(pieces):
        async for piece in pieces:
            caller.charge(piece.num_tokens)
            yield piece
