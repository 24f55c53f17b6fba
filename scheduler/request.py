"""One request's life: its tokens, how far the ranks have computed them, and where it stands.

    WAITING --start--> RUNNING --finish--> FINISHED
       ^                  |
       '----preempt-------'        (WAITING --finish--> FINISHED when it is cancelled in the queue)

A stay on the ranks is a sequence with an id of its own. A preempted request forgets what was computed but not
what was emitted, so it comes back as a longer prompt and goes on with the token it would have drawn anyway.
"""

import sys
from enum import Enum

from ..cluster.messages import Submit
from .prefix_cache import KeyChain


class State(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.FINISHED}),
    State.RUNNING: frozenset({State.WAITING, State.FINISHED}),
    State.FINISHED: frozenset(),
}


class Request:
    """One request. While it lives `computed < len(tokens)`, so there is always a row to compute."""

    __slots__ = (
        "arrival_s",
        "capacity",
        "computed",
        "had_context",
        "has_spoken",
        "is_traced",
        "keys",
        "known",
        "max_draft_tokens",
        "most_drafts",
        "num_cached",
        "num_preemptions",
        "num_published",
        "order",
        "params",
        "priority",
        "prompt_len",
        "queue_s",
        "request_id",
        "sequence_id",
        "shard",
        "state",
        "stop_ids",
        "tokens",
        "verified",
    )

    def __init__(self, submit: Submit, *, arrival_s: float, order: int, page_size: int) -> None:
        self.request_id = submit.request_id
        self.params = submit.params
        self.priority = submit.priority  # lower runs first
        self.is_traced = submit.is_traced
        self.arrival_s = arrival_s
        self.queue_s = 0.0  # before its first stay
        self.order = order  # of arrival; the lowest is the oldest
        self.prompt_len = len(submit.prompt_ids)
        self.tokens = [*submit.prompt_ids, *submit.emitted_ids]
        self.stop_ids = frozenset(submit.params.stop_token_ids)
        self.state = State.WAITING
        self.sequence_id = -1  # of this stay; -1 while it has none
        self.computed = 0  # positions 0 .. computed - 1 have K/V
        self.known = 0  # positions 0 .. known - 1 are tokens the ranks have been told
        self.capacity = 0  # positions its pages can hold
        self.num_preemptions = 0
        self.keys = KeyChain(submit.cache_salt, page_size)
        self.num_cached: int | None = None  # tokens found in the prefix cache when it was first admitted
        self.verified = 0  # positions 0 .. verified - 1 have K/V of which a finite decision was made
        self.num_published = 0  # pages whose keys are known, or were known of others
        self.has_spoken = False  # an output was sent since it was submitted
        self.shard = -1  # the owner of this stay; -1 while it has none
        self.had_context = False  # in this stay, so that the next one is a restart
        limit = submit.max_draft_tokens
        self.max_draft_tokens = sys.maxsize if limit is None else limit
        # Drafts that the next step could emit: the last token of an output is never a draft's gain. The limit
        # on output also keeps a block below the context limit, which admission holds against it.
        self.most_drafts = min(self.max_draft_tokens, self.params.max_tokens - self.num_output - 1)

    @property
    def num_pending(self) -> int:
        """Tokens without K/V: 1 means the next row decides a token, more means a prompt is being read."""
        return len(self.tokens) - self.computed

    @property
    def num_output(self) -> int:
        """Tokens emitted so far, those before a resumption included."""
        return len(self.tokens) - self.prompt_len

    def start(self, sequence_id: int, num_cached: int = 0) -> None:
        """Begin a stay on the ranks, which learn all tokens at once; the first may be computed already."""
        self._become(State.RUNNING)
        self.sequence_id = sequence_id
        self.known = len(self.tokens)
        self.computed = self.verified = self.capacity = num_cached

    def preempt(self) -> None:
        """End the stay and forget what it computed."""
        self._become(State.WAITING)
        self.sequence_id = self.shard = -1
        self.computed = self.known = self.capacity = self.verified = self.num_published = 0
        self.had_context = False
        self.num_preemptions += 1

    def finish(self) -> None:
        """End the life of the request."""
        self._become(State.FINISHED)
        self.most_drafts = 0

    def _become(self, state: State) -> None:
        assert state in TRANSITIONS[self.state], f"{self.request_id}: {self.state.value} -> {state.value}"
        self.state = state
