"""The scheduler as a Ray actor: it binds the hub, then runs its loop until Shutdown."""

import faulthandler
import gc
import signal
from pathlib import Path

from ..cluster.address import Address
from ..cluster.channel import Hub
from ..cluster.config import EngineConfig
from ..cluster.processes import STDERR_FD, ProcessId
from ..cluster.unix_channel import UnixHub
from ..cluster.zmq_channel import ZmqHub
from .loop import run_scheduler


def calm_collector() -> None:
    """Look for cycles seldom: the state has none, and a full collection walks every request."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


class SchedulerActor:
    """Called by the gang in this order: identify, bind, run."""

    def __init__(self, engine: EngineConfig, max_model_len: int) -> None:
        faulthandler.register(signal.SIGUSR1, file=STDERR_FD, all_threads=True)
        self._engine = engine
        self._max_model_len = max_model_len
        self._hub: Hub | None = None

    def identify(self) -> ProcessId:
        return ProcessId.own()

    def bind(self, epoch: int, directory: Path | None, host: str | None) -> Address:
        """Open the hub on a unix socket in `directory`, or on TCP at `host`."""
        assert (directory is None) != (host is None), "give a directory or a host"
        hub = UnixHub(epoch, directory) if directory is not None else ZmqHub(epoch, str(host))
        self._hub = hub
        return hub.address

    def run(self) -> None:
        """Serve until Shutdown; raises why the epoch cannot go on."""
        assert self._hub is not None, "bind first"
        calm_collector()
        ranks = [f"rank{rank}" for rank in range(self._engine.tensor_parallel_size)]
        try:
            run_scheduler(self._hub, ranks, self._engine, self._max_model_len)
        finally:
            self._hub.close()
