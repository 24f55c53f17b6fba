"""The life of one engine's processes over Ray: all of them, or none.

    1. reserve a placement group, or take the Serve replica's; order the ranks, rank 0's node first
    2. start the scheduler actor in bundle 0, beside the server, and each worker actor in its rank's bundle;
       all say who they are; workers make the tap scratch a drafter reads
    3. the scheduler binds the hub: a unix socket in a private directory when all are on one node, else TCP
       on its node's address; with several ranks, rank 0 opens the rendezvous store
    4. `run()` is called on the scheduler and on every worker and does not return while the epoch lives:
       workers meet, load their part of the model and say Ready through the channel; the drafters, which
       the gang can lose, are started beside them (`shards.py`)
    5. the scheduler's report ends the launch, in a first epoch once it has the drafters too; the sentinel
       begins: `ray.wait` on the run() references
    6. a reference that ends by itself is a loss: the engine is told, and closes the gang
    7. close: Shutdown through the channel; who has not returned after a grace, or at once if somebody
       failed, has its stacks dumped into its log (SIGUSR1) and is killed; done when every process of this
       node is gone

A rank that dies takes the group with it, because NCCL cannot lose one; it never restarts. Ray reports
a death within milliseconds but never a hang: for that the scheduler has a step deadline, the engine its own.
"""

import contextlib
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from .address import Address
from .channel import Link, connect
from .config import Config
from .drafter_choice import DrafterChoice, check_swap
from .errors import EngineError, EngineStopped, PacelineError, RankLost, UserError
from .messages import Shutdown
from .placement import SCHEDULER_CPUS, WORKER_CPUS, WORKER_GPUS, Reservation, reserve
from .processes import ProcessId, send_signal, wait_until_gone
from .ready import wait_until_up
from .shards import Shards
from .shared_tensor import Descriptor, remove_leftovers
from .topology import threads_per_rank

SENTINEL_S = 0.25  # one look; a death ends it at once
GRACE_S = 10.0  # for everybody to return after Shutdown
DUMP_S = 0.2  # for the stacks to reach the log before the kill
KILL_S = 2.0  # after which a process that ignores Ray's kill gets SIGKILL
GONE_S = 10.0


@dataclass(frozen=True)
class Crew:
    """The actor classes, injected because they live on higher floors."""

    scheduler: type  # (engine config, max_model_len); identify, bind, run
    worker: type  # (config, path, rank, device, ranks_share_node, name_prefix); identify, open_taps,
    # open_store, run
    drafter: type  # (config, path, max_model_len, choice, shard, device); identify, load, run


class GangLauncher:
    """Owns the reservation, which outlives epochs, and starts one `Gang` after another in it."""

    def __init__(
        self,
        crew: Crew,
        config: Config,
        model_path: Path,
        max_model_len: int,
        drafter: DrafterChoice | None = None,
    ) -> None:
        """`drafter` settles which blocks the ranks tap; it may be swapped for one that reads the same."""
        self._crew = crew
        self._config = config
        self._model_path = model_path
        self._max_model_len = max_model_len
        self._drafter = drafter
        self._tap_layer_ids = () if drafter is None else drafter.tap_layer_ids
        self._gang: Gang | None = None
        self._reservation: Reservation | None = None
        self._is_aborted = threading.Event()

    def launch(self, epoch: int) -> "Gang":
        """Steps 1 to 5. Raises the UserError of a rank that cannot load, else EngineError."""
        self._check_abort()
        deadline = time.monotonic() + self._config.engine.start_timeout_s
        if self._reservation is None:
            self._reservation = reserve(self._config.engine, self._config.engine.start_timeout_s)
        gang = Gang(self._reservation, epoch)
        try:
            gang.start(
                self._crew, self._config, self._model_path, self._max_model_len, self._tap_layer_ids, deadline
            )
            gang.shards.start(self._drafter)
            # only a first start waits for the shards: a stream that is to be resumed has waited enough
            is_up = gang.shards.is_settled if epoch == 0 else lambda _: True
            wait_until_up(gang.link, lambda: self._check(gang), is_up)
        except RayError as error:
            gang.close()
            raise RankLost(f"epoch {epoch} did not start: {_one_line(error)}") from error
        except BaseException:
            failure = gang.failure(wait_s=0.0)
            gang.close()
            if failure is not None:
                raise failure from None
            raise
        self._gang = gang
        return gang

    def swap_drafter(self, choice: DrafterChoice | None) -> set[str]:
        """Load `choice` beside what drafts now and let it take over, in later epochs too."""
        check_swap(choice, self._tap_layer_ids)
        assert self._gang is not None, "launch first"
        peers = self._gang.shards.swap(choice, self._config.engine.start_timeout_s)
        self._drafter = choice
        return peers

    def abort(self) -> None:
        self._is_aborted.set()

    def close(self) -> None:
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None

    def _check(self, gang: "Gang") -> None:
        self._check_abort()
        failure = gang.failure(wait_s=0.0)
        if failure is not None:
            raise failure
        if gang.epoch == 0 and gang.shards.failure is not None:
            raise gang.shards.failure

    def _check_abort(self) -> None:
        if self._is_aborted.is_set():
            raise EngineStopped("the engine was shut down while it started")


