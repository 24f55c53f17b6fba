"""A gang starts whole, notices every death, and leaves no process, socket or shared memory behind."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from tiny import make_checkpoint
from tiny_drafter import config_of, make_drafter

from paceline.cluster import shared_tensor
from paceline.cluster.config import Config, EngineConfig, ModelConfig
from paceline.cluster.drafter_choice import DrafterChoice
from paceline.cluster.errors import EngineError, EngineStopped, ModelError, RankLost
from paceline.cluster.gang import Crew, Gang, GangLauncher
from paceline.cluster.messages import Failed, Output, Outputs, SamplingParams, Stats, Submit
from paceline.cluster.placement import Reservation
from paceline.drafter.actor import DrafterActor
from paceline.scheduler.actor import SchedulerActor
from paceline.workers.actor import WorkerActor

pytestmark = pytest.mark.usefixtures("ray_local")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama")


@pytest.fixture
def launchers() -> Iterator[list[GangLauncher]]:
    launchers: list[GangLauncher] = []
    yield launchers
    for launcher in launchers:
        launcher.abort()
        launcher.close()


def new_launcher(
    launchers: list[GangLauncher], path: Path, drafter: DrafterChoice | None = None, **engine: object
) -> GangLauncher:
    settings = {"tensor_parallel_size": 2, "num_threads": 1, "kv_cache_gib": 0.01, **engine}
    config = Config(
        model=ModelConfig(dtype="float32"),
        engine=EngineConfig(**settings),  # pyright: ignore[reportArgumentType]
    )
    crew = Crew(SchedulerActor, WorkerActor, DrafterActor)
    launchers.append(GangLauncher(crew, config, path, max_model_len=512, drafter=drafter))
    return launchers[-1]


def generate(gang: Gang, num_tokens: int) -> list[int]:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    gang.link.send(Submit(request_id="a", prompt_ids=[1, 2, 3], params=params))
    token_ids: list[int] = []
    while True:
        match gang.link.recv(30.0):
            case Outputs(outputs=[Output() as output]):
                token_ids += output.token_ids
                if output.finish_reason is not None:
                    return token_ids
            case Stats():
                continue
            case message:
                raise AssertionError(f"unexpected {message}")


class Losses:
    """What a gang's sentinel said, and when."""

    def __init__(self, gang: Gang) -> None:
        self.errors: list[EngineError] = []
        self.at = 0.0
        self._has_one = threading.Event()
        gang.watch(self._take)

    def wait(self) -> EngineError:
        assert self._has_one.wait(30.0)
        return self.errors[0]

    def _take(self, error: EngineError) -> None:
        self.at = time.monotonic()
        self.errors.append(error)
        self._has_one.set()


def assert_nothing_left(gang: Gang) -> None:
    for name, process in (gang.processes | gang.shards.processes).items():
        with contextlib.suppress(psutil.NoSuchProcess):
            alive = psutil.Process(process.pid).status()
            assert alive == psutil.STATUS_ZOMBIE, f"{name} {process.pid} is {alive}"
    assert gang._directory is None or not gang._directory.exists()
    names = [path.name for path in shared_tensor._DIRECTORY.iterdir()]
    assert not [name for name in names if name.startswith(gang._name_prefix)]


def make_tiny_drafter(path: Path) -> Path:
    """For the tiny checkpoint; it taps blocks 0 and 2."""
    options = {"target_layer_ids": [0, 2]}
    return make_drafter(path / "drafter", config_of(num_target_layers=3, options=options))


