"""The state machine in virtual time: fairness, starvation, preemption, prefix hits, and how groups add up."""

from itertools import pairwise
from statistics import median

import msgspec
import pytest

from paceline.cluster.errors import UserError
from paceline.scheduler.limits import Limits
from paceline.scheduler.simulator import Costs, Drafter, Group, Served, Simulation
from paceline.scheduler.traces import Arrival, bursty, conversations, parse_trace, poisson

COSTS = Costs(step=((1, 25.0), (8, 27.0), (32, 50.0), (512, 600.0)), draft=((1, 4.0), (32, 30.0)))
TINY = Costs(step=((1, 1.0), (64, 4.0)))


def limits(**options: float | bool | None) -> Limits:
    defaults: dict[str, float | bool | None] = {
        "num_pages": 2000,
        "page_size": 16,
        "max_model_len": 4096,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
        "max_queued_requests": 1000,
        "aging_s": 30.0,
    }
    return msgspec.convert(defaults | options, Limits)


def simulate(
    trace: list[Arrival],
    num_groups: int = 1,
    costs: Costs = COSTS,
    drafter: Drafter | None = None,
    check: bool = False,
    **options: float | bool | None,
) -> tuple[Simulation, list[Served]]:
    groups = [Group(limits(**options), costs, drafter, seed=i, check=check) for i in range(num_groups)]
    simulation = Simulation(groups)
    return simulation, simulation.run(trace)


@pytest.mark.parametrize("chance", [None, 0.0, 0.8])
@pytest.mark.parametrize(
    "trace", [poisson(3.0, 20), bursty(3.0, 20), conversations(4, 3)], ids=["poisson", "bursty", "turns"]
)
def test_everything_in_a_trace_is_served_to_its_end(trace: list[Arrival], chance: float | None) -> None:
    drafter = None if chance is None else Drafter(chance=lambda _: chance)
    simulation, served = simulate(trace, drafter=drafter, check=True)
    assert len(served) == len(trace)
    assert all(s.finish_reason == "length" and s.num_tokens == s.arrival.output_len for s in served)
    assert all(s.times_s == sorted(s.times_s) for s in served)
    assert all(group.due_s is None for group in simulation.groups)


def test_a_trace_is_replayed_the_same_every_time() -> None:
    trace = bursty(3.0, 30)
    drafter = Drafter(chance=lambda _: 0.6)
    first, second = (simulate(trace, drafter=drafter)[1] for _ in range(2))
    assert [s.times_s for s in first] == [s.times_s for s in second]


def test_a_trace_file_is_read_and_a_wrong_line_named() -> None:
    trace = poisson(1.0, 3)
    assert parse_trace(msgspec.json.encode(arrival) for arrival in trace) == trace
    with pytest.raises(UserError, match="line 2"):
        parse_trace([msgspec.json.encode(trace[0]), b'{"at_s": 1, "prompt_len": 0, "output_len": 1}'])
    with pytest.raises(UserError, match="unknown field `len`"):
        parse_trace([b'{"at_s": 1, "len": 0}'])
    with pytest.raises(UserError, match="empty"):
        parse_trace([b"\n"])


def test_among_equals_whoever_came_first_is_answered_first() -> None:
    """More than there are places, all alike: first tokens come in the order of arrival."""
    trace = [Arrival(at_s=0.01 * index, prompt_len=40, output_len=20) for index in range(60)]
    _, served = simulate(trace, max_num_seqs=4)
    first_tokens = [round(s.due_s + s.ttft_s, 6) for s in served]
    assert first_tokens == sorted(first_tokens)


def test_nobody_starves_behind_those_who_matter_more() -> None:
    """A stream of important requests fills every place; aging lets an unimportant one in all the same."""
    flood = [Arrival(at_s=0.1 * i, prompt_len=16, output_len=8, priority=-1) for i in range(300)]
    humble = Arrival(at_s=0.05, prompt_len=16, output_len=8, priority=1)
    trace = sorted([*flood, humble], key=lambda arrival: arrival.at_s)
    costs = Costs(step=((1, 40.0),))
    waits = {}
    for aging_s in (4.0, 1e6):
        _, served = simulate(trace, costs=costs, max_num_seqs=1, max_num_batched_tokens=64, aging_s=aging_s)
        waits[aging_s] = next(s.ttft_s for s in served if s.arrival is humble)
    assert waits[4.0] < 40
    assert waits[1e6] > 80, "the flood is no flood: aging had nothing to do"


def test_with_few_pages_the_oldest_are_never_preempted_and_everybody_ends() -> None:
    trace = [Arrival(at_s=0.0, prompt_len=30, output_len=150) for _ in range(8)]
    simulation, served = simulate(
        trace, costs=TINY, num_pages=30, drafter=Drafter(chance=lambda _: 0.5), check=True
    )
    scheduler = simulation.groups[0].scheduler
    assert scheduler.stats().num_preemptions > 0
    assert {s.finish_reason for s in served} == {"length"}
    assert not any("preempted" in line for line in scheduler.story("0"))


