"""The engine of one process: scheduler, rank 0 and its shard are threads, the channel is a queue. No Ray.

It serves `paceline generate` and tests; state machine, runners and messages are those of the gang.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from torch import Tensor

from ..cluster.channel import Link, LocalHub
from ..cluster.config import Config
from ..cluster.drafter_choice import DrafterChoice, check_swap
from ..cluster.errors import EngineError, EngineStopped, PacelineError, RankLost
from ..cluster.messages import Shutdown, Stats
from ..cluster.ready import wait_until_up
from ..drafter.load import load_proposer
from ..drafter.proposer import Proposer
from ..scheduler.loop import run_scheduler
from ..workers.loop import run_rank
from ..workers.runner import Runner, choose_device
from .local_shard import LocalShard, MakeProposer

CLOSE_S = 30.0  # a rank ends between steps; a longer step than this is a hang


class LocalLauncher:
    """Starts one `LocalLife` after another. The choice of a drafter outlives them."""

    def __init__(
        self,
        config: Config,
        model_path: Path,
        max_model_len: int,
        drafter: DrafterChoice | None = None,
        make_proposer: MakeProposer | None = None,
    ) -> None:
        """`make_proposer` builds what a choice names; without it that is loaded as everywhere."""
        assert config.engine.tensor_parallel_size == 1, "one process holds one rank"
        self._config = config
        self._model_path = model_path
        self._max_model_len = max_model_len
        self._drafter = drafter
        self._tap_layer_ids = () if drafter is None else drafter.tap_layer_ids
        self._make_proposer = make_proposer or self._load
        self._life: LocalLife | None = None
        self._is_aborted = threading.Event()

    def launch(self, epoch: int) -> "LocalLife":
        life = LocalLife(
            self._config,
            self._model_path,
            self._max_model_len,
            epoch,
            self._tap_layer_ids,
            self._make_proposer,
        )
        if self._drafter is not None:
            life.shard.start(self._drafter)
        try:
            # only a first start waits for the shard: a stream that is to be resumed has waited enough
            wait_until_up(life.link, lambda: self._check(life), life.is_up if epoch == 0 else lambda _: True)
        except BaseException:
            life.close()
            if life.failure is not None:
                raise life.failure from None
            raise
        self._life = life
        return life

    def swap_drafter(self, choice: DrafterChoice | None) -> set[str]:
        check_swap(choice, self._tap_layer_ids)
        assert self._life is not None, "launch first"
        peer = self._life.shard.swap(choice)
        self._drafter = choice
        return set() if peer is None else {peer}

    def abort(self) -> None:
        self._is_aborted.set()

    def close(self) -> None:
        pass

    def _load(self, choice: DrafterChoice) -> Proposer:
        device = choose_device(self._config.engine.device, 0)
        return load_proposer(choice, self._config, self._model_path, self._max_model_len, device)

    def _check(self, life: "LocalLife") -> None:
        if self._is_aborted.is_set():
            raise EngineStopped("the engine was shut down while it started")
        if life.failure is not None:
            raise life.failure
        if life.shard.failure is not None:
            raise life.shard.failure


class LocalLife:
    """A scheduler and a rank, which end at Shutdown or when either fails, and a shard they can do without."""

    def __init__(
        self,
        config: Config,
        model_path: Path,
        max_model_len: int,
        epoch: int,
        tap_layer_ids: tuple[int, ...],
        make_proposer: MakeProposer,
    ) -> None:
        self.failure: PacelineError | None = None  # the first
        self._on_loss: Callable[[EngineError], None] | None = None
        self._lock = threading.Lock()
        hub = LocalHub(epoch)
        self.link: Link = hub.link("server")
        rank_link = hub.link("rank0")
        taps: Future[Tensor | None] = Future()
        self.shard = LocalShard(hub, self.link, taps, make_proposer, check=config.engine.check_invariants)

        def rank() -> None:
            try:
                runner = Runner(model_path, config, tap_layer_ids=tap_layer_ids)
            except BaseException:
                taps.set_exception(EngineStopped("the rank beside this shard did not load"))
                raise
            taps.set_result(runner.tap_buffer)
            run_rank(rank_link, runner)

        def scheduler() -> None:
            try:
                run_scheduler(hub, ["rank0"], config.engine, max_model_len)
            finally:
                hub.close()  # ends the rank too, should it still wait

        self._threads = [
            threading.Thread(target=self._guard, args=(name, body), name=f"engine {name}", daemon=True)
            for name, body in (("rank0", rank), ("scheduler", scheduler))
        ]
        for thread in self._threads:
            thread.start()

    def is_up(self, stats: Stats) -> bool:
        return self.shard.is_settled(stats)

    def watch(self, on_loss: Callable[[EngineError], None]) -> None:
        with self._lock:
            self._on_loss = on_loss
            failure = self.failure
        if failure is not None:
            on_loss(_as_loss(failure))

    def replace_shard(self, peer: str) -> None:
        self.shard.replace(peer)

    def close(self) -> None:
        with self._lock:
            self._on_loss = None
        self.shard.close()
        self.link.send(Shutdown())
        deadline = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        left = [thread.name for thread in self._threads if thread.is_alive()]
        if left := left + self.shard.join(max(0.0, deadline - time.monotonic())):
            raise EngineError(f"threads {', '.join(left)} did not end within {CLOSE_S:.0f} s")
        self.link.close()

    def _guard(self, name: str, body: Callable[[], None]) -> None:
        try:
            body()
        except EngineStopped:
            return  # the hub was closed: whoever closed it knows why
        except PacelineError as error:
            self._fail(error)
        except Exception as error:
            self._fail(RankLost(f"{name}: {type(error).__name__}: {error}"))

    def _fail(self, error: PacelineError) -> None:
        with self._lock:
            self.failure = self.failure or error
            on_loss = self._on_loss
        if on_loss is not None:
            on_loss(_as_loss(error))


def _as_loss(error: PacelineError) -> EngineError:
    return error if isinstance(error, EngineError) else EngineError(str(error))
