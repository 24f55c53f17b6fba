"""Where a model comes from: a name is resolved to a directory that the workers can load.

default       SmolLM2-135M-Instruct, fetched once and kept under `cache_dir()` (`default_model.py`)
a directory   used as it is
a .gguf file  converted once into `cache_dir()` (`conversion.py`)
owner/name    downloaded by huggingface_hub into its own cache
"""

import re
from pathlib import Path
from typing import Literal

from .config import DEFAULT_MODEL
from .conversion import Progress, converted_target, resolve_gguf
from .default_model import default_target, resolve_default
from .errors import ModelError
from .model_directory import check_directory, check_weights

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "LICENSE*"]


def resolve_model(name: str, revision: str | None = None, progress: Progress | None = None) -> Path:
    """Return a directory with config.json, *.safetensors and tokenizer.json for `name`; fetch it if need be.

    `revision` belongs to a Hugging Face id. Once fetched, no network is used for the default model, a
    directory or a file. Raises ModelError, whose text names the remedy.
    """
    report = progress or _ignore
    try:
        match _kind(name, revision):
            case "default":
                return resolve_default(report)
            case "directory":
                return check_directory(Path(name).expanduser())
            case "gguf":
                return resolve_gguf(Path(name).expanduser(), report)
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
            target = default_target()
        case "directory":
            return check_directory(Path(name).expanduser())
        case "gguf":
            target = converted_target(Path(name).expanduser())
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
        return check_weights(path)
    if not _HUB_ID.fullmatch(name):
        raise ModelError(
            f"drafter {name!r} is no directory here and no Hugging Face id; "
            "give none, ngram, a directory, or an id"
        )
    try:
        return check_weights(_resolve_hub_id(name, None, progress or _ignore))
    except OSError as error:
        raise ModelError(f"drafter {name!r}: {error}") from None


def find_drafter(name: str) -> Path | None:
    """What `resolve_drafter` would return if it needs nothing fetched for that, else None."""
    if Path(name).expanduser().is_dir() or not _HUB_ID.fullmatch(name):
        return resolve_drafter(name)
    snapshot = _find_hub_id(name, None)
    return None if snapshot is None else check_weights(snapshot)


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
        why = f"cannot be downloaded: {str(error).strip().splitlines()[-1]}; try again, or give a directory"
    raise ModelError(f"model {name!r} {why}")


def _ignore(_what: str, _share: float | None) -> None:
    """The progress of a caller who does not ask for it."""
