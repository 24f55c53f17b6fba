"""The stages of `paceline train` as functions, with what a person sees of them."""

import importlib.util
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ...cluster.errors import ConfigError
from ...drafter.training.curves import StepRecord
from ...drafter.training.data import DataProgress, DataSettings, default_taps, make_data
from ...drafter.training.fit import FitPace, FitSettings, Fitted, Ranks, fit
from ...drafter.training.shape import TargetShape, target_digest
from ..api.text import Tokenizer
from .presets import PRESETS
from .writer import TargetWriter

_SHOWN_SLOTS = 4
_EVAL_TOKENS = 128  # per answer
_LONGEST_EVAL_PROMPT = 512
_LEAST_ROUND = 64  # prompts, of a preset that is scaled down
_HELDOUT_SHARE = 0.04
_LEAST_HELDOUT = 16  # prompts that one can expect of a round: their number is left to chance


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

    def print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def report(self, record: StepRecord, num_steps: int) -> None:
        text = describe(record, num_steps)
        if self._console.is_terminal:
            self._bar.update(self._task, description=text, completed=record.step, total=num_steps)
        else:
            self.print(text)


def describe(record: StepRecord, num_steps: int) -> str:
    """One line: loss, shares right at the first slots, tokens/s, time left."""
    slots = " ".join(f"{share:.3f}" for share in record.per_slot[:_SHOWN_SLOTS])
    left_s = record.elapsed_s / record.step * max(0, num_steps - record.step)
    return (
        f"step {record.step}/{num_steps}  loss {record.loss:.3f}  slots {slots}  "
        f"{record.tokens_per_s:.0f} tokens/s  {left_s / 60:.1f} min left"
    )


def run_fit(
    data: Sequence[Path],
    model_path: Path,
    out: Path,
    settings: FitSettings,
    pace: FitPace,
    device: torch.device,
    *,
    num_workers: int,
    is_sharded: bool = False,
) -> Fitted | None:
    """Train here (as one of torchrun's processes, if it started this one), or on Ray Train."""
    if num_workers > 1:
        from ...drafter.training.ray_road import fit_on_ray

        fit_on_ray(
            data,
            model_path,
            out,
            settings,
            pace,
            num_workers,
            use_gpu=device.type == "cuda",
            is_sharded=is_sharded,
        )
        return None
    if "TORCHELASTIC_RUN_ID" in os.environ:
        device = _join_processes(device)
    is_first = Ranks.of_process_group().rank == 0
    with FitView(Console(highlight=False, quiet=not is_first)) as view:
        fitted = fit(data, model_path, out, settings, pace, device, view.report, is_sharded=is_sharded)
    slots = " ".join(f"{share:.3f}" for share in fitted.walk.per_slot)
    view.print(
        f"{fitted.path}: {fitted.num_steps} steps, {fitted.num_tokens:,} tokens, "
        f"{fitted.elapsed_s / 60:.1f} min; held-out walk {fitted.walk.mean_tokens_per_verify:.3f} tokens per "
        f"verify, slots {slots}"
    )
    return fitted


def _join_processes(device: torch.device) -> torch.device:
    """Set up the process group that torchrun describes; the device of this process."""
    if device.type == "cpu":
        dist.init_process_group("gloo")
        return device
    mine = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(mine)
    dist.init_process_group("nccl", device_id=mine)
    return mine


