"""`paceline bench turns`: what the prefix cache saves in conversations, and what it leaves of the drafts.

    cold      no prefix cache: each turn reads everything before it again
    warm      pages and contexts of the turn before are found
    halved    pages are found, contexts are not: the shard begins a new life before each turn

All sessions take a turn together; a turn's prompt is all before it and `prompt_len` new tokens. The tokens
must be the same in all three.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich.table import Table

from ...cluster.config import Config
from .client import BenchError
from .step import BareEngine

MODES = ("cold", "warm", "halved")


class TurnsRow(msgspec.Struct, frozen=True, kw_only=True):
    """One mode; the first turn, which has nothing to find, is left out of all but the rows."""

    mode: str
    num_prompt_tokens: int
    num_rows_read: int  # of these, those that the prefix cache did not know
    ttft_p50_s: float
    tokens_per_block: float | None  # what a verified block gave; None without drafts

    @property
    def saved(self) -> float:
        """Share of the prompt rows that were not computed."""
        return 1 - self.num_rows_read / self.num_prompt_tokens


def measure_turns(
    config: Config, model_path: Path, words: Sequence[Sequence[list[int]]], max_tokens: int
) -> list[TurnsRow]:
    """`words[turn][session]` are the new tokens of a turn. Raises BenchError when a mode changes a token."""
    rows: list[TurnsRow] = []
    texts: dict[str, list[list[int]]] = {}
    for mode in MODES:
        row, texts[mode] = _converse(mode, config, model_path, words, max_tokens)
        rows.append(row)
        if texts[mode] != texts[MODES[0]]:
            raise BenchError(f"the tokens of the {mode} conversations are not those of the cold ones")
    return rows


def table_of(rows: Sequence[TurnsRow]) -> Table:
    """The rows for a terminal; ratios are against cold."""
    table = Table(box=None, pad_edge=False)
    for header in ("mode", "prompt tokens", "read", "saved", "TTFT ms", "ratio", "tok/block"):
        table.add_column(header, justify="right")
    for row in rows:
        table.add_row(
            row.mode,
            str(row.num_prompt_tokens),
            str(row.num_rows_read),
            f"{100 * row.saved:.1f} %",
            f"{1e3 * row.ttft_p50_s:.0f}",
            f"{row.ttft_p50_s / rows[0].ttft_p50_s:.2f}",
            "" if row.tokens_per_block is None else f"{row.tokens_per_block:.3f}",
        )
    return table


def _converse(
    mode: str, config: Config, model_path: Path, words: Sequence[Sequence[list[int]]], max_tokens: int
) -> tuple[TurnsRow, list[list[int]]]:
    # Without the budget every block is verified whole: what stands of it is compared, not what was chosen.
    options: dict[str, Any] = {"prefix_cache": mode != "cold", "draft_budget": False}
    engine_config = msgspec.structs.replace(config.engine, **options)
    engine = BareEngine(msgspec.structs.replace(config, engine=engine_config), model_path)
    texts: list[list[int]] = [[] for _ in words[0]]
    ttfts_s: list[float] = []
    num_blocks = num_accepted = num_prompt_tokens = 0
    for turn, new in enumerate(words):
        if mode == "halved" and turn > 0:
            engine.renew_shard()
        texts = [text + ids for text, ids in zip(texts, new, strict=True)]
        num_prompt_tokens += sum(map(len, texts))
        before = engine.scheduler.stats()
        answers = engine.run(texts, max_tokens)
        after = engine.scheduler.stats()
        texts = [text + answer.token_ids for text, answer in zip(texts, answers, strict=True)]
        if turn > 0:
            ttfts_s += [answer.ttft_s for answer in answers]
            num_blocks += after.num_drafts - before.num_drafts
            num_accepted += after.num_accepted_tokens - before.num_accepted_tokens
    row = TurnsRow(
        mode=mode,
        num_prompt_tokens=num_prompt_tokens,
        num_rows_read=num_prompt_tokens - engine.scheduler.stats().num_prefix_hits,
        ttft_p50_s=median(ttfts_s),
        tokens_per_block=1 + num_accepted / num_blocks if num_blocks else None,
    )
    return row, texts
