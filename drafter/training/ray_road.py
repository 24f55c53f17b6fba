"""The same training in many processes: Ray Train places them, sets up the process group, and restarts them.

Every process reads the data and `out` by the same path, so with several nodes both are on a shared disk. A
worker that dies ends the attempt; the next one goes on from the last checkpoint.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer, get_device

from .curves import StepRecord
from .fit import FitPace, FitSettings, fit

MAX_FAILURES = 3


def fit_on_ray(
    data: Sequence[Path],
    model_path: Path,
    out: Path,
    settings: FitSettings,
    pace: FitPace,
    num_workers: int,
    *,
    use_gpu: bool,
    is_sharded: bool = False,
) -> None:
    """Train in `num_workers` processes, a GPU each or none, on the Ray of this machine or RAY_ADDRESS."""
    plan = {
        "data": [str(directory.resolve()) for directory in data],
        "model_path": str(model_path.resolve()),
        "out": str(out.resolve()),
        "settings": asdict(settings),
        "pace": asdict(pace),
        "is_sharded": is_sharded,
    }
    trainer = TorchTrainer(
        _work,
        train_loop_config=plan,
        scaling_config=ray.train.ScalingConfig(num_workers=num_workers, use_gpu=use_gpu),
        run_config=ray.train.RunConfig(
            name="fit",
            storage_path=str(out.resolve() / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=MAX_FAILURES),
        ),
    )
    trainer.fit()


def _work(plan: dict[str, Any]) -> None:
    """The body of one process."""

    def report(record: StepRecord, num_steps: int) -> None:
        slots = {f"slot_{slot}": share for slot, share in enumerate(record.per_slot, 1)}
        ray.train.report(
            {"step": record.step, "num_steps": num_steps, "loss": record.loss, "lr": record.lr, **slots}
        )

    device = get_device()
    assert isinstance(device, torch.device), "one device for each process"
    fit(
        [Path(directory) for directory in plan["data"]],
        Path(plan["model_path"]),
        Path(plan["out"]),
        FitSettings(**plan["settings"]),
        FitPace(**plan["pace"]),
        device,
        report,
        is_sharded=plan["is_sharded"],
    )
