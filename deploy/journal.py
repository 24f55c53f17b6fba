"""The journal of one request: what its client asked for and what it was sent.

It outlives an epoch of the engine. After a loss the engine submits `resume()` again, and the stream goes on
where it stood. All methods belong to the event loop.
"""

import asyncio
from collections import deque

import msgspec

from ..cluster.errors import PacelineError, RequestError
from ..cluster.messages import Output, Submit


class Journal:
    """Invariant: `emitted_ids` are exactly the tokens of the outputs pushed, read or not."""

    def __init__(self, submit: Submit, max_backlog: int) -> None:
        self.request_id = submit.request_id
        self.is_finished = False  # the last output was pushed, or an error: nothing more will come
        self.num_submits = 0
        self.emitted_ids: list[int] = list(submit.emitted_ids)
        self._submit = submit
        self._max_backlog = max_backlog
        self._unread: deque[Output] = deque()
        self._num_unread_tokens = 0
        self._error: PacelineError | None = None
        self._has_news = asyncio.Event()

    def resume(self) -> Submit:
        """The request as the scheduler needs it now."""
        self.num_submits += 1
        return msgspec.structs.replace(self._submit, emitted_ids=self.emitted_ids)

    def push(self, output: Output) -> None:
        """Take one output; ends the request when its reader is too far behind."""
        assert not self.is_finished
        assert output.first_index == len(self.emitted_ids), "the engine checks the order"
        self.emitted_ids.extend(output.token_ids)
        self._unread.append(output)
        self._num_unread_tokens += len(output.token_ids)
        self.is_finished = output.finish_reason is not None
        if not self.is_finished and self._num_unread_tokens > self._max_backlog:
            self.fail(
                RequestError(
                    f"the reader is {self._num_unread_tokens} tokens behind; read faster or ask for fewer",
                    status=408,
                    code="slow_reader",
                    error_type="timeout_error",
                )
            )
        self._has_news.set()

    def fail(self, error: PacelineError) -> None:
        """End with `error`, which the reader meets after the outputs it has not read yet."""
        if not self.is_finished:
            self.is_finished = True
            self._error = error
            self._has_news.set()

    async def next(self) -> Output:
        """The next output; raises the error that ended the request."""
        while not self._unread:
            if self._error is not None:
                raise self._error
            self._has_news.clear()
            await self._has_news.wait()
        output = self._unread.popleft()
        self._num_unread_tokens -= len(output.token_ids)
        return output
