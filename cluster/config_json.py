"""Typed reads from a checkpoint's config.json, with errors that name the file, the key and the remedy.

Only values are taken; code a checkpoint carries (`auto_map`) is never imported.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import ModelError

_REMEDY = "use the file as its author published it"


class ConfigJson:
    """One JSON object of a checkpoint. A key whose value is null counts as absent.

    Reads raise ModelError for a value of another kind, and for an absent one without a default.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        """`path` is the file that errors name; `values` may be an object inside it."""
        self.path = path
        self.values = values

    @classmethod
    def read(cls, path: Path) -> "ConfigJson":
        """Raises ModelError for a file that is absent, or not a JSON object."""
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError:
            raise ModelError(f"{path} does not exist; give a directory in Hugging Face's layout") from None
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} is not JSON that can be read ({error}); download it again") from None
        if not isinstance(values, dict):
            raise ModelError(f"{path} is not a JSON object; download it again")
        return cls(path, values)

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it stands, for what the reads below do not cover."""
        value = self.values.get(name)
        return default if value is None else value

    def number(self, name: str, default: float | None = None, *, is_zero_fine: bool = False) -> float:
        value = self.get(name, default)
        if value is None:
            raise ModelError(f"{self.path}: {name} is missing; {_REMEDY}")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < 0 or (value == 0 and not is_zero_fine):
            least = "0 or above" if is_zero_fine else "above 0"
            raise ModelError(f"{self.path}: {name} is {value!r}; it must be a number {least}; {_REMEDY}")
        return float(value)

    def integer(self, name: str, default: int | None = None, *, is_zero_fine: bool = False) -> int:
        value = self.number(name, default, is_zero_fine=is_zero_fine)
        if value != int(value):
            raise ModelError(f"{self.path}: {name} is {value!r}; it must be a whole number; {_REMEDY}")
        return int(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.path}: {name} is {value!r}; it must be true or false; {_REMEDY}")
        return value

    def object(self, name: str) -> "ConfigJson":
        """The object at `name`; one without keys when it is absent."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise ModelError(f"{self.path}: {name} is {value!r}; it must be an object; {_REMEDY}")
        return ConfigJson(self.path, value)