def test_a_gang_serves_and_leaves_nothing(
    launchers: list[GangLauncher], checkpoint: Path, tmp_path: Path
) -> None:
    drafter = DrafterChoice(name="tiny", path=make_tiny_drafter(tmp_path), tap_layer_ids=(0, 2))
    gang = new_launcher(launchers, checkpoint, drafter).launch(epoch=0)
    losses = Losses(gang)
    assert set(gang.processes) == {"scheduler", "rank0", "rank1"}
    assert set(gang.shards.processes) == {"shard0.0", "shard1.0"}
    assert gang._directory is not None
    assert gang._directory.stat().st_mode & 0o777 == 0o700
    assert len(generate(gang, 12)) == 12
    taps = [path for path in shared_tensor._DIRECTORY.iterdir() if path.name.startswith(gang._name_prefix)]
    assert [path.stat().st_size for path in taps] == [512 * 2 * 64 * 4] * 2
    environment = psutil.Process(gang.processes["rank1"].pid).environ()
    assert environment["OMP_NUM_THREADS"] == "1"
    gang.close()
    gang.close()
    assert losses.errors == [], "an end that was asked for is no loss"
    assert_nothing_left(gang)


def test_over_several_nodes_the_channel_is_tcp_at_the_nodes_address_only(
    launchers: list[GangLauncher], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reservation, "is_one_node", property(lambda _: False))
    gang = new_launcher(launchers, checkpoint).launch(epoch=0)
    Losses(gang)
    assert gang._directory is None
    assert len(generate(gang, 5)) == 5
    scheduler = gang.processes["scheduler"]
    connections = psutil.Process(scheduler.pid).net_connections("tcp")
    with_peers = [c.laddr for c in connections if c.status == psutil.CONN_ESTABLISHED]
    hub = next(
        c.laddr for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.ip == scheduler.host
    )
    assert with_peers.count(hub) == 2 * 3, "two connections each of the server and two ranks"
    gang.close()
    assert_nothing_left(gang)


@pytest.mark.parametrize("victim", ["rank1", "scheduler"])
def test_a_killed_process_is_noticed_at_once_and_the_rest_goes_too(
    launchers: list[GangLauncher], checkpoint: Path, victim: str
) -> None:
    gang = new_launcher(launchers, checkpoint).launch(epoch=0)
    losses = Losses(gang)
    killed_at = time.monotonic()
    os.kill(gang.processes[victim].pid, signal.SIGKILL)
    error = losses.wait()
    assert isinstance(error, RankLost)
    assert f"{victim} (pid {gang.processes[victim].pid}) died" in str(error)
    assert losses.at - killed_at < 1.0
    gang.close()
    assert len(losses.errors) == 1
    assert_nothing_left(gang)


def test_a_stopped_rank_overruns_the_deadline_stacks_are_dumped_and_it_is_killed(
    launchers: list[GangLauncher], checkpoint: Path
) -> None:
    gang = new_launcher(launchers, checkpoint, step_deadline_s=1.0).launch(epoch=0)
    losses = Losses(gang)
    generate(gang, 3)
    os.kill(gang.processes["rank1"].pid, signal.SIGSTOP)
    params = SamplingParams(max_tokens=5)
    gang.link.send(Submit(request_id="b", prompt_ids=[1, 2, 3], params=params))
    started = time.monotonic()
    while not isinstance(message := gang.link.recv(10.0), Failed):
        assert time.monotonic() - started < 10.0
    assert "rank1" in message.reason or "rank0" in message.reason
    assert "did not answer step" in str(losses.wait())
    gang.close()
    assert_nothing_left(gang)
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())  # pyright: ignore
    stacks = next(logs.glob(f"worker-*-{gang.processes['rank0'].pid}.err")).read_text()
    assert "run_rank" in stacks, "the stack of the rank that waited for the stopped one"


def test_a_rank_that_cannot_load_tells_the_user_why(
    launchers: list[GangLauncher], checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(ModelError):
        new_launcher(launchers, tmp_path).launch(epoch=0)


def test_a_start_can_be_aborted(launchers: list[GangLauncher], checkpoint: Path) -> None:
    launcher = new_launcher(launchers, checkpoint)
    threading.Timer(0.5, launcher.abort).start()
    started = time.monotonic()
    with pytest.raises(EngineStopped):
        launcher.launch(epoch=0)
    assert time.monotonic() - started < 25.0
    with pytest.raises(EngineStopped):
        launcher.launch(epoch=1)
