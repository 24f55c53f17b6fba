"""`paceline bench budget`: does the budget choose as well as whoever knew the best number of drafts before?

    none      an engine without a drafter
    k         every step verifies k drafts per sequence, no budget
    budget    the budget chooses

Three engines on one thread take turns on the same prompts; figures are decoded tokens per second of steps.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich.table import Table
from torch import Tensor

from ...cluster.config import Config
from ...cluster.messages import Commit, Draft, Open, Propose, Slide
from ...drafter.proposer import Proposer
from ..drafter_source import with_drafter
from .step import BareEngine

NONE, BUDGET = "none", "budget"
_WARM_UP_ROUNDS = 1


class BudgetRow(msgspec.Struct, frozen=True, kw_only=True):
    """One batch: medians over rounds, ratios taken within a round."""

    batch: int
    tokens_per_s: dict[str, float]
    over_best_fixed: float  # none among the fixed ones
    over_none: float


class Wrong:
    """A proposer whose every draft is another token, as sure of it as of the right one."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.max_drafts = proposer.max_drafts
        self.tap_layer_ids = proposer.tap_layer_ids
        self.num_pages = proposer.num_pages
        self.max_context_len = proposer.max_context_len

    def open(self, opened: Open) -> None:
        self._proposer.open(opened)

    def commit(self, commits: Sequence[Commit], taps: Tensor) -> None:
        self._proposer.commit(commits, taps)

    def slide(self, slide: Slide) -> None:
        self._proposer.slide(slide)

    def free(self, sequence_id: int) -> None:
        self._proposer.free(sequence_id)

    def propose(self, proposals: Sequence[Propose], num_drafts: int) -> list[Draft]:
        return [
            msgspec.structs.replace(draft, token_ids=[token_id ^ 1 for token_id in draft.token_ids])
            for draft in self._proposer.propose(proposals, num_drafts)
        ]

    def check(self) -> None:
        self._proposer.check()


def measure_budget(
    config: Config,
    model_path: Path,
    batches: Sequence[int],
    fixed: Sequence[int],
    prompts: Iterator[list[int]],
    *,
    max_tokens: int,
    num_rounds: int,
    is_wrong: bool,
) -> list[BudgetRow]:
    """One row for each batch, after a round of warm-up. Takes a fresh prompt for each sequence of a round."""
    wrap = Wrong if is_wrong else None
    plain = BareEngine(with_drafter(config, NONE), model_path)
    bound = BareEngine(_with_budget(config, False), model_path, wrap)
    free = BareEngine(_with_budget(config, True), model_path, wrap)
    modes: dict[str, tuple[BareEngine, int | None]] = {NONE: (plain, None)}
    modes |= {f"k={k}": (bound, k) for k in fixed}
    modes[BUDGET] = (free, None)
    rows: list[BudgetRow] = []
    for batch in batches:
        rounds: list[dict[str, float]] = []
        for index in range(_WARM_UP_ROUNDS + num_rounds):
            chosen = [next(prompts) for _ in range(batch)]
            order = list(modes) if index % 2 else list(modes)[::-1]
            rounds.append({name: _speed(*modes[name], chosen, max_tokens) for name in order})
        rows.append(row_of(batch, rounds[_WARM_UP_ROUNDS:], [NONE, *(f"k={k}" for k in fixed)]))
    return rows


def row_of(batch: int, rounds: Sequence[dict[str, float]], fixed: Sequence[str]) -> BudgetRow:
    """The best fixed number is the one that is best by its median, not the luckiest of each round."""
    speeds = {name: median(r[name] for r in rounds) for name in [*fixed, BUDGET]}
    best = max(fixed, key=speeds.__getitem__)
    return BudgetRow(
        batch=batch,
        tokens_per_s=speeds,
        over_best_fixed=median(r[BUDGET] / r[best] for r in rounds),
        over_none=median(r[BUDGET] / r[NONE] for r in rounds),
    )


def table_of(rows: Sequence[BudgetRow]) -> Table:
    """The rows for a terminal; the last two columns are what the budget is held to."""
    table = Table(box=None, pad_edge=False)
    names = list(rows[0].tokens_per_s)
    for header in ("batch", *(f"{name} tok/s" for name in names), "/ best fixed", "/ none"):
        table.add_column(header, justify="right")
    for row in rows:
        speeds = (f"{row.tokens_per_s[name]:.1f}" for name in names)
        table.add_row(str(row.batch), *speeds, f"{row.over_best_fixed:.3f}", f"{row.over_none:.3f}")
    return table


def _speed(
    engine: BareEngine, max_draft_tokens: int | None, prompts: Sequence[list[int]], max_tokens: int
) -> float:
    engine.run(prompts, max_tokens, max_draft_tokens=max_draft_tokens)
    return engine.sums["decode"].row(len(prompts), "decode").tokens_per_s


def _with_budget(config: Config, has_budget: bool) -> Config:
    options: dict[str, Any] = {"draft_budget": has_budget, "prefix_cache": False}
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, **options))