class Gang:
    """The processes of one epoch, and everything that must vanish with them."""

    def __init__(self, reservation: Reservation, epoch: int) -> None:
        self.epoch = epoch
        self.processes: dict[str, ProcessId] = {}  # "scheduler", "rank0", ...
        self._reservation = reservation
        self._name_prefix = f"paceline-{secrets.token_hex(8)}-"
        self._directory: Path | None = None
        self._link: Link | None = None
        self._shards: Shards | None = None
        self._actors: dict[str, Any] = {}
        self._runs: dict[Any, str] = {}  # run() reference -> name
        self._sentinel: threading.Thread | None = None  # once the epoch is up
        self._is_closing = threading.Event()
        self._close_lock = threading.Lock()
        self._is_closed = False

    @property
    def link(self) -> Link:
        assert self._link is not None, "start first"
        return self._link

    @property
    def shards(self) -> Shards:
        assert self._shards is not None, "start first"
        return self._shards

    def start(
        self,
        crew: Crew,
        config: Config,
        model_path: Path,
        max_model_len: int,
        tap_layer_ids: tuple[int, ...],
        deadline: float,
    ) -> None:
        """Steps 2 to 4, but for the drafters, which are ready to be started."""
        self._start_actors(crew, config, model_path, max_model_len)
        names = list(self._actors)
        identities = _get([self._actors[name].identify.remote() for name in names], deadline)
        self.processes = dict(zip(names, identities, strict=True))
        workers = [self._actors[f"rank{rank}"] for rank in range(config.engine.tensor_parallel_size)]
        taps: list[Descriptor | None] = [None] * len(workers)
        if tap_layer_ids:
            taps = _get([worker.open_taps.remote(tap_layer_ids) for worker in workers], deadline)
        address = self._bind(deadline)
        store = None
        if config.engine.tensor_parallel_size > 1:
            host = "127.0.0.1" if self._reservation.ranks_share_node else self.processes["rank0"].host
            store = _get(self._actors["rank0"].open_store.remote(host), deadline)
        self._link = connect(address, "server")
        for name, actor in self._actors.items():
            run = actor.run.remote() if name == "scheduler" else actor.run.remote(address, store)
            self._runs[run] = name
        threads = [self._num_threads(rank, config) for rank in range(len(workers))]
        self._shards = Shards(
            crew.drafter,
            config,
            model_path,
            max_model_len,
            self._reservation,
            threads,
            address,
            self._link,
            taps,
        )

    def watch(self, on_loss: Callable[[EngineError], None]) -> None:
        """Step 6: from now on the sentinel calls `on_loss`, once."""
        self._sentinel = threading.Thread(
            target=self._watch, args=[on_loss], name=f"sentinel {self.epoch}", daemon=True
        )
        self._sentinel.start()

    def failure(self, wait_s: float) -> PacelineError | None:
        """Why a run() has ended, None while all go on; what the user can mend first: it caused the rest."""
        ended, _ = ray.wait(list(self._runs), timeout=wait_s) if self._runs else ([], [])
        if not ended:
            return None
        ended, _ = ray.wait(list(self._runs), num_returns=len(self._runs), timeout=0)
        failures = [self._why(run) for run in ended]
        return next((failure for failure in failures if isinstance(failure, UserError)), failures[0])

    def replace_shard(self, peer: str) -> None:
        self.shards.replace(peer)

    def close(self) -> None:
        """Step 7."""
        self._is_closing.set()
        with self._close_lock:
            if self._is_closed:
                return
            if self._sentinel is not None:
                self._sentinel.join()
            if self._shards is not None:
                self._shards.stop()
            self._end_processes()
            if self._link is not None:
                self._link.close()
            if self._directory is not None:
                shutil.rmtree(self._directory, ignore_errors=True)
            remove_leftovers(self._name_prefix)
            self._is_closed = True

    def _start_actors(self, crew: Crew, config: Config, model_path: Path, max_model_len: int) -> None:
        place = self._reservation
        self._actors["scheduler"] = (
            ray.remote(crew.scheduler)
            .options(
                num_cpus=SCHEDULER_CPUS, num_gpus=0, max_restarts=0, scheduling_strategy=place.strategy(0)
            )
            .remote(config.engine, max_model_len)
        )
        for rank, bundle in enumerate(place.rank_bundles):
            self._actors[f"rank{rank}"] = (
                ray.remote(crew.worker)
                .options(
                    num_cpus=WORKER_CPUS,
                    num_gpus=WORKER_GPUS if place.device == "cuda" else 0,
                    max_restarts=0,
                    scheduling_strategy=place.strategy(bundle),
                    # Ray would set OMP_NUM_THREADS from num_cpus, that is to 1
                    runtime_env={"env_vars": {"OMP_NUM_THREADS": str(self._num_threads(rank, config))}},
                )
                .remote(config, model_path, rank, place.device, place.ranks_share_node, self._name_prefix)
            )

    def _num_threads(self, rank: int, config: Config) -> int:
        nodes = self._reservation.rank_nodes
        num_cores = len(os.sched_getaffinity(0))  # Ray's logical CPUs say nothing about cores
        return threads_per_rank(num_cores, nodes.count(nodes[rank]), config.engine.num_threads)

    def _bind(self, deadline: float) -> Address:
        scheduler = self._actors["scheduler"]
        if self._reservation.is_one_node:
            # a unix socket's path has at most 107 characters, which a long TMPDIR would exceed
            self._directory = Path(tempfile.mkdtemp(prefix="paceline-", dir="/tmp"))
            return _get(scheduler.bind.remote(self.epoch, self._directory, None), deadline)
        return _get(scheduler.bind.remote(self.epoch, None, self.processes["scheduler"].host), deadline)

    def _watch(self, on_loss: Callable[[EngineError], None]) -> None:
        while not self._is_closing.is_set():
            try:
                failure = self.failure(wait_s=SENTINEL_S)
            except RayError as error:
                failure = RankLost(f"Ray is gone: {_one_line(error)}")
            if failure is not None and not self._is_closing.is_set():
                on_loss(failure if isinstance(failure, EngineError) else EngineError(str(failure)))
                return

    def _why(self, run: Any) -> PacelineError:
        name = self._runs[run]
        try:
            ray.get(run)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, PacelineError):
                return cause
            return RankLost(f"{name} failed: {_one_line(error if cause is None else cause)}")
        except RayActorError:
            return RankLost(f"{name} (pid {self.processes[name].pid}) died")
        return RankLost(f"{name} ended although nobody asked it to")

    def _end_processes(self) -> None:
        if self._sentinel is not None and (left := self._ask_to_end()):
            send_signal([self.processes[name] for name in left], signal.SIGUSR1)
            time.sleep(DUMP_S)
        for actor in self._actors.values():
            with contextlib.suppress(RayError):
                ray.kill(actor)
        everybody = list(self.processes.values())
        if self._shards is not None:
            everybody += self._shards.kill()
        if not wait_until_gone(everybody, KILL_S):
            send_signal(everybody, signal.SIGKILL)  # a stopped process does not hear Ray
        if not wait_until_gone(everybody, GONE_S):
            raise EngineError(f"processes {[p.pid for p in everybody if p.find() is not None]} do not die")

    def _ask_to_end(self) -> list[str]:
        """Send Shutdown and wait for every run() to return, unless one failed; names those that have not."""
        with contextlib.suppress(EngineError):
            self.link.send(Shutdown())
        deadline = time.monotonic() + GRACE_S
        left = dict(self._runs)
        while left and time.monotonic() < deadline:
            ended, _ = ray.wait(list(left), timeout=SENTINEL_S)
            for run in ended:
                del left[run]
                try:
                    ray.get(run)
                except RayError:
                    return list(left.values())
        return list(left.values())


def _get(reference: Any, deadline: float) -> Any:
    try:
        return ray.get(reference, timeout=max(0.0, deadline - time.monotonic()))
    except GetTimeoutError:
        raise RankLost("the engine's processes did not start within start_timeout_s") from None


def _one_line(error: BaseException) -> str:
    """Ray's messages are pages, of which the last line says what happened."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1].strip()}"
