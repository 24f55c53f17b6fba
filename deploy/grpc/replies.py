"""Pieces of an answer as gRPC messages."""

import json
import time

from ...cluster.messages import TokenLogprobs
from ..api.accounting import Account
from ..api.gathered import Gathered, Piece
from ..api.text import Tokenizer
from ..api.validate import Choice, Job
from . import paceline_pb2 as pb


def chunk_of(reply_id: str, piece: Piece, tokenizer: Tokenizer) -> pb.GenerateChunk:
    return pb.GenerateChunk(
        id=reply_id,
        index=piece.index,
        text=piece.text,
        logprobs=_logprobs(piece.tokens, tokenizer),
        finish_reason=piece.finish_reason or "",
        token_ids=piece.token_ids,
    )


def usage_of(account: Account) -> pb.Usage:
    usage = account.usage()
    return pb.Usage(
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        total_tokens=usage["total_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
    )


def metrics_of(account: Account) -> str:
    """The report on drafting, where one was asked for."""
    told = account.metrics()
    return json.dumps(told["metrics"]) if told else ""


def whole(
    reply_id: str, model: str, job: Job, gathered: list[Gathered], account: Account, tokenizer: Tokenizer
) -> pb.GenerateResponse:
    generated = [
        pb.GeneratedChoice(
            index=choice.index,
            text=choice.echoed + told.text,
            logprobs=_logprobs(told.tokens, tokenizer),
            finish_reason=told.finish_reason or "",
            token_ids=told.token_ids,
            prompt_token_ids=choice.prompt_ids if choice.has_token_ids else [],
            prompt_logprobs=_logprobs(_scored(choice, told), tokenizer),
        )
        for choice, told in zip(job.choices, gathered, strict=True)
    ]
    return pb.GenerateResponse(
        id=reply_id,
        created=int(time.time()),
        model=model,
        choices=generated,
        usage=usage_of(account),
        metrics_json=metrics_of(account),
    )


def _scored(choice: Choice, told: Gathered) -> list[tuple[int, TokenLogprobs]]:
    """The prompt's tokens with what was told of them, in their order."""
    return [(choice.prompt_ids[place], at) for place, at in sorted(told.prompt_logprobs.items())]


def _logprobs(tokens: list[tuple[int, TokenLogprobs]], tokenizer: Tokenizer) -> list[pb.TokenLogprob]:
    return [
        pb.TokenLogprob(
            token_id=token_id,
            token=tokenizer.spell(token_id),
            logprob=at.logprob,
            top_logprobs=[
                pb.TopLogprob(token_id=other, token=tokenizer.spell(other), logprob=logprob)
                for other, logprob in at.top
            ],
        )
        for token_id, at in tokens
    ]
