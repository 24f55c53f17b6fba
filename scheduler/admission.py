"""Which requests are refused at the door, and what they are told: one line with numbers and the remedy."""

from math import ceil

from ..cluster.messages import Refused, Submit
from .limits import Limits

MAX_RETRY_AFTER_S = 60


def refuse_unfit(submit: Submit, limits: Limits) -> Refused | None:
    """Refuse what could never run, however long it waited."""
    prompt_len, max_tokens = len(submit.prompt_ids), submit.params.max_tokens
    if prompt_len == 0:
        return _refused(submit, "invalid_value", "the prompt has no tokens; send at least one")
    asked = f"the prompt has {prompt_len} tokens and max_tokens is {max_tokens}"
    if prompt_len + max_tokens > limits.max_model_len:
        room = limits.max_model_len - prompt_len
        remedy = f"lower max_tokens to {room}" if room > 0 else "shorten the prompt"
        return _refused(
            submit,
            "context_length_exceeded",
            f"{asked}: {prompt_len + max_tokens} together, above the model's {limits.max_model_len}; "
            f"{remedy}",
        )
    if limits.pages_for(prompt_len + max_tokens) > limits.num_pages:
        capacity = limits.num_pages * limits.page_size
        return _refused(
            submit,
            "context_length_exceeded",
            f"{asked}: {prompt_len + max_tokens} together, above the {capacity} that fit in this server's "
            "K/V memory; ask for less, or start the server with a larger --kv-cache-gib",
        )
    return None


def refuse_duplicate(submit: Submit) -> Refused:
    """Refuse an id that is in use."""
    return _refused(
        submit, "duplicate_request_id", f"request {submit.request_id!r} is still running; use another id"
    )


def refuse_for_now(submit: Submit, num_waiting: int, longest_wait_s: float) -> Refused:
    """Refuse because the queue is full; suggest as long as its eldest has waited."""
    retry_after_s = min(max(1, ceil(longest_wait_s)), MAX_RETRY_AFTER_S)
    return Refused(
        request_id=submit.request_id,
        status=429,
        code="rate_limit_exceeded",
        message=f"{num_waiting} requests are waiting already; try again in {retry_after_s} s",
        retry_after_s=retry_after_s,
    )


def _refused(submit: Submit, code: str, message: str) -> Refused:
    return Refused(request_id=submit.request_id, status=400, code=code, message=message)
