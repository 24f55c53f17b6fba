"""What a drafter costs where it does not draft, and what its messages cost where it does.

Run `python tests/bench_drafting.py [ROUNDS]`; prints one JSON object.

k0_wall_ratio, k0_cpu_ratio: a batch whose requests do not draft, in an engine with a random DFlash drafter,
    over the same in an engine without. Both live in this process and take turns, so that a busy machine
    disturbs both alike; medians over the rounds.
channel_ms: per draft phase over Ray, from sending the shard's plan to having its drafts, less what the shard
    measured of its own work. Every wait for a core counts: on a busy machine the least of the rounds tells
    more.
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from tiny_drafter import config_of, make_drafter

from paceline.cluster.config import Config, EngineConfig, ModelConfig
from paceline.cluster.messages import SamplingParams, Stats
from paceline.cluster.model_source import resolve_model
from paceline.deploy.assemble import start_engine, start_local_engine
from paceline.deploy.engine import Engine

NUM_STREAMS = 4
NUM_TOKENS = 24
PROMPT = [504, 1050, 282, 260, 2313, 3450, 281, 253, 2870]


def make_config(drafter: str) -> Config:
    engine = EngineConfig(
        num_threads=1,
        drafter=drafter,
        num_draft_tokens=3,
        kv_cache_gib=0.2,
        prefix_cache=False,
        draft_budget=False,
    )
    return Config(model=ModelConfig(dtype="float32", max_model_len=256), engine=engine)


def random_drafter(path: Path) -> Path:
    """A small DFlash for SmolLM2-135M."""
    config = config_of(
        hidden_size=576,
        vocab_size=49152,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        intermediate_size=256,
        num_target_layers=30,
        options={"target_layer_ids": [2, 14, 27], "mask_token_id": 0},
    )
    return make_drafter(path, config)


async def one_round(engine: Engine, name: str, max_draft_tokens: int | None) -> tuple[float, float]:
    """Wall and processor seconds of a batch."""

    async def stream(index: int) -> None:
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
        prompt = [*PROMPT, 1000 + index]
        async for _ in engine.stream(f"{name}.{index}", prompt, params, max_draft_tokens=max_draft_tokens):
            pass

    wall, processor = time.perf_counter(), time.process_time()
    await asyncio.gather(*(stream(index) for index in range(NUM_STREAMS)))
    return time.perf_counter() - wall, time.process_time() - processor


async def k0_ratios(model: Path, drafter: Path, num_rounds: int) -> dict[str, float]:
    """Medians over rounds of drafting engine / plain engine."""
    plain = await start_local_engine(make_config("none"), model)
    drafting = await start_local_engine(make_config(str(drafter)), model)
    wall: list[float] = []
    processor: list[float] = []
    step_s: list[float] = []
    try:
        for index in range(num_rounds + 1):
            first, second = (plain, drafting) if index % 2 else (drafting, plain)
            times = {id(engine): await one_round(engine, f"r{index}", 0) for engine in (first, second)}
            if index == 0:
                continue  # warm-up
            wall.append(times[id(drafting)][0] / times[id(plain)][0])
            processor.append(times[id(drafting)][1] / times[id(plain)][1])
            step_s.append(times[id(plain)][0] / NUM_TOKENS)
        assert drafting.stats.num_draft_phases == 0, "nobody drafts, so there is no draft phase"
    finally:
        await plain.close()
        await drafting.close()
    return {
        "k0_wall_ratio": round(statistics.median(wall), 4),
        "k0_cpu_ratio": round(statistics.median(processor), 4),
        "plain_step_ms": round(1e3 * statistics.median(step_s), 2),
    }


async def channel(model: Path, drafter: Path, num_rounds: int) -> dict[str, float]:
    """Over the rounds of an engine over Ray, of their means per draft phase."""
    engine = await start_engine(make_config(str(drafter)), model)
    phase_ms: list[float] = []
    channel_ms: list[float] = []
    try:
        await one_round(engine, "warm-up", None)
        before = await _report(engine)
        for index in range(num_rounds):
            await one_round(engine, f"r{index}", None)
            after = await _report(engine)
            num_phases = after.num_draft_phases - before.num_draft_phases
            phase_s, shard_s = after.draft_s - before.draft_s, _shard_s(after) - _shard_s(before)
            phase_ms.append(1e3 * phase_s / num_phases)
            channel_ms.append(1e3 * (phase_s - shard_s) / num_phases)
            before = after
    finally:
        await engine.close()
    return {
        "draft_phase_ms": round(statistics.median(phase_ms), 3),
        "channel_ms": round(statistics.median(channel_ms), 3),
        "channel_ms_least": round(min(channel_ms), 3),
    }


async def _report(engine: Engine) -> Stats:
    """The counts after the last step: heartbeats come twice a second."""
    await asyncio.sleep(1.2)
    assert not engine.stats.has_work
    return engine.stats


def _shard_s(stats: Stats) -> float:
    return sum(shard.commit_s + shard.draft_s for shard in stats.shards)


def main() -> None:
    num_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    model = resolve_model("default")
    with tempfile.TemporaryDirectory() as directory:
        drafter = random_drafter(Path(directory) / "drafter")
        figures = asyncio.run(k0_ratios(model, drafter, num_rounds))
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
        figures |= asyncio.run(channel(model, drafter, max(3, num_rounds // 3)))
        ray.shutdown()
    print(json.dumps({"rounds": num_rounds, "streams": NUM_STREAMS, **figures}, indent=1))


if __name__ == "__main__":
    main()
