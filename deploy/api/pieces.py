"""From a job to its pieces: every door opens its requests here, in the name of a caller."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from ...cluster.errors import RequestError
from ..tracing import RequestTrace
from .front import Front
from .gathered import Piece
from .keys import Caller
from .streaming import merge, stream_choice
from .validate import Job


def pieces_of(
    front: Front, caller: Caller, reply_id: str, job: Job, trace: RequestTrace | None
) -> AsyncGenerator[Piece, None]:
    """The pieces of all choices. Closing the generator cancels them.

    Prefixes are shared within the caller's namespace, and its tokens are counted. RequestError 504 when the
    job's time is over.
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
    if job.timeout_s is not None:
        pieces = _timed(pieces, job.timeout_s)
    return _metered(pieces, caller, job.num_prompt_tokens) if caller.is_metered else pieces


async def _timed(pieces: AsyncGenerator[Piece, None], timeout_s: float) -> AsyncGenerator[Piece, None]:
    """The pieces that come in time; then what makes them is cancelled, wherever it stands."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    async with aclosing(pieces):
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    piece = await anext(pieces, None)
            except TimeoutError:
                raise RequestError(
                    f"the answer was not whole within {timeout_s:g} s, the 'timeout' of this request",
                    status=504,
                    code="deadline_exceeded",
                    error_type="timeout_error",
                ) from None
            if piece is None:
                return
            yield piece


async def _metered(
    pieces: AsyncGenerator[Piece, None], caller: Caller, num_prompt_tokens: int
) -> AsyncGenerator[Piece, None]:
    """The pieces, counted for their caller: the prompt at once, and what is made until it leaves."""
    caller.charge(num_prompt_tokens)
    async with aclosing(pieces):
        async for piece in pieces:
            caller.charge(piece.num_tokens)
            yield piece
