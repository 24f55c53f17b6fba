"""The waiting room: first come, first served within a priority; waiting raises priority.

A request's effective priority is `priority - floor(waited / aging_s)`, so whoever waits long enough passes
any newcomer. Within one class the eldest is also the best, so only the heads of the classes need comparing.
"""

from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter

from .request import Request

_order = attrgetter("order")


class WaitingQueue:
    """Owns the requests that wait. A preempted one returns to its old place, ahead of later arrivals."""

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s
        self._classes: dict[int, list[Request]] = {}  # by priority, each sorted by order of arrival
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        for requests in self._classes.values():
            yield from requests

    def add(self, request: Request) -> None:
        """Put a request in its place by order of arrival."""
        requests = self._classes.setdefault(request.priority, [])
        requests.insert(bisect_left(requests, request.order, key=_order), request)
        self._num_waiting += 1

    def remove(self, request: Request) -> None:
        """Take out a request that waits here."""
        requests = self._classes[request.priority]
        index = bisect_left(requests, request.order, key=_order)
        assert requests[index] is request
        del requests[index]
        if not requests:
            del self._classes[request.priority]
        self._num_waiting -= 1

    def best(self, now: float) -> Request | None:
        """Whose turn it is; ties go to the eldest."""
        heads = (requests[0] for requests in self._classes.values())
        return min(heads, key=lambda head: (self._effective_priority(head, now), head.order), default=None)

    def longest_wait_s(self, now: float) -> float:
        """How long the eldest has waited: what a newcomer must expect when the queue is full."""
        return max((now - requests[0].arrival_s for requests in self._classes.values()), default=0.0)

    def _effective_priority(self, request: Request, now: float) -> int:
        return request.priority - int((now - request.arrival_s) // self._aging_s)
