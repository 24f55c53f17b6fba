"""Processes by identity: a pid alone may have been given to somebody else since."""

import contextlib
import os
import signal
import time
from collections.abc import Sequence

import msgspec
import psutil
import ray

STDERR_FD = 2  # Ray replaces sys.stderr, not the descriptor, which leads to the worker's log
_POLL_S = 0.01


class ProcessId(msgspec.Struct, frozen=True):
    """One process of the cluster."""

    pid: int
    started_s: float  # since the Unix epoch, as its node counts
    node_id: str  # Ray's
    host: str  # the node's address

    @classmethod
    def own(cls) -> "ProcessId":
        """This process, inside Ray."""
        started_s = psutil.Process().create_time()
        node_id = ray.get_runtime_context().get_node_id()
        return cls(os.getpid(), started_s, node_id, ray.util.get_node_ip_address())

    def find(self) -> psutil.Process | None:
        """The process if it lives on this node."""
        if self.node_id != ray.get_runtime_context().get_node_id():
            return None
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            if process.create_time() == self.started_s and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None


def send_signal(processes: Sequence[ProcessId], number: signal.Signals) -> None:
    """Signal those of `processes` that live on this node."""
    for process_id in processes:
        process = process_id.find()
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def wait_until_gone(processes: Sequence[ProcessId], timeout_s: float) -> bool:
    """Whether none of `processes` lives on this node any more, after at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while any(process.find() is not None for process in processes):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
