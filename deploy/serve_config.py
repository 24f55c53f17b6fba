"""A configuration file of Ray Serve, read as strictly as our own.

Ray leaves out what it does not know: a misspelt `num_replicas` deploys without a word. Here every unknown key
is refused with the nearest name, first against Ray's schema, then the arguments of our application against
`cluster/config.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pydantic
import yaml
from ray.serve.schema import ServeDeploySchema

from ..cluster.config import Config, load_config, nearest
from ..cluster.errors import ConfigError

IMPORT_PATH = "paceline.deploy.replica:build_app"


def read_serve_config(file: Path) -> list[Config]:
    """The configuration of each of our applications in a YAML file of `serve deploy`.

    Raises ConfigError, which names the file and the place in it.
    """
    try:
        document = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read as YAML: {' '.join(str(error).split())}") from None
    try:
        return check_serve_config(document)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def check_serve_config(document: Any) -> list[Config]:
    """As `read_serve_config`, for what the file holds; of the environment nothing is taken."""
    if not isinstance(document, dict):
        raise ConfigError("a Serve configuration is a mapping with the key applications")
    _refuse_unknown(document, ServeDeploySchema, "")
    try:
        ServeDeploySchema.model_validate(document)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{_place(first['loc'])}: {first['msg']}") from None
    ours = [app for app in document["applications"] if app["import_path"] == IMPORT_PATH]
    if not ours:
        raise ConfigError(f"no application has the import_path {IMPORT_PATH}")
    return [load_config(flags=app.get("args", {}), environ={}) for app in ours]


def _refuse_unknown(value: Any, kind: type[pydantic.BaseModel], place: str) -> None:
    if not isinstance(value, Mapping):
        return  # of the wrong type, which Ray's schema says
    fields = {field.alias or name: field for name, field in kind.model_fields.items()} | kind.model_fields
    for key, inner in value.items():
        if key not in fields:
            raise ConfigError(f"{place or 'the file'}: unknown key {key!r}{nearest(str(key), fields)}")
        for model in _models(fields[key].annotation):
            for at, item in _items(inner, f"{place}.{key}".lstrip(".")):
                _refuse_unknown(item, model, at)


def _items(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        yield from ((f"{place}[{index}]", item) for index, item in enumerate(value))
    else:
        yield place, value


def _models(annotation: Any) -> Iterator[type[pydantic.BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _place(path: Sequence[str | int]) -> str:
    names = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(names).lstrip(".") or "the file"
