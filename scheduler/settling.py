"""What one decided chunk does to its request: the only place where a request's tokens grow."""

from ..cluster.messages import Chunk, Decision, FinishReason, Output
from .acceptance import num_standing
from .request import Request

NON_FINITE = "the model produced a non-finite logit for this request"


def finish_reason(request: Request) -> FinishReason | None:
    """Why the request is complete as it stands; None if it goes on. A stop token wins over the length."""
    num_output = len(request.tokens) - request.prompt_len
    if num_output > 0 and request.tokens[-1] in request.stop_ids:
        return "stop"
    if num_output >= request.params.max_tokens:
        return "length"
    return None


def settle(request: Request, chunk: Chunk, decision: Decision | None) -> Output | None:
    """Take over what a chunk computed and decided; None if it decided nothing.

    Drafts stand as far as they equal the decisions; what was decided behind the first that does not, or
    behind the token that completes the request, is dropped, and the rows of it count as never computed.
    """
    end = chunk.start + chunk.num_rows
    if decision is None:
        request.computed = end
        return None
    first_index = len(request.tokens) - request.prompt_len
    if not decision.is_finite:
        request.computed = end
        return Output(
            request_id=request.request_id, first_index=first_index, finish_reason="error", error=NON_FINITE
        )
    num_drafts = chunk.num_decided - 1
    num_left = request.params.max_tokens - first_index
    token_ids = decision.token_ids
    num_accepted = num_standing(chunk.tail[-num_drafts:], token_ids) if num_drafts else 0
    reason: FinishReason | None = None
    taken = token_ids if num_accepted == num_drafts else token_ids[: num_accepted + 1]
    if num_accepted + 1 >= num_left:
        taken, reason = taken[:num_left], "length"
    if not request.stop_ids.isdisjoint(taken):
        first_stop = next(index for index, token_id in enumerate(taken) if token_id in request.stop_ids)
        taken, reason = taken[: first_stop + 1], "stop"
    num_taken = len(taken)
    request.tokens += taken
    most_drafts = num_left - num_taken - 1  # negative only with a reason
    request.most_drafts = most_drafts if most_drafts < request.max_draft_tokens else request.max_draft_tokens
    request.computed = request.known = request.verified = end - chunk.num_decided + num_taken
    return Output(
        request_id=request.request_id,
        first_index=first_index,
        token_ids=taken,
        logprobs=None if decision.logprobs is None else decision.logprobs[:num_taken],
        finish_reason=reason,
        num_drafts=num_drafts,
        num_accepted=num_accepted if num_accepted < num_taken else num_taken,
    )
