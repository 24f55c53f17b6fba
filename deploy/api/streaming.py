"""From the engine's tokens to a client's text, and what happens when the client leaves.

Every generator here closes the one it reads from, so a client that leaves, at whatever point, cancels its
requests in the engine within one step.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...cluster.errors import EngineError, PacelineError
from ...cluster.messages import Output, SamplingParams
from ..metrics import RequestTimer
from .answer import Said, ThoughtReader
from .gathered import Piece
from .text import Detokenizer, StopMatcher, Tokenizer
from .validate import Choice

Result = TypeVar("Result")

_NUM_BUFFERED = 64  # pieces of a request with several choices that its client has not taken yet


class TokenSource(Protocol):
    """The part of an engine that makes tokens."""

    def stream(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        priority: int = 0,
        *,
        cache_salt: str = "",
        max_draft_tokens: int | None = None,
        is_traced: bool = False,
    ) -> AsyncGenerator[Output, None]:
        """The outputs of one request; closing the generator cancels it. RequestError when it is refused."""
        ...


class ClientGone(Exception):
    """The client closed its connection, or reads no more; there is no one to answer."""


async def stream_choice(
    source: TokenSource, tokenizer: Tokenizer, request_id: str, choice: Choice, timer: RequestTimer
) -> AsyncGenerator[Piece, None]:
    """The pieces of one choice; the last one has the finish reason.

    Raises RequestError when the engine refuses the request, EngineError when it fails it.
    """
    text = _ChoiceText(tokenizer, choice)
    last: Piece | None = None
    try:
        outputs = source.stream(
            request_id,
            choice.prompt_ids,
            choice.params,
            choice.priority,
            cache_salt=choice.cache_salt,
            max_draft_tokens=choice.max_draft_tokens,
            is_traced=timer.is_traced,
        )
        async with aclosing(outputs):
            async for output in outputs:
                if output.finish_reason in ("error", "cancelled"):
                    raise EngineError(output.error or "the engine gave up this request")
                piece = text.take(output)
                timer.add(piece.num_tokens, output)
                if piece.finish_reason is not None:
                    last = piece
                    break
                yield piece
        if last is None:
            raise EngineError("the engine ended this request without a reason")
        timer.finish("stop" if last.finish_reason == "tool_calls" else last.finish_reason or "")
        yield last
    except PacelineError:
        timer.finish("error")
        raise
    finally:
        timer.close()


class _ChoiceText:
    """Turns outputs into pieces: whole characters, nothing from a stop string on, no hidden stop token."""

    def __init__(self, tokenizer: Tokenizer, choice: Choice) -> None:
        self._index = choice.index
        self._stop_ids = frozenset(choice.params.stop_token_ids)
        self._min_tokens = choice.params.min_tokens
        self._num_tokens = 0
        self._has_token_ids = choice.has_token_ids
        self._has_steps = choice.has_steps
        self._matcher = StopMatcher(choice.stops, is_shown=choice.shows_stop)
        self._reader = choice.make_reader() if choice.make_reader is not None else None
        self._thoughts = self._reader if isinstance(self._reader, ThoughtReader) else None
        self._num_before_words = 0  # tokens that came before thoughts were over
        self._num_reasoning = 0  # of which so many were told of
        self._by_token = bool(choice.stops) or choice.has_steps or self._thoughts is not None
        self._detokenizer = Detokenizer(tokenizer, has_markers=self._reader is not None)
        self._has_called = False

    def take(self, output: Output) -> Piece:
        ids = output.token_ids
        reason = output.finish_reason
        is_hidden = reason == "stop" and bool(ids) and ids[-1] in self._stop_ids
        shown = ids[:-1] if is_hidden else ids
        texts = self._take_by_token(shown) if self._by_token else [self._detokenizer.push(shown)]
        num_taken = len(texts) if self._by_token else len(shown)
        if reason is not None and not self._matcher.is_matched:
            texts.append(self._matcher.push(self._detokenizer.flush()) + self._matcher.flush())
        num_tokens = len(ids)
        if self._matcher.is_matched:
            reason, num_tokens = "stop", num_taken
        tokens = list(zip(shown, output.logprobs, strict=False))[:num_taken] if output.logprobs else []
        said = self._read(texts, num_taken, is_last=reason is not None)
        self._has_called = self._has_called or bool(said.calls)
        if reason == "stop" and self._has_called:
            reason = "tool_calls"
        return Piece(
            index=self._index,
            text=said.content,
            reasoning=said.reasoning,
            calls=said.calls,
            num_tokens=num_tokens,
            num_reasoning=self._count_reasoning(),
            tokens=tokens,
            token_ids=ids[:num_tokens] if self._has_token_ids else [],
            finish_reason=reason,
            # a resumed stream has a first output again, whose prefix is ours
            num_cached_tokens=output.num_cached_tokens if output.first_index == 0 else 0,
            num_drafts=output.num_drafts,
            num_accepted=output.num_accepted,
            texts=texts if self._has_steps else None,
            stop_string=self._matcher.matched,
            prompt_logprobs=output.prompt_logprobs,
            first_scored=output.first_scored,
        )

    def _read(self, texts: Sequence[str], num_taken: int, *, is_last: bool) -> Said:
        """What these texts add; the first `num_taken` of them are a token's each, where that matters."""
        if self._reader is None:
            return Said(content="".join(texts))
        said = Said()
        for place, text in enumerate(texts):
            if self._thoughts is not None and place < num_taken and not self._thoughts.is_past_thoughts:
                self._num_before_words += 1
            said.add(self._reader.push(text))
        if is_last:
            said.add(self._reader.finish())
        return said

    def _count_reasoning(self) -> int:
        """Tokens of thoughts, tags included, that no piece has told of yet."""
        if self._thoughts is None or not self._thoughts.has_thought:
            return 0
        num_new = self._num_before_words - self._num_reasoning
        self._num_reasoning = self._num_before_words
        return num_new

    def _take_by_token(self, ids: Sequence[int]) -> list[str]:
        """What each of these tokens adds to the text, up to the one that completes a stop string."""
        texts: list[str] = []
        for token_id in ids:
            fresh = self._detokenizer.push((token_id,))
            self._num_tokens += 1
            texts.append(self._matcher.push(fresh) if self._num_tokens > self._min_tokens else fresh)
            if self._matcher.is_matched:
                break
        return texts


def merge(streams: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    """The pieces of several choices as they come. One that fails fails all."""
    return streams[0] if len(streams) == 1 else _merged(streams)


async def _merged(streams: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(_NUM_BUFFERED)

    async def drain(stream: AsyncGenerator[Piece, None]) -> None:
        ending: Exception | None = None
        try:
            async with aclosing(stream):
                async for piece in stream:
                    await queue.put(piece)
        except Exception as error:  # whatever it is, it is the reader's to see
            ending = error
        await queue.put(ending)

    tasks = [asyncio.create_task(drain(stream)) for stream in streams]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        await _cancelled(*tasks)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client goes first; then raises ClientGone."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        await _cancelled(working, leaving)


class EventStream(Response):
    """Server-sent events from a generator, which is closed when the client goes or stops reading."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], patience_s: float) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._patience_s = patience_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        async with aclosing(self._events):
            await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            try:
                async with asyncio.timeout(self._patience_s):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except TimeoutError:
                raise ClientGone(f"nothing was read for {self._patience_s:g} s") from None
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
