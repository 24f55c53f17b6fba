"""The parts of the scheduler on their own: pages, the waiting queue, stories, a request's states, limits."""

import pytest

from paceline.cluster.config import EngineConfig
from paceline.cluster.messages import SamplingParams, Submit
from paceline.scheduler.limits import Limits
from paceline.scheduler.pages import PagePool
from paceline.scheduler.queue import WaitingQueue
from paceline.scheduler.request import TRANSITIONS, Request, State
from paceline.scheduler.story import EVENTS_PER_REQUEST, NUM_FINISHED_KEPT, Stories


def request_of(order: int, *, priority: int = 0, arrival_s: float = 0.0) -> Request:
    submit = Submit(
        request_id=f"r{order}", prompt_ids=[1], params=SamplingParams(max_tokens=4), priority=priority
    )
    return Request(submit, arrival_s=arrival_s, order=order, page_size=4)


def test_pages_have_one_owner_and_come_home_once() -> None:
    """Extending takes free pages only; releasing twice frees nothing."""
    pool = PagePool(4)
    assert pool.extend(7, 3) == [0, 1, 2]
    assert pool.extend(8, 1) == [3]
    assert (pool.table(7), pool.owners(), pool.num_free) == ([0, 1, 2], {7, 8}, 0)
    pool.check()
    assert (pool.release(7), pool.release(7), pool.num_free) == (3, 0, 3)
    pool.check()
    with pytest.raises(AssertionError, match="wanted"):
        pool.extend(9, 4)


def test_an_empty_extension_makes_no_owner() -> None:
    """Asking for no page leaves no trace."""
    pool = PagePool(2)
    assert pool.extend(1, 0) == []
    assert pool.owners() == set()


def test_queue_is_first_come_first_served_within_a_class() -> None:
    """A returning elder goes to its old place."""
    queue = WaitingQueue(aging_s=10.0)
    elder, middle, newest = (request_of(i) for i in range(3))
    queue.add(middle)
    queue.add(newest)
    queue.add(elder)
    order: list[int] = []
    while request := queue.best(0.0):
        order.append(request.order)
        queue.remove(request)
    assert order == [0, 1, 2]
    assert len(queue) == 0


def test_no_stream_of_urgent_newcomers_starves_a_waiter() -> None:
    """Aging bounds the wait: urgent ones keep coming, and the waiter is served all the same."""
    queue = WaitingQueue(aging_s=10.0)
    waiter = request_of(0, priority=3)
    queue.add(waiter)
    served: list[Request] = []
    while waiter not in served and len(served) < 100:
        now = float(len(served))
        queue.add(request_of(len(served) + 1, priority=0, arrival_s=now))
        best = queue.best(now)
        assert best is not None
        queue.remove(best)
        served.append(best)
    assert 30 <= len(served) <= 41


def test_longest_wait() -> None:
    """The eldest over all classes counts."""
    queue = WaitingQueue(aging_s=10.0)
    assert queue.longest_wait_s(5.0) == 0.0
    queue.add(request_of(1, arrival_s=4.0))
    queue.add(request_of(0, priority=1, arrival_s=1.0))
    assert queue.longest_wait_s(5.0) == 4.0


def test_stories_are_bounded() -> None:
    """The last events of a request, and the last finished requests, are kept."""
    stories = Stories()
    for i in range(NUM_FINISHED_KEPT + 1):
        stories.begin(f"r{i}", 0.0, "submitted")
        stories.end(f"r{i}", 1.0, "stop")
    assert stories.tell("r0") == []
    assert stories.tell("r1") == ["+0.000 s  submitted", "+1.000 s  stop"]
    stories.begin("long", 0.0, "submitted")
    for i in range(2 * EVENTS_PER_REQUEST):
        stories.note("long", float(i), f"event {i}")
    assert len(stories.tell("long")) == EVENTS_PER_REQUEST


@pytest.mark.parametrize("source", list(State))
@pytest.mark.parametrize("target", list(State))
def test_only_the_listed_transitions_are_possible(source: State, target: State) -> None:
    """A request refuses every other change of state."""
    request = request_of(0)
    request.state = source
    change = {
        State.RUNNING: lambda: request.start(0),
        State.WAITING: request.preempt,
        State.FINISHED: request.finish,
    }[target]
    if target in TRANSITIONS[source]:
        change()
        assert request.state is target
    else:
        with pytest.raises(AssertionError, match=r"waiting|running|finished"):
            change()


def test_limits_come_from_configuration_and_ranks() -> None:
    """Configured numbers are taken over; partial pages count whole."""
    limits = Limits.of(EngineConfig(max_num_seqs=3, page_size=8), max_model_len=64, num_pages=5)
    assert (limits.max_num_seqs, limits.page_size, limits.max_model_len, limits.num_pages) == (3, 8, 64, 5)
    assert [limits.pages_for(n) for n in (0, 1, 8, 9)] == [0, 1, 1, 2]
