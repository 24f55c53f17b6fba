"""The draft budget against brute force, and against fixed numbers of drafts in virtual time."""

import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from paceline.cluster.messages import Outputs, SamplingParams, Submit
from paceline.scheduler.budget import DraftBudget
from paceline.scheduler.cost import CostModel
from paceline.scheduler.events import Command
from paceline.scheduler.limits import Limits
from paceline.scheduler.simulator import Costs, Drafter, Group
from paceline.scheduler.survival import Offers

MOST_DRAFTS = 7
PROMPT_LEN = 4
SMALL_CPU = ((1, 25.0), (4, 25.0), (5, 26.0))  # the first rows are free, then each costs a 25th of the step


class Pair:
    """A target and a drafter of which the drafts stand with a chance; all sequences decode for ever."""

    def __init__(
        self,
        num_sequences: int,
        chance: Callable[[float], float],
        *,
        k: int | None = None,
        least: int = 0,
        has_budget: bool = True,
        has_taps: bool = True,
        has_drafter: bool = True,
        draft_ms: float = 2.0,
        noise: float = 0.0,
        num_tokens: int = 100_000,
    ) -> None:
        limits = Limits(
            num_pages=num_sequences * (num_tokens // 64 + 2),
            page_size=64,
            max_model_len=num_tokens + PROMPT_LEN,
            max_num_seqs=num_sequences,
            max_num_batched_tokens=512,
            max_queued_requests=num_sequences,
            aging_s=30.0,
            num_draft_tokens=k,
            min_draft_tokens=least,
            draft_budget=has_budget,
        )
        chooser = random.Random(5)

        def disturb(ms: float) -> float:
            """Some noise, and now and then a step that takes five times as long."""
            return ms * chooser.uniform(1 - noise, 1 + noise) * (5 if chooser.random() < 0.03 else 1)

        self.group = Group(
            limits,
            Costs(step=SMALL_CPU, draft=((1, draft_ms),), commit_ms=0.5),
            Drafter(chance=chance, max_drafts=MOST_DRAFTS, has_taps=has_taps) if has_drafter else None,
            disturb=disturb if noise else None,
        )
        self.now = 0.0
        self.num_emitted = 0
        params = SamplingParams(max_tokens=num_tokens - PROMPT_LEN)
        for index in range(num_sequences):
            submit = Submit(request_id=str(index), prompt_ids=[index] * PROMPT_LEN, params=params)
            self._count(self.group.take(submit, 0.0))

    def run(self, num_ms: float) -> "Pair":
        """Go on for so long."""
        end = self.now + num_ms / 1e3
        while self.group.due_s is not None and self.now < end:
            self.now = self.group.due_s
            self._count(self.group.answer())
        return self

    @property
    def speed(self) -> float:
        """Tokens per millisecond; what disturbances took is left out, they are luck."""
        return self.num_emitted / (self.now - self.group.lost_s) / 1e3

    @property
    def longest(self) -> list[int]:
        """Of each step, its longest block."""
        return self.group.longest

    @property
    def num_drafting_steps(self) -> int:
        return sum(num_drafts > 0 for num_drafts in self.group.longest)

    @property
    def num_steps(self) -> int:
        return self.group.num_steps

    def _count(self, told: Sequence[Command]) -> None:
        self.num_emitted += sum(
            len(output.token_ids) for c in told if isinstance(c, Outputs) for output in c.outputs
        )


@pytest.mark.parametrize("has_taps", [True, False])
@pytest.mark.parametrize("num_sequences", [1, 8, 32])
def test_a_drafter_that_is_always_wrong_costs_nothing(num_sequences: int, has_taps: bool) -> None:
    """Less than 3 % of the steps draft, and the time is within 3 % of that without a drafter."""
    plain = Pair(num_sequences, lambda _: 0.0, has_drafter=False).run(40_000)
    wrong = Pair(num_sequences, lambda _: 0.0, has_taps=has_taps).run(40_000)
    assert wrong.num_drafting_steps < 0.03 * wrong.num_steps
    assert wrong.speed > 0.97 * plain.speed


@pytest.mark.parametrize("num_sequences", [1, 8])
def test_a_drafter_that_is_always_right_drafts_all_it_can(num_sequences: int) -> None:
    """Some first steps aside, in which costs are learned."""
    right = Pair(num_sequences, lambda _: 1.0).run(40_000)
    assert right.longest.count(MOST_DRAFTS) > 0.97 * right.num_steps


@pytest.mark.parametrize("num_sequences", [1, 8, 32])
@pytest.mark.parametrize("chance", [0.3, 0.6, 0.8])
def test_the_budget_is_near_the_best_fixed_number(num_sequences: int, chance: float) -> None:
    """Within 5 % of whichever is best, none included; nearly so if steps are noisy and some are disturbed."""
    fixed = [Pair(num_sequences, lambda _: 0.0, has_drafter=False).run(20_000).speed]
    fixed += [
        Pair(num_sequences, lambda _: chance, k=k, has_budget=False).run(20_000).speed
        for k in range(1, MOST_DRAFTS + 1)
    ]
    chosen = Pair(num_sequences, lambda _: chance).run(20_000)
    assert chosen.speed > 0.95 * max(fixed)
    noisy = Pair(num_sequences, lambda _: chance, noise=0.1).run(40_000)
    assert noisy.speed > 0.92 * max(fixed)


@pytest.mark.parametrize("has_taps", [True, False])
def test_a_change_of_text_is_noticed(has_taps: bool) -> None:
    """Useless for a long while, then right: after the longest rest it drafts all the time."""
    pair = Pair(1, lambda now: 1.0 if now > 20 else 0.0, has_taps=has_taps).run(20_000)
    pair.run(10_000)
    pair.longest.clear()
    pair.run(2_000)
    assert pair.longest.count(MOST_DRAFTS) > 0.9 * len(pair.longest)


def test_a_drafter_that_pays_alone_rests_in_company() -> None:
    """One model of costs for any number of sequences."""
    alone, company = (Pair(n, lambda _: 0.35).run(20_000) for n in (1, 32))
    assert alone.num_drafting_steps > 0.9 * alone.num_steps
    assert company.num_drafting_steps < 0.1 * company.num_steps


def test_a_rest_has_no_draft_phase() -> None:
    """Not even commits, once it is long."""
    pair = Pair(1, lambda _: 0.0).run(10_000)
    num_phases = pair.group.num_phases
    pair.run(25 * 1000)
    assert pair.group.num_phases - num_phases < 0.12 * 1000


def test_the_cut_is_the_best_there_is() -> None:
    """Against every way to cut three blocks, with costs that jump."""
    chooser = random.Random(1)
    for _ in range(30):
        budget = DraftBudget()
        costs = list(itertools.accumulate(chooser.choice([0.0, 0.2, 3.0]) for _ in range(14)))
        for size in range(3, 14):
            for _ in range(4):
                budget.verify.observe(size, 10 + costs[size])
        for _ in range(4):
            budget.draft.observe(3, 2.0)
        offers = Offers(range(3), [[chooser.random() for _ in range(3)] for _ in range(3)], [3, 3, 3])
        cuts = budget.cut(offers, 3, 3, 8)
        chances: list[list[float]] = budget.survival.products(offers).tolist()

        def speed(
            cut: Sequence[int], chances: list[list[float]] = chances, costs: CostModel = budget.verify
        ) -> float:
            gain = sum(sum(block[:n]) for block, n in zip(chances, cut, strict=True))
            return (3 + gain) / (2 + costs.estimate(3 + sum(cut)))

        every = (cut for cut in itertools.product(range(4), repeat=3) if sum(cut) <= 8)
        assert speed(cuts) == pytest.approx(max(map(speed, every)))


def test_costs_are_robust_and_never_fall() -> None:
    """One disturbed step in five changes nothing; between sizes and beyond them the curve goes on."""
    model = CostModel()
    chooser = random.Random(2)
    assert model.estimate(5) == 0
    for _ in range(40):
        for size in (1, 4, 8, 40, 100):
            disturbance = 10 if chooser.random() < 0.2 else chooser.uniform(0.95, 1.05)
            model.observe(size, (20 + size) * disturbance)
    for size in (1, 2, 6, 8, 30, 70, 100, 200):
        assert model.estimate(size) == pytest.approx(20 + size, rel=0.08)
    table = model.table(300)[:301].tolist()
    assert table == sorted(table)
    assert table == pytest.approx([model.estimate(size) for size in range(301)])


def test_confidences_that_are_no_numbers_are_not_believed() -> None:
    """Nothing that a shard says ends a step."""
    budget = DraftBudget()
    cuts = budget.cut(Offers([0, 1], [[float("nan"), 2.0, -1.0], []], [3, 0]), 2, 2, 8)
    assert cuts == [0, 0]


def test_a_floor_is_verified_whatever_the_budget_says() -> None:
    """For whoever measures acceptance; a drafter that is always wrong then never rests."""
    pair = Pair(4, lambda _: 0.0, least=2).run(10_000)
    assert set(pair.longest[1:]) <= {2, 3, 4, 5, 6, 7}
    assert pair.longest.count(2) > 0.9 * pair.num_steps
