"""What is kept of a batch, and how /v1/batches tells it."""

from typing import Any

import msgspec

WINDOW_S = 24 * 3600  # after which a batch expires
DEFAULT_OUTPUT_S = 30 * 24 * 3600  # how long its output is kept
OPEN = ("validating", "in_progress")


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_expires_after_s: int = DEFAULT_OUTPUT_S


class BatchState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far it is. Times are Unix times."""

    status: str = "validating"
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[dict[str, Any]] = []


def batch_object(record: BatchRecord, state: BatchState, cancelling_at: int | None) -> dict[str, Any]:
    """OpenAI's batch object; `cancelling_at` is when somebody cancelled it."""
    status = state.status
    if status in OPEN and cancelling_at is not None:
        # One that waits for others before it has nothing to stop.
        status = "cancelling" if state.in_progress_at is not None else "cancelled"
    counts = {"total": state.num_lines, "completed": state.num_completed, "failed": state.num_failed}
    further: dict[str, Any] = {
        "in_progress_at": state.in_progress_at,
        "finalizing_at": state.finalizing_at,
        "completed_at": state.completed_at,
        "failed_at": state.failed_at,
        "expired_at": state.expired_at,
        "cancelling_at": cancelling_at,
        "cancelled_at": state.cancelled_at,
        "output_file_id": state.output_file_id,
        "error_file_id": state.error_file_id,
        "errors": {"object": "list", "data": state.errors} if state.errors else None,
        "metadata": record.metadata,
    }
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "input_file_id": record.input_file_id,
        "completion_window": "24h",
        "status": status,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "request_counts": counts,
        **{name: value for name, value in further.items() if value is not None},
    }
