"""The whole engine on a tiny model: batches change no token, cancels give pages back, faults lose nothing."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from streams import Request, collect, requests, tiny_config, together, wait_idle, wait_until_all_emit
from tiny import EOS_TOKEN_ID, make_checkpoint

from paceline.cluster.errors import ConfigError, ModelError, RequestError
from paceline.cluster.gang import Crew, Gang, GangLauncher
from paceline.cluster.messages import SamplingParams
from paceline.deploy.assemble import start_engine, start_local_engine
from paceline.deploy.engine import Engine
from paceline.drafter.actor import DrafterActor
from paceline.scheduler.actor import SchedulerActor
from paceline.workers.actor import WorkerActor


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama")


class TestLocal:
    @pytest.fixture
    async def engine(self, checkpoint: Path) -> AsyncIterator[Engine]:
        engine = await start_local_engine(tiny_config(), checkpoint)
        yield engine
        await engine.close()

    async def test_32_streams_together_give_what_each_gives_alone(self, engine: Engine) -> None:
        wanted = requests(32, 24)
        alone = [await collect(engine, f"alone{index}", request) for index, request in enumerate(wanted)]
        assert await together(engine, wanted) == alone
        assert all(len(token_ids) == 24 for token_ids in alone)
        await wait_idle(engine)
        assert engine.stats.num_generated_tokens == 2 * 32 * 24
        assert engine.num_streams == 0
        engine.check_health()

    async def test_cancelled_streams_give_their_pages_back(self, engine: Engine) -> None:
        async def leave_early(index: int, request: Request) -> None:
            left = index % 5
            async for _ in engine.stream(f"c{index}", *request):
                if left == 0:
                    return
                left -= 1

        wanted = requests(40, 200)
        survivors = asyncio.create_task(together(engine, wanted[:2], "s"))
        await asyncio.gather(*(leave_early(index, request) for index, request in enumerate(wanted[2:])))
        assert [len(token_ids) for token_ids in await survivors] == [200, 200]
        await wait_idle(engine)

    async def test_a_stop_token_ends_a_stream(self, engine: Engine) -> None:
        prompt, params = [5, 6, 7], SamplingParams(max_tokens=30, temperature=0.0)
        first = (await collect(engine, "a", (prompt, params)))[3]
        stopping = SamplingParams(max_tokens=30, temperature=0.0, stop_token_ids=[first, EOS_TOKEN_ID])
        outputs = [output async for output in engine.stream("b", prompt, stopping)]
        assert outputs[-1].finish_reason == "stop"

    async def test_what_can_never_fit_is_refused_and_harms_nobody(self, engine: Engine) -> None:
        fits = asyncio.create_task(collect(engine, "fits", requests(1, 40)[0]))
        with pytest.raises(RequestError) as caught:
            await collect(engine, "never", ([1] * 500, SamplingParams(max_tokens=100)))
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
        assert len(await fits) == 40


async def test_mistakes_come_out_of_start_with_their_remedy(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        await start_local_engine(tiny_config(), tmp_path)
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(ModelError, match="safetensors"):
        await start_local_engine(tiny_config(), tmp_path)
    with pytest.raises(ConfigError, match="kv_cache_gib"):
        await start_local_engine(tiny_config(kv_cache_gib=1e-6), checkpoint)
    with pytest.raises(ConfigError, match="one rank, not 2"):
        await start_local_engine(tiny_config(tensor_parallel_size=2), checkpoint)
    with pytest.raises(ConfigError, match="choose one of"):
        await start_engine(tiny_config(tensor_parallel_size=3), checkpoint)


class RecordingLauncher(GangLauncher):
    """A GangLauncher whose current gang the test can harm."""

    gang: Gang

    def launch(self, epoch: int) -> Gang:
        self.gang = super().launch(epoch)
        return self.gang


@pytest.mark.usefixtures("ray_local")
async def test_streams_survive_rank_scheduler_and_hang(checkpoint: Path) -> None:
    """Two ranks over Ray lose a process three times under 8 streams; tokens are one rank's, undisturbed."""
    wanted = requests(8, 150)
    local = await start_local_engine(tiny_config(), checkpoint)
    expected = await together(local, wanted)
    await local.close()

    settings = tiny_config(tensor_parallel_size=2, step_deadline_s=3.0)
    launcher = RecordingLauncher(
        Crew(SchedulerActor, WorkerActor, DrafterActor), settings, checkpoint, max_model_len=512
    )
    engine = Engine(launcher, settings)
    await engine.start()
    try:
        assert await together(engine, wanted, "undisturbed") == expected
        faults = [("rank1", signal.SIGKILL), ("scheduler", signal.SIGKILL), ("rank0", signal.SIGSTOP)]
        for number, (victim, fault) in enumerate(faults, start=1):
            streams = asyncio.create_task(together(engine, wanted, f"{victim}-"))
            await wait_until_all_emit(engine, 20)
            process = launcher.gang.processes[victim]
            os.kill(process.pid, fault)
            assert await streams == expected, f"{victim} {fault.name}"
            assert engine.num_rebuilds == number, "the fault came while streams ran"
            assert process.find() is None
        await wait_idle(engine)
        engine.check_health()
    finally:
        await engine.close()
    assert all(process.find() is None for process in launcher.gang.processes.values())
