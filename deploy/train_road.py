"""The stages of `paceline train` as functions, with what a person sees of them."""

from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ..drafter.training.curves import StepRecord
from ..drafter.training.fit import FitPace, FitSettings, Fitted, fit

_SHOWN_SLOTS = 4


class FitView:
    """Progress of a fit: a live bar in a terminal, one line per logged record anywhere else."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=self._console
        )
        self._task = self._bar.add_task("reading the data", total=None)

    def __enter__(self) -> "FitView":
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def report(self, record: StepRecord, num_steps: int) -> None:
        text = describe(record, num_steps)
        if self._console.is_terminal:
            self._bar.update(self._task, description=text, completed=record.step, total=num_steps)
        else:
            self._console.print(text, soft_wrap=True)


def describe(record: StepRecord, num_steps: int) -> str:
    """One line: loss, shares right at the first slots, tokens/s, time left."""
    slots = " ".join(f"{share:.3f}" for share in record.per_slot[:_SHOWN_SLOTS])
    left_s = record.elapsed_s / record.step * max(0, num_steps - record.step)
    return (
        f"step {record.step}/{num_steps}  loss {record.loss:.3f}  slots {slots}  "
        f"{record.tokens_per_s:.0f} tokens/s  {left_s / 60:.1f} min left"
    )


def run_fit(
    data: Path,
    model_path: Path,
    out: Path,
    settings: FitSettings,
    pace: FitPace,
    device: torch.device,
    *,
    num_workers: int,
) -> Fitted | None:
    """Train here, or in `num_workers` processes of Ray Train."""
    if num_workers > 1:
        from ..drafter.training.ray_road import fit_on_ray

        fit_on_ray(data, model_path, out, settings, pace, num_workers, use_gpu=device.type == "cuda")
        return None
    with FitView() as view:
        fitted = fit(data, model_path, out, settings, pace, device, view.report)
    slots = " ".join(f"{share:.3f}" for share in fitted.walk.per_slot)
    print(
        f"{fitted.path}: {fitted.num_steps} steps, {fitted.num_tokens:,} tokens, "
        f"{fitted.elapsed_s / 60:.1f} min; held-out walk {fitted.walk.mean_tokens_per_verify:.3f} tokens per "
        f"verify, slots {slots}"
    )
    return fitted
