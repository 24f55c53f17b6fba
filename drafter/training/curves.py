"""The curves of training: two CSV files, and a picture of them when matplotlib is installed.

Rows behind the step that training goes on from are dropped: they will be made again.
"""

import csv
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .state import TrainState
from .walk import Walk


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The mean of some steps."""

    step: int
    num_tokens: int  # answer tokens seen, over all
    elapsed_s: float
    tokens_per_s: float
    lr: float
    loss: float
    per_slot: list[float]  # share of labels the likeliest token equals, on the training text


class Curves:
    """`log.csv` of training steps and `walk.csv` of held-out acceptance, in a directory."""

    def __init__(self, out: Path, num_slots: int, first_step: int, *, is_written: bool) -> None:
        self._log, self._walk, self._picture = out / "log.csv", out / "walk.csv", out / "curves.png"
        self._num_slots, self._is_written = num_slots, is_written
        slots = [f"slot_{slot}" for slot in range(1, num_slots + 1)]
        if is_written:
            _cut(self._log, ["step", "tokens", "elapsed_s", "tokens_per_s", "lr", "loss", *slots], first_step)
            _cut(self._walk, ["step", "tokens", "tokens_per_verify", *slots], first_step)
        self.last_loss = _last(self._log, "loss") if is_written else 0.0
        self._begin()

    def add(self, loss: Tensor, num_right: Tensor, num_labels: Tensor, num_tokens: int) -> None:
        """A step's loss, right labels and all labels per slot: tensors that only `flush` reads."""
        self._losses.append(loss)
        self._right.append(num_right)
        self._labels.append(num_labels)
        self._num_tokens += num_tokens

    def flush(self, state: TrainState, lr: float) -> StepRecord:
        """Log the mean of the steps since the last call."""
        right, labels = torch.stack(self._right).sum(0), torch.stack(self._labels).sum(0).clamp(min=1)
        record = StepRecord(
            step=state.step,
            num_tokens=state.num_tokens,
            elapsed_s=state.elapsed_s,
            tokens_per_s=self._num_tokens / max(1e-9, state.elapsed_s - (self._began_s or 0.0)),
            lr=lr,
            loss=float(torch.stack(self._losses).mean()),
            per_slot=(right / labels).tolist(),
        )
        if self._is_written:
            row = [
                record.step,
                record.num_tokens,
                round(record.elapsed_s, 2),
                round(record.tokens_per_s, 1),
                f"{record.lr:.3e}",
                repr(record.loss),
                *(round(share, 4) for share in record.per_slot),
            ]
            _append(self._log, row)
        self._begin(state.elapsed_s)
        return record

    def add_walk(self, state: TrainState, walked: Walk) -> None:
        if self._is_written:
            shares = [round(share, 4) for share in walked.per_slot]
            _append(
                self._walk, [state.step, state.num_tokens, round(walked.mean_tokens_per_verify, 4), *shares]
            )

    def draw(self) -> None:
        """Make `curves.png`; nothing without matplotlib."""
        if importlib.util.find_spec("matplotlib") is None:
            return
        from matplotlib.figure import Figure

        log, walked = _columns(self._log), _columns(self._walk)
        figure = Figure(figsize=(11, 7), layout="constrained")
        left, right, below, last = figure.subplots(2, 2).flat
        left.plot(log["tokens"], log["loss"])
        left.set(title="loss (weighted by slot)", xlabel="answer tokens seen")
        for slot in range(1, self._num_slots + 1):
            right.plot(log["tokens"], log[f"slot_{slot}"], label=f"slot {slot}")
            below.plot(walked["tokens"], walked[f"slot_{slot}"], marker=".", label=f"slot {slot}")
        right.set(title="training text: right at each slot", xlabel="answer tokens seen", ylim=(0, 1))
        below.set(title="held-out text: drafts up to a slot stood", xlabel="answer tokens seen", ylim=(0, 1))
        last.plot(walked["tokens"], walked["tokens_per_verify"], marker=".")
        last.set(title="held-out text: mean tokens per verify", xlabel="answer tokens seen")
        right.legend(fontsize="small")
        figure.savefig(self._picture, dpi=110)

    def _begin(self, began_s: float | None = None) -> None:
        self._losses: list[Tensor] = []
        self._right: list[Tensor] = []
        self._labels: list[Tensor] = []
        self._num_tokens = 0
        self._began_s = began_s


def _cut(file: Path, header: list[str], first_step: int) -> None:
    """Keep the rows up to a step; begin a file that is not there."""
    rows = list(csv.reader(file.read_text().splitlines()))[1:] if file.exists() else []
    whole = [row for row in rows if len(row) == len(header) and int(row[0]) <= first_step]
    with open(file, "w", newline="") as stream:
        csv.writer(stream).writerows([header, *whole])


def _append(file: Path, row: list[object]) -> None:
    with open(file, "a", newline="") as stream:
        csv.writer(stream).writerow(row)


def _last(file: Path, column: str) -> float:
    values = _columns(file)[column]
    return values[-1] if values else 0.0


def _columns(file: Path) -> dict[str, list[float]]:
    with open(file, newline="") as stream:
        reader = csv.DictReader(stream)
        rows = list(reader)
    return {name: [float(row[name]) for row in rows] for name in reader.fieldnames or []}
