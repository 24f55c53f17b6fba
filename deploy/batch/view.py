"""What a user sees while a batch runs: how far it is, how fast, and when it will be done."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .job import Totals

PLAIN_S = 10.0  # between two lines where there is no terminal


class BatchView:
    """A live bar in a terminal, a line now and then anywhere else. A context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._live = Progress(
            TextColumn("batch"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._live.add_task("batch", total=None, speed="")
        self._said_at: float | None = None

    def __enter__(self) -> "BatchView":
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    def update(self, totals: Totals) -> None:
        """Show these totals; cheap enough to be called for every line."""
        num_done = totals.num_completed + totals.num_failed
        if self._console.is_terminal:
            self._live.update(self._task, total=totals.num_lines, completed=num_done, speed=_speed(totals))
            return
        now = time.monotonic()
        is_edge = self._said_at is None or totals.is_complete
        if is_edge or (self._said_at is not None and now - self._said_at >= PLAIN_S):
            self._said_at = now
            left = _left(totals)
            ending = "" if left is None or totals.is_complete else f", {left} left"
            share = num_done / totals.num_lines
            self.say(f"{num_done} of {totals.num_lines} lines ({share:.0%}), {_speed(totals)}{ending}")

    def say(self, text: str) -> None:
        """A line of its own, above the bar if there is one."""
        self._console.print(f"batch: {text}", soft_wrap=True, markup=False)


def tokens_per_s(totals: Totals) -> float:
    return totals.completion_tokens / totals.seconds if totals.seconds else 0.0


def _speed(totals: Totals) -> str:
    failed = f", {totals.num_failed} failed" if totals.num_failed else ""
    return f"{tokens_per_s(totals):.0f} tokens/s{failed}"


def _left(totals: Totals) -> str | None:
    """The time the rest will take at the speed of this run."""
    num_done = totals.num_completed + totals.num_failed
    num_now = num_done - totals.num_resumed
    if not totals.seconds or num_now <= 0:
        return None
    seconds = totals.seconds / num_now * (totals.num_lines - num_done)
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if hours < 2 else f"{hours:.1f} h"