def run_data(
    directory: Path,
    model_path: Path,
    settings: DataSettings,
    num_tokens: int,
    *,
    num_places: int,
    device: torch.device,
    dtype: torch.dtype,
    max_minutes: float | None = None,
) -> None:
    """Write answers and tap rows until there are `num_tokens`; a line per shard."""
    settings = replace(settings, target_digest=target_digest(model_path))
    settings.check()
    last = TargetShape.load(model_path).num_layers - 1
    if settings.keeps_last and last in settings.tap_layer_ids:
        raise ConfigError(f"block {last} is the last and tapped already; leave it out of --taps")
    writer = TargetWriter(
        model_path,
        num_places=num_places,
        max_len=settings.max_len,
        tap_layer_ids=settings.tap_layer_ids + ((last,) if settings.keeps_last else ()),
        tap_dtype=settings.tap_torch_dtype,
        dtype=dtype,
        device=device,
    )

    def report(progress: DataProgress) -> None:
        left_s = (progress.wanted_tokens - progress.num_tokens) / max(progress.tokens_per_s, 1e-9)
        print(
            f"{progress.num_tokens:,} of {progress.wanted_tokens:,} tokens, "
            f"{progress.num_prompts:,} prompts, "
            f"{progress.tokens_per_s:.0f} tokens/s, {max(0.0, left_s) / 60:.0f} min left",
            flush=True,
        )

    make_data(directory, writer, Tokenizer.load(model_path), settings, num_tokens, report, max_minutes)


def run_preset(
    name: str,
    out: Path,
    model_path: Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    scale: float,
    prompts: Path | None,
) -> None:
    """All stages in one process: OUT/data, OUT/fit, OUT/scores.json. A killed run goes on where it was.

    `scale` shrinks data and training alike, to rehearse. Raises ConfigError for an unknown preset.
    """
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r} is unknown; choose one of {', '.join(PRESETS)}")
    if not 0 < scale <= 1:
        raise ConfigError(f"scale {scale} is not above 0 and at most 1")
    preset = PRESETS[name]
    began_s = time.perf_counter()
    round_len = min(preset.round_len, max(_LEAST_ROUND, round(preset.round_len * scale)))
    settings = DataSettings(
        heldout_share=max(_HELDOUT_SHARE, _LEAST_HELDOUT / round_len),
        tap_layer_ids=default_taps(TargetShape.load(model_path).num_layers, 5),
        prompts_file=None if prompts is None else str(prompts),
        round_len=round_len,
        shard_len=min(preset.shard_len, round_len // 4),
        max_prompt_len=preset.max_prompt_len,
        max_answer_len=preset.max_answer_len,
    )
    if not (out / "fit" / "state.safetensors").exists():  # else training goes on with the data it began with
        run_data(
            out / "data",
            model_path,
            settings,
            round(preset.num_tokens * scale),
            num_places=min(preset.num_places, round_len),
            device=device,
            dtype=dtype,
            max_minutes=preset.data_minutes,
        )
    print(f"data: {(time.perf_counter() - began_s) / 60:.1f} min", flush=True)
    fit_settings = replace(preset.fit, batch_size=max(2, round(preset.fit.batch_size * scale**0.5)))
    run_fit([out / "data"], model_path, out / "fit", fit_settings, preset.pace, device, num_workers=1)
    if missing := [part for part in ("msgspec", "zmq") if importlib.util.find_spec(part) is None]:
        print(
            f"not evaluated in the engine, for lack of {', '.join(missing)}; run `paceline train eval` later"
        )
        return
    from ...cluster.config import Config, EngineConfig, ModelConfig
    from .evaluation import evaluate, gather_prompts, table, write_scores

    longest = min(_LONGEST_EVAL_PROMPT, TargetShape.load(model_path).max_len - _EVAL_TOKENS)
    limit = max(2, round(preset.num_eval_prompts * scale))
    config = Config(
        model=ModelConfig(dtype="float32" if dtype == torch.float32 else "bfloat16"),
        engine=EngineConfig(max_num_seqs=preset.eval_places, num_threads=torch.get_num_threads()),
    )
    prompts_of = gather_prompts([out / "data"], Tokenizer.load(model_path), limit, longest)
    drafter = str(out / "fit" / "drafter")
    scores = evaluate(
        config, model_path, [drafter, "ngram", f"{drafter}+ngram"], prompts_of, [0.0, 1.0], _EVAL_TOKENS
    )
    write_scores(out / "scores.json", scores)
    print(table(scores))
    print(f"all: {(time.perf_counter() - began_s) / 60:.1f} min", flush=True)
