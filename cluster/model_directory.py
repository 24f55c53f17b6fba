"""What a model's directory must hold: config.json, safetensors, for serving a tokenizer. Reads no weights.

Nothing is ever unpickled: a directory that has only pickled weights is refused.
"""

import json
from pathlib import Path

from .config_json import ConfigJson
from .errors import ModelError

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_NUM_NAMED = 5  # files named in an error


def check_directory(path: Path) -> Path:
    """Return `path`, or raise ModelError when a file that serving needs is not in it."""
    check_weights(path)
    if not (path / "tokenizer.json").is_file():
        raise ModelError(
            f"{path} has no tokenizer.json; save the fast tokenizer there "
            "(transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    return path


def check_weights(path: Path) -> Path:
    """Return `path`, or raise ModelError when config.json or a weight file is missing or damaged."""
    ConfigJson.read(path / "config.json")
    weight_files(path)
    return path


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a directory, as its index names them if it has one. Raises ModelError."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
            files = sorted(path / Path(name).name for name in names)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ModelError(
                f"{index} is not an index of weights ({error!r}); fetch the model again"
            ) from None
        if missing := [file.name for file in files if not file.is_file()]:
            named = ", ".join(missing[:_NUM_NAMED])
            raise ModelError(f"{path} lacks {len(missing)} of its weight files ({named}); fetch it again")
        return files
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    if files := sorted(path.glob("*.safetensors")):
        return files
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if pickles:
        raise ModelError(
            f"{path} has only pickled weights ({', '.join(pickles[:_NUM_NAMED])}), which are refused because "
            "loading them can run code; convert them to safetensors"
        )
    raise ModelError(f"{path} has no *.safetensors; fetch the model again or convert it to safetensors")
