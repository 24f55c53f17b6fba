"""What happened to a request, for the person who asks why it was slow or failed."""

from collections import OrderedDict, deque

EVENTS_PER_REQUEST = 64
NUM_FINISHED_KEPT = 256


class Stories:
    """Owns the event log of each live request and of the last finished ones; both bounded.

    Decode steps leave no trace here: a story has the turns of a request's life, not its every token.
    """

    def __init__(self) -> None:
        self._live: dict[str, deque[tuple[float, str]]] = {}
        self._finished: OrderedDict[str, deque[tuple[float, str]]] = OrderedDict()

    def begin(self, request_id: str, now: float, text: str) -> None:
        """Open a story; one of an earlier request with the same id is forgotten."""
        self._finished.pop(request_id, None)
        self._live[request_id] = deque([(now, text)], maxlen=EVENTS_PER_REQUEST)

    def note(self, request_id: str, now: float, text: str) -> None:
        """Add an event to a live request's story."""
        self._live[request_id].append((now, text))

    def end(self, request_id: str, now: float, text: str) -> None:
        """Add the last event and keep the story among the finished, the eldest of which may go."""
        story = self._live.pop(request_id)
        story.append((now, text))
        self._finished[request_id] = story
        if len(self._finished) > NUM_FINISHED_KEPT:
            self._finished.popitem(last=False)

    def tell(self, request_id: str) -> list[str]:
        """The events, one line each, with seconds since the first one kept; empty for an unknown request."""
        story = self._live.get(request_id) or self._finished.get(request_id)
        if not story:
            return []
        began = story[0][0]
        return [f"+{at - began:.3f} s  {text}" for at, text in story]
