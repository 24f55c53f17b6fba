"""Whole trainings by name: how much data, how to train on them, how to evaluate."""

from collections.abc import Mapping
from dataclasses import dataclass

from ...drafter.training.fit import FitPace, FitSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A whole training: data, fit, evaluation."""

    num_tokens: int
    data_minutes: float | None
    num_places: int
    round_len: int
    shard_len: int
    max_prompt_len: int
    max_answer_len: int
    fit: FitSettings
    pace: FitPace
    num_eval_prompts: int  # per domain
    eval_places: int


PRESETS: Mapping[str, Preset] = {
    # Twelve minutes of one H200-class GPU: five million tokens or six minutes of data, four of training.
    "smollm2-demo": Preset(
        num_tokens=5_000_000,
        data_minutes=6.0,
        num_places=768,
        round_len=8192,
        shard_len=512,
        max_prompt_len=256,
        max_answer_len=256,
        fit=FitSettings(
            block_size=8, passes=4.0, max_minutes=4.0, batch_size=32, num_anchors=32, warmup_steps=100
        ),
        pace=FitPace(log_every=100, save_every=2000, walk_every=2000, walk_len=64),
        num_eval_prompts=200,
        eval_places=64,
    ),
    # A night on a few cores: small steps, because at low acceptance many small ones beat few large ones.
    "laptop": Preset(
        num_tokens=2_000_000,
        data_minutes=None,
        num_places=96,
        round_len=1024,
        shard_len=128,
        max_prompt_len=256,
        max_answer_len=256,
        fit=FitSettings(block_size=8, passes=3.0, batch_size=2, num_anchors=16),
        pace=FitPace(log_every=100, save_every=500, walk_every=2000, walk_len=32),
        num_eval_prompts=50,
        eval_places=8,
    ),
}