def test_turns_of_a_conversation_find_what_the_last_ones_left() -> None:
    """Ten turns, sixteen sessions: what is read again is the new words, and what a page's rounding loses."""
    trace = conversations(16, 10, prompt_len=64, output_len=64)
    _, cold = simulate(trace, prefix_cache=False, num_pages=16 * 90)
    simulation, warm = simulate(trace, num_pages=16 * 90)
    later = [s for s in warm if s.prompt_len > 64]
    assert sum(s.num_cached for s in cold) == 0
    assert all(s.num_cached >= s.prompt_len - 64 - 2 * 16 for s in later)
    share = sum(s.num_cached for s in warm) / sum(s.prompt_len for s in warm)
    assert share > 0.8
    assert median(s.ttft_s for s in warm) < 0.5 * median(s.ttft_s for s in cold)
    assert simulation.groups[0].scheduler.stats().num_prefix_hits == sum(s.num_cached for s in warm)


def test_more_groups_serve_more_and_sessions_stay_where_their_pages_are() -> None:
    trace = bursty(8.0, 64, burst=32)
    one, four = (max(s.due_s + s.e2e_s for s in simulate(trace, n)[1]) for n in (1, 4))
    assert four < 0.6 * one
    _, served = simulate(conversations(8, 5), 4)
    homes = {(s.arrival.session, s.group) for s in served}
    assert len(homes) == 8
    assert {group for _, group in homes} == {0, 1, 2, 3}


def test_a_thousand_groups_are_one_heap() -> None:
    groups = [Group(limits(num_pages=64, max_num_seqs=4), COSTS) for _ in range(1000)]
    served = Simulation(groups).run(poisson(400.0, 400, output_len=4))
    assert len({s.group for s in served}) > 20
    assert all(s.finish_reason == "length" for s in served)


def test_costs_follow_their_points() -> None:
    assert [COSTS.step_ms(rows) for rows in (1, 8, 20)] == pytest.approx([25.0, 27.0, 38.5])
    assert COSTS.step_ms(992) == pytest.approx(600 + 480 * 550 / 480)
    assert COSTS.draft_ms(0) == 0
    bound = Costs.roofline(num_params=8e9, bytes_per_s=4.8e12, flop_per_s=4e14)
    assert bound.step_ms(1) == pytest.approx(1 + 16 / 4.8, rel=1e-3)
    assert bound.step_ms(1000) == pytest.approx(1 + 1000 * 16 / 400, rel=1e-2)


def test_drafting_follows_what_it_buys_at_every_load() -> None:
    """Open loop: with a good drafter time per token falls; with one that is always wrong nothing is lost."""
    trace = poisson(1.0, 40, prompt_len=64, output_len=64)
    _, plain = simulate(trace)
    _, good = simulate(trace, drafter=Drafter(chance=lambda _: 0.8))
    _, wrong = simulate(trace, drafter=Drafter(chance=lambda _: 0.0))

    def decode_s(served: list[Served]) -> float:
        return sum(s.e2e_s - s.ttft_s for s in served)

    assert decode_s(good) < 0.6 * decode_s(plain)
    assert decode_s(wrong) < 1.05 * decode_s(plain)


@pytest.mark.parametrize("chance", [None, 0.7])
def test_prompts_are_read_in_parts_that_keep_the_pace_of_those_who_decode(chance: float | None) -> None:
    """Long prompts keep coming while eight sequences decode: waits stay below the target, and all is read."""
    talkers = [Arrival(at_s=0.0, prompt_len=8, output_len=400) for _ in range(8)]
    readers = [Arrival(at_s=1.0 + i, prompt_len=900, output_len=2) for i in range(6)]
    drafter = None if chance is None else Drafter(chance=lambda _: chance)
    gaps: dict[float | None, list[float]] = {}
    for target_ms in (None, 120.0):
        _, served = simulate([*talkers, *readers], drafter=drafter, itl_target_ms=target_ms)
        assert {s.finish_reason for s in served} == {"length"}
        pairs = (pairwise(s.times_s) for s in served if s.arrival in talkers)
        gaps[target_ms] = sorted(later - earlier for pair in pairs for earlier, later in pair)
    assert gaps[None][-5] > 0.4, "without a target a prompt takes a whole step"
    assert gaps[120.0][int(0.99 * len(gaps[120.0]))] < 0.120
    assert gaps[120.0][-1] < 0.2, "one step, with which the cost of larger ones is found out"


def test_a_target_that_cannot_be_met_starves_no_prompt() -> None:
    """Decoding alone takes longer than the target: prompts are still read, a page of tokens a step."""
    trace = [Arrival(at_s=0.1 * i, prompt_len=200, output_len=30) for i in range(6)]
    simulation, served = simulate(trace, itl_target_ms=5.0, check=True)
    assert {s.finish_reason for s in served} == {"length"}
    assert simulation.groups[0].num_steps > 5 * 200 / 16


def test_under_a_target_drafts_make_way_for_prompts_that_press() -> None:
    """More comes than can be served: with a drafter as many tokens are served as without, nearly."""
    trace = poisson(6.0, 100, prompt_len=128, output_len=64)
    ends: list[float] = []
    for drafter in (None, Drafter(chance=lambda _: 0.6)):
        _, served = simulate(trace, drafter=drafter, itl_target_ms=120.0)
        ends.append(max(s.due_s + s.e2e_s for s in served))
    assert ends[1] < 1.06 * ends[0]
