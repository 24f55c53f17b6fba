"""The drafter actors of one gang. The gang can lose any of them and goes on; they come back, or are swapped.

    create beside its rank -> load() -> run() says ShardReady to the scheduler -> ... -> run() ends: a loss
    loss: ShardLost to the scheduler, and a new life after a pause, as often as `Restarts` allows
    silent (the scheduler says so): stacks into the log, SIGKILL, and from there a loss like any other
    swap: every new life loads beside the old ones; only when all have, run() is called on them. The scheduler
    moves over between two steps and sends the old ones Shutdown

One thread, the keeper, watches every life; what others ask is noted under the lock and done by it or them.
"""

import contextlib
import logging
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from .address import Address
from .channel import Link
from .config import Config
from .drafter_choice import DrafterChoice, Restarts, shard_peer
from .errors import EngineError, PacelineError, UserError
from .messages import ShardLost, Stats
from .placement import DRAFTER_CPUS, DRAFTER_GPUS, Reservation
from .processes import ProcessId, send_signal
from .ready import ready_peers
from .shared_tensor import Descriptor

KEEPER_S = 0.25  # one look; a death ends it at once
RETIRE_S = 10.0  # for a life whose successor was called to hear Shutdown
DUMP_S = 0.2  # for the stacks to reach the log before the kill
IDENTIFY_S = 5.0  # at the end, for an actor that was just being started to say who it is

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Life:
    """One actor. `run` is None while it loads."""

    shard: int
    peer: str
    actor: Any
    identity: Any  # reference to a ProcessId
    loaded: Any  # reference
    run: Any = None  # reference
    process: ProcessId | None = None


@dataclass
class _Seat:
    """What is to draft beside one rank."""

    restarts: Restarts
    num_lives: int = 0
    current: _Life | None = None
    starts_at: float | None = None  # of the next life; None with `current` None: it stays absent


