"""The CPU kernels of `native/`: compiled once with the machine's C++ compiler, kept in the cache, loaded.

They are plain C functions over pointers, so that compiling takes seconds and one binary serves any torch; the
threads are those of torch's own OpenMP runtime, which is in the process before they are loaded.

Several processes may start at once: the first to hold the lock compiles, into a file of another name that is
renamed when it is whole; the others find it.
"""

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Literal

import torch

from ..cluster.choices import cache_dir
from ..cluster.errors import ConfigError

Isa = Literal["avx512", "avx2"]

_SOURCES = Path(__file__).parent / "native"
_FLAGS: dict[Isa, list[str]] = {
    "avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
    "avx2": ["-march=x86-64-v3"],
}
# The runtime is not linked: torch's own, already loaded, answers for its symbols. A second one would be a
# second pool of threads on the same cores.
_COMPILE = ["-std=c++17", "-O3", "-fPIC", "-fopenmp", "-c"]
_COMPILERS = ("c++", "g++", "clang++")
_TIMEOUT_S = 300
_INT = ctypes.c_int64
_POINTER = ctypes.c_void_p
_FLAG = ctypes.c_bool
_FLOAT = ctypes.c_float
_SIGNATURES: dict[str, tuple[list[type], type | None]] = {
    "packed_bytes": ([_INT, _INT, _FLAG], _INT),
    "is_bfloat16_exact": ([_POINTER, _INT], _FLAG),
    "pack": ([_POINTER, _INT, _INT, _FLAG, _POINTER], None),
    "linear": ([_POINTER, _INT, _INT, _POINTER, _FLAG, _INT, _INT, _POINTER, _POINTER, _INT], None),
    "rms_norm": ([_POINTER, _INT, _INT, _INT, _POINTER, _POINTER, _FLOAT, _POINTER, _INT], None),
    "rope": ([_POINTER, _INT, _INT, _INT, _INT, _POINTER, _POINTER, _POINTER, _INT], None),
    "write_kv": ([_POINTER, _INT, _POINTER, _INT, _INT, _INT, _POINTER, _POINTER, _POINTER, _FLAG], None),
    "place_qkv": (
        [_POINTER, *[_INT] * 4, *[_POINTER] * 4, _FLOAT, _POINTER, _POINTER, _POINTER, _FLAG, _INT],
        None,
    ),
    "silu_and_mul": ([_POINTER, _INT, _INT, _POINTER, _INT], None),
    "attention": ([_POINTER, _POINTER, _INT, _POINTER, _POINTER, _FLAG, _POINTER, _INT], None),
}

log = logging.getLogger(__name__)


def find_isa() -> Isa | None:
    """The widest instruction set of this CPU that the kernels are written for."""
    has = torch.cpu.get_capabilities().get
    if has("avx512_f") and has("avx512_bw") and has("avx512_dq") and has("avx512_vl") and has("avx512_cd"):
        return "avx512"
    return "avx2" if has("avx2") and has("fma3") else None


@functools.cache
def load_library(isa: Isa) -> ctypes.CDLL:
    """The kernels for an instruction set, compiled if need be; ConfigError with its remedy if that fails."""
    path = library_path(isa)
    try:
        if not path.exists():
            _compile_once(isa, path)
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError(
            f"the CPU kernels cannot be loaded ({error}); set PACELINE_CACHE to a directory on a local disk"
        ) from None
    for name, (arguments, result) in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library


def library_path(isa: Isa) -> Path:
    """Where the kernels of exactly these sources and flags are kept."""
    digest = hashlib.sha256(" ".join([*_COMPILE, *_FLAGS[isa]]).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode())
        digest.update(source.read_bytes())
    return cache_dir() / "kernels" / f"{isa}-{digest.hexdigest()[:16]}.so"


def find_compiler() -> str | None:
    return next(filter(None, map(shutil.which, _COMPILERS)), None)


def _compile_once(isa: Isa, path: Path) -> None:
    compiler = find_compiler()
    if compiler is None:
        raise ConfigError("the CPU kernels need a C++ compiler; install g++ (apt-get install g++)")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return
        log.info("Compiling the CPU kernels (once, about 10 s)")
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            _compile(compiler, isa, Path(directory))
            os.rename(Path(directory, "kernels.so"), path)


def _compile(compiler: str, isa: Isa, directory: Path) -> None:
    sources = sorted(str(path) for path in _SOURCES.glob("*.cpp"))
    objects = [str(directory / f"{Path(source).stem}.o") for source in sources]
    for command in (
        [compiler, *_COMPILE, *_FLAGS[isa], *sources],
        [compiler, "-shared", "-o", "kernels.so", *objects],
    ):
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=_TIMEOUT_S)
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            reason = errors[0] if errors else f"exit code {done.returncode}"
            raise ConfigError(
                f"{compiler} cannot compile the CPU kernels ({reason}); install g++ 12 or newer"
            )
