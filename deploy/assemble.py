"""How an engine is put together from a configuration and a model directory."""

from pathlib import Path

from ..cluster.config import Config
from ..cluster.drafter_choice import DrafterChoice
from ..cluster.errors import ConfigError
from ..cluster.gang import Crew, GangLauncher
from ..drafter.actor import DrafterActor
from ..scheduler.actor import SchedulerActor
from ..workers.actor import WorkerActor
from ..workers.runner import max_model_len
from ..workers.spec import ModelSpec
from .drafter_source import choose_drafter
from .engine import Engine
from .life import Launcher
from .local import LocalLauncher
from .local_shard import MakeProposer


async def start_local_engine(
    config: Config,
    model_path: Path,
    *,
    make_proposer: MakeProposer | None = None,
    tap_layer_ids: tuple[int, ...] = (),
) -> Engine:
    """An engine inside this process, without Ray: one rank and its shard, on threads.

    `make_proposer` takes the place of the configured drafter; it is called for each life of the shard, and
    what it makes reads `tap_layer_ids`.

    Raises ModelError or ConfigError for what cannot be loaded or does not fit. End it with `close()`.
    """
    if config.engine.tensor_parallel_size != 1:
        raise ConfigError(
            f"an engine without Ray has one rank, not {config.engine.tensor_parallel_size}; "
            "set tensor_parallel_size to 1 or use start_engine"
        )
    if make_proposer is None:
        drafter = choose_drafter(config, model_path)
    else:
        drafter = DrafterChoice(name="given", tap_layer_ids=tap_layer_ids)
    max_len = _max_model_len(config, model_path)
    return await _start(LocalLauncher(config, model_path, max_len, drafter, make_proposer), config)


async def start_engine(config: Config, model_path: Path) -> Engine:
    """An engine over the Ray this process is connected to: a scheduler, and a worker and a drafter per rank.

    Inside a Serve replica the actors go into the replica's placement group. `model_path` must exist on every
    node of the ranks. Raises what `start_local_engine` raises, ConfigError when the cluster is too small, and
    EngineError when the processes do not come up.
    """
    ModelSpec.load(model_path).check_tensor_parallel(config.engine.tensor_parallel_size)
    drafter = choose_drafter(config, model_path)
    crew = Crew(SchedulerActor, WorkerActor, DrafterActor)
    launcher = GangLauncher(crew, config, model_path, _max_model_len(config, model_path), drafter)
    return await _start(launcher, config)


async def _start(launcher: Launcher, config: Config) -> Engine:
    engine = Engine(launcher, config)
    try:
        await engine.start()
    except BaseException:
        await engine.close()
        raise
    return engine


def _max_model_len(config: Config, model_path: Path) -> int:
    return max_model_len(ModelSpec.load(model_path), config.model.max_model_len)
