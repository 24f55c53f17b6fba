"""Servers under measurement: each is started, measured and ended as a process of its own."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ...cluster.errors import PacelineError
from ..ingress import free_port
from .client import BenchError
from .measure import Measurement
from .setting import Setting, measure_server

START_DEADLINE_S = 900.0  # a peer may compile its model
STOP_DEADLINE_S = 60.0


class PeerUnavailable(PacelineError):
    """A peer that cannot be installed or started here; the report names it with this reason."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started, and where it will listen."""

    command: list[str]
    environ: dict[str, str]
    port: int


def measure_paceline(drafter: str, setting: Setting, log_file: Path) -> list[Measurement]:
    """`paceline serve` with this drafter, else as a user starts it, with room for the highest concurrency."""
    port = free_port()
    command = [sys.executable, "-m", "paceline.deploy", "serve", setting.model_path]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", setting.dtype]
    command += ["--max-num-seqs", str(max_num_seqs(setting)), "--drafter", drafter]
    return measure_process(command, {}, port, setting, log_file)


def measure_process(
    command: Sequence[str], environ: Mapping[str, str], port: int, setting: Setting, log_file: Path
) -> list[Measurement]:
    """Start a server that will listen on `port`, measure it, and end it. Raises BenchError."""
    with running_server(command, environ, port, log_file) as url:
        return asyncio.run(measure_server(url, setting))


def max_num_seqs(setting: Setting) -> int:
    """Places a server needs."""
    return max(32, *setting.concurrencies)


def install_step(what: str, command: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
    """Run a part of an installation. Raises PeerUnavailable with its last line when it fails."""
    done = subprocess.run(
        command,
        env={**os.environ, **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        lines = done.stdout.strip().splitlines() or [f"exit code {done.returncode}"]
        raise PeerUnavailable(f"{what} cannot be installed: {lines[-1]}")


@contextmanager
def running_server(
    command: Sequence[str], environ: Mapping[str, str], port: int, log_file: Path
) -> Iterator[str]:
    """Start a server in a session of its own, yield its URL once healthy, and leave no process of it behind.

    Raises BenchError with the end of its log when it exits or is not healthy in time.
    """
    url = f"http://127.0.0.1:{port}"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _await_health(process, url, log_file)
        yield url
    finally:
        _end(process)


def _await_health(process: subprocess.Popen[bytes], url: str, log_file: Path) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise BenchError(f"the server exited with code {process.returncode}: {_tail(log_file)}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.25)
    raise BenchError(f"the server was not healthy after {START_DEADLINE_S:.0f} s: {_tail(log_file)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the leader to stop; what is left of its group after that is killed.

    SIGTERM, because a shell starts background jobs with SIGINT ignored; our children would inherit that.
    """
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_DEADLINE_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(log_file: Path) -> str:
    lines = log_file.read_text(errors="replace").strip().splitlines()
    return " / ".join(lines[-3:]) or "its log is empty"
