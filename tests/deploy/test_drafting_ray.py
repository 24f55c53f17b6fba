"""Shards as processes over Ray: killed, stopped and swapped under streams, which lose no token by it."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from streams import requests, tiny_config, together, wait_idle, wait_until_all_emit
from tiny import make_checkpoint
from tiny_drafter import config_of, make_drafter
from tracing import TracingScheduler, read_trace

from paceline.cluster import shared_tensor
from paceline.cluster.config import Config
from paceline.cluster.errors import ModelError
from paceline.cluster.gang import Crew, Gang, GangLauncher
from paceline.deploy.assemble import start_engine, start_local_engine
from paceline.deploy.drafter_source import choose_drafter, with_drafter
from paceline.deploy.engine import Engine
from paceline.drafter.actor import DrafterActor
from paceline.workers.actor import WorkerActor

pytestmark = pytest.mark.usefixtures("ray_local")

WANTED = requests(16, 150)
RESUMED_S = 10.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama")


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two random ones for the tiny checkpoint."""
    path = tmp_path_factory.mktemp("drafters")
    config = config_of(num_target_layers=3, options={"target_layer_ids": [0, 2]})
    return [make_drafter(path / str(seed), config, seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """What the streams give in one process, without a drafter."""

    async def run() -> list[list[int]]:
        engine = await start_local_engine(tiny_config(drafter="none"), checkpoint)
        token_ids = await together(engine, WANTED)
        await engine.close()
        return token_ids

    return asyncio.run(run())


class ShownLauncher(GangLauncher):
    """A GangLauncher whose current gang the test can look at and harm."""

    gang: Gang

    def launch(self, epoch: int) -> Gang:
        self.gang = super().launch(epoch)
        return self.gang


@asynccontextmanager
async def served(config: Config, checkpoint: Path) -> AsyncIterator[tuple[Engine, ShownLauncher]]:
    """An engine whose processes and shared memory must be gone in the end, and that never lost an epoch."""
    crew = Crew(TracingScheduler, WorkerActor, DrafterActor)
    choice = choose_drafter(config, checkpoint)
    launcher = ShownLauncher(crew, config, checkpoint, max_model_len=512, drafter=choice)
    engine = Engine(launcher, config)
    await engine.start()
    gang = launcher.gang
    processes = gang.processes | gang.shards.processes
    try:
        yield engine, launcher
        assert engine.num_rebuilds == 0, "the death of a shard is no death of the gang"
        processes |= gang.shards.processes
    finally:
        await engine.close()
    assert not [name for name, process in processes.items() if process.find() is not None]
    names = [path.name for path in shared_tensor._DIRECTORY.iterdir()]
    assert not [name for name in names if name.startswith(gang._name_prefix)]


async def wait_ready(engine: Engine, *peers: str) -> None:
    await wait_until(lambda: {s.peer for s in engine.stats.shards if s.state == "ready"} == set(peers))


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(RESUMED_S):
        while not condition():
            await asyncio.sleep(0.02)


async def test_a_killed_shard_costs_no_stream_and_comes_back(
    checkpoint: Path, drafters: list[Path], expected: list[list[int]]
) -> None:
    async with served(tiny_config(drafter=str(drafters[0])), checkpoint) as (engine, launcher):
        await wait_ready(engine, "shard0.0")
        streams = asyncio.create_task(together(engine, WANTED))
        await wait_until_all_emit(engine, 10)
        os.kill(launcher.gang.shards.processes["shard0.0"].pid, signal.SIGKILL)
        killed_at = time.monotonic()
        assert await streams == expected
        await wait_ready(engine, "shard0.1")
        before = engine.stats.num_drafts
        streams = asyncio.create_task(together(engine, WANTED, "again"))
        await wait_until(lambda: engine.stats.num_drafts > before)
        assert time.monotonic() - killed_at < RESUMED_S
        assert await streams == expected
        await wait_idle(engine)


async def test_a_stopped_shard_is_waited_for_once_then_replaced(
    checkpoint: Path, drafters: list[Path], expected: list[list[int]]
) -> None:
    config = tiny_config(drafter=str(drafters[0]), draft_deadline_s=0.5)
    async with served(config, checkpoint) as (engine, launcher):
        await wait_ready(engine, "shard0.0")
        streams = asyncio.create_task(together(engine, WANTED))
        await wait_until_all_emit(engine, 10)
        stopped = launcher.gang.shards.processes["shard0.0"]
        os.kill(stopped.pid, signal.SIGSTOP)
        num_steps, stopped_at = engine.stats.num_steps, time.monotonic()
        await wait_until(lambda: engine.stats.num_steps > num_steps + 5 or streams.done())
        assert time.monotonic() - stopped_at < 0.5 + 2.0, "the deadline, and a report"
        assert await streams == expected
        await wait_ready(engine, "shard0.1")
        assert stopped.find() is None
        assert await together(engine, WANTED, "again") == expected
        await wait_idle(engine)


async def test_drafters_are_swapped_under_streams(
    checkpoint: Path, drafters: list[Path], expected: list[list[int]]
) -> None:
    config = tiny_config(drafter=str(drafters[0]))
    async with served(config, checkpoint) as (engine, launcher):
        old = launcher.gang.shards.processes["shard0.0"]
        streams = asyncio.create_task(together(engine, WANTED))
        await wait_until_all_emit(engine, 5)
        for number, name in enumerate([str(drafters[1]), "ngram"], start=1):
            await engine.swap_drafter(choose_drafter(with_drafter(config, name), checkpoint))
            await wait_ready(engine, f"shard0.{number}")
        assert await streams == expected
        await wait_until(lambda: old.find() is None)
        await wait_until(lambda: set(launcher.gang.shards.processes) == {"shard0.2"})
        await engine.swap_drafter(None)
        await wait_until(lambda: launcher.gang.shards.processes == {})
        assert await together(engine, WANTED[:4], "none") == expected[:4]
        broken = make_broken(drafters[1])
        choice = choose_drafter(with_drafter(config, str(broken)), checkpoint)
        with pytest.raises(ModelError, match="cannot be read"):
            await engine.swap_drafter(choice)
        await wait_until(lambda: launcher.gang.shards.processes == {})
        await wait_idle(engine)


def make_broken(path: Path) -> Path:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return path


async def test_two_shards_own_different_sequences(
    checkpoint: Path, drafters: list[Path], expected: list[list[int]]
) -> None:
    config = tiny_config(drafter=str(drafters[0]), tensor_parallel_size=2)
    async with served(config, checkpoint) as (engine, launcher):
        assert await together(engine, WANTED) == expected
        await wait_idle(engine)
        assert launcher.gang._directory is not None
        trace = read_trace(launcher.gang._directory)
    owners = {opened.sequence_id: traced.peer for traced in trace for opened in traced.plan.open}
    assert set(owners.values()) == {"shard0.0", "shard1.0"}
    assert len(owners) == len(WANTED)
    touched = [
        (part.sequence_id, traced.peer)
        for traced in trace
        for part in (*traced.plan.commits, *traced.plan.slides, *traced.plan.propose)
    ]
    assert len(touched) > 1000
    assert all(owners[sequence_id] == peer for sequence_id, peer in touched)
    counts = [list(owners.values()).count(peer) for peer in ("shard0.0", "shard1.0")]
    assert min(counts) >= len(WANTED) // 4, f"the load is shared: {counts}"


async def test_a_drafter_that_does_not_load_ends_the_start(checkpoint: Path, tmp_path: Path) -> None:
    config = config_of(num_target_layers=3, options={"target_layer_ids": [0, 2]})
    broken = make_broken(make_drafter(tmp_path / "broken", config))
    with pytest.raises(ModelError, match="cannot be read"):
        await start_engine(tiny_config(drafter=str(broken)), checkpoint)