class Shards:
    """Owns the lives; each is in a seat, retiring, or loading for a swap."""

    def __init__(
        self,
        drafter: type,
        config: Config,
        model_path: Path,
        max_model_len: int,
        place: Reservation,
        threads: list[int],
        address: Address,
        link: Link,
        taps: list[Descriptor | None],
    ) -> None:
        """`drafter` is the actor class; `threads` and `taps` are those of each rank."""
        self.failure: UserError | None = None  # the mistake that keeps a shard from loading
        self._drafter = drafter
        self._config = config
        self._model_path = model_path
        self._max_model_len = max_model_len
        self._place = place
        self._threads = threads
        self._address = address
        self._link = link
        self._taps = taps
        self._choice: DrafterChoice | None = None
        self._seats = [_Seat(Restarts()) for _ in threads]
        self._retiring: dict[_Life, float] = {}  # until when they may take
        self._silent: set[_Life] = set()
        self._lives: set[_Life] = set()  # all that were not killed yet
        self._ending: list[ProcessId] = []  # of lives that were killed, until they are gone
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="shard keeper", daemon=True)

    @property
    def processes(self) -> dict[str, ProcessId]:
        """Those that load or run, by peer; one that has just been created is not known yet."""
        with self._lock:
            return {life.peer: life.process for life in self._lives if self._find(life) and life.process}

    def start(self, choice: DrafterChoice | None) -> None:
        with self._lock:
            self._choice = choice
            if choice is not None:
                for shard, seat in enumerate(self._seats):
                    seat.current = self._create(shard, choice)
        self._keeper.start()

    def is_settled(self, stats: Stats) -> bool:
        """Whether the scheduler uses every shard that is not given up."""
        ready = ready_peers(stats)
        with self._lock:
            return all(
                seat.starts_at is None and (seat.current is None or seat.current.peer in ready)
                for seat in self._seats
            )

    def replace(self, peer: str) -> None:
        """End a life that does not answer."""
        with self._lock:
            self._silent |= {life for life in self._lives if life.peer == peer}

    def swap(self, choice: DrafterChoice | None, timeout_s: float) -> set[str]:
        """Blocks until all have loaded; returns their peers. An error leaves the old ones as they are."""
        with self._lock:
            heirs = [self._create(shard, choice) for shard in range(len(self._seats))] if choice else []
        try:
            ray.get([life.loaded for life in heirs], timeout=timeout_s)
        except RayError as error:
            with self._lock:
                for life in heirs:
                    self._kill(life)
            raise _loading_error(error, timeout_s) from None
        with self._lock:
            self._choice = choice
            for shard, seat in enumerate(self._seats):
                old, seat.current, seat.starts_at = seat.current, None, None
                if heirs:
                    seat.current = heirs[shard]
                    self._run(heirs[shard])
                if old is not None:
                    self._retire(old, has_heir=bool(heirs))
        return {life.peer for life in heirs}

    def stop(self) -> None:
        """Start nothing any more; returns when the keeper has ended."""
        self._is_closing.set()
        if self._keeper.is_alive():
            self._keeper.join()

    def kill(self) -> list[ProcessId]:
        """Kill every life after `stop`; returns the processes, for the caller to see them go."""
        lives = list(self._lives)
        if unknown := [life.identity for life in lives if self._find(life) is None]:
            ray.wait(unknown, num_returns=len(unknown), timeout=IDENTIFY_S)
        for life in lives:
            self._kill(life)
        return self._ending

    def _create(self, shard: int, choice: DrafterChoice) -> _Life:
        seat = self._seats[shard]
        peer = shard_peer(shard, seat.num_lives)
        seat.num_lives += 1
        is_on_gpu = self._place.device == "cuda" and choice.path is not None
        actor = (
            ray.remote(self._drafter)
            .options(
                num_cpus=DRAFTER_CPUS,
                num_gpus=DRAFTER_GPUS if is_on_gpu else 0,
                max_restarts=0,
                scheduling_strategy=self._place.strategy(self._place.rank_bundles[shard]),
                # as many as its rank's: the two take turns
                runtime_env={"env_vars": {"OMP_NUM_THREADS": str(self._threads[shard])}},
            )
            .remote(
                self._config,
                self._model_path,
                self._max_model_len,
                choice,
                shard,
                "cuda" if is_on_gpu else "cpu",
            )
        )
        life = _Life(shard, peer, actor, actor.identify.remote(), actor.load.remote())
        self._lives.add(life)
        return life

    def _run(self, life: _Life) -> None:
        self._find(life)
        life.run = life.actor.run.remote(self._address, life.peer, self._taps[life.shard])

    def _find(self, life: _Life) -> ProcessId | None:
        if life.process is None and ray.wait([life.identity], timeout=0)[0]:
            with contextlib.suppress(RayError):
                life.process = ray.get(life.identity)
        return life.process

    def _kill(self, life: _Life) -> None:
        self._lives.discard(life)
        self._silent.discard(life)
        self._retiring.pop(life, None)
        if process := self._find(life):
            self._ending = [other for other in self._ending if other.find() is not None] + [process]
        with contextlib.suppress(RayError):
            ray.kill(life.actor)

    def _retire(self, life: _Life, *, has_heir: bool) -> None:
        if life.run is not None and has_heir:
            self._retiring[life] = time.monotonic() + RETIRE_S
            return
        if life.run is not None:
            self._link.send(ShardLost(life.peer, is_dismissed=not has_heir))
        self._kill(life)

    def _keep(self) -> None:
        try:
            while not self._is_closing.is_set():
                self._look()
        except (RayError, EngineError) as error:
            if not self._is_closing.is_set():  # Ray or the hub is gone: the gang's own sentinel tells
                log.warning("shards are kept no more: %s", error)

    def _look(self) -> None:
        with self._lock:
            watched = [seat.current for seat in self._seats if seat.current is not None]
            awaited = {life.run or life.loaded: life for life in (*watched, *self._retiring)}
        if not awaited:
            self._is_closing.wait(KEEPER_S)
        ended = ray.wait(list(awaited), timeout=KEEPER_S)[0] if awaited else []
        with self._lock:
            for reference in ended:
                self._after(awaited[reference], reference)
            now = time.monotonic()
            self._silent |= {life for life, until in self._retiring.items() if now > until}
            for seat, shard in zip(self._seats, range(len(self._seats)), strict=True):
                if seat.starts_at is not None and now >= seat.starts_at and self._choice is not None:
                    seat.starts_at, seat.current = None, self._create(shard, self._choice)
            silent, self._silent = self._silent & self._lives, set()
        self._end_silent(silent)

    def _after(self, life: _Life, reference: Any) -> None:
        """A life has loaded, or has ended."""
        if life not in self._lives:
            return  # killed meanwhile
        seat = self._seats[life.shard]
        if life.run is None and seat.current is life:
            try:
                ray.get(reference)
            except RayError as error:
                self._lose(life, seat, error)
            else:
                self._run(life)
        elif life in self._retiring:
            self._link.send(ShardLost(life.peer))  # in case it ended otherwise than by Shutdown
            self._kill(life)
        elif seat.current is life and reference is life.run:
            try:
                ray.get(reference)
                self._lose(life, seat, None)
            except RayError as error:
                self._lose(life, seat, error)

    def _lose(self, life: _Life, seat: _Seat, error: RayError | None) -> None:
        cause = _cause(error)
        pid = "" if life.process is None else f" (pid {life.process.pid})"
        log.warning("%s%s is lost, streams go on without its drafts: %s", life.peer, pid, cause)
        self._link.send(ShardLost(life.peer))
        self._kill(life)
        seat.current = None
        if isinstance(cause, UserError):
            self.failure = cause
            return
        seat.starts_at = seat.restarts.after_loss(time.monotonic())
        if seat.starts_at is None:
            log.error("shard %d was lost too often and stays absent", life.shard)

    def _end_silent(self, lives: set[_Life]) -> None:
        """With a signal: a stopped process does not hear Ray. The next look finds them dead."""
        processes = [life.process for life in lives if life.process is not None]
        if processes:
            send_signal(processes, signal.SIGUSR1)
            time.sleep(DUMP_S)
            send_signal(processes, signal.SIGKILL)
        for life in lives:
            with contextlib.suppress(RayError):
                ray.kill(life.actor)


def _cause(error: RayError | None) -> Exception:
    if error is None:
        return EngineError("it ended although nobody asked it to")
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return error.cause
    if isinstance(error, RayActorError):
        return EngineError("its process died")
    return error


def _loading_error(error: RayError, timeout_s: float) -> PacelineError:
    if isinstance(error, GetTimeoutError):
        return EngineError(f"the drafter did not load within {timeout_s:.0f} s; the old one serves on")
    cause = _cause(error)
    if isinstance(cause, PacelineError):
        return cause
    return EngineError(f"the drafter did not load ({type(cause).__name__}: {cause}); the old one serves on")
