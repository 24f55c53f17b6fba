"""Reading a checkpoint: safetensors only, checked before anything is built, each rank its slices only.

Pickled weights (`*.bin`, `*.pt`) are refused: loading one runs code its author chose.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import ModelError
from .model_directory import weight_files

Shapes = Mapping[str, tuple[int, ...]]

_FLOATS = ("F32", "BF16", "F16")
_INTEGERS = ("I64", "I32")
_BLOCK_BYTES = 16 << 20  # copied at a time, so that a cast never holds a second whole tensor
_NUM_NAMED = 5  # tensors named in an error


class Checkpoint:
    """The open safetensors files of one directory; a context manager.

    Raises ModelError when the directory has no safetensors, or a listed file is absent or damaged.
    """

    def __init__(self, path: Path, rename: Callable[[str], str] = str) -> None:
        """`rename` turns a stored name into the one by which the tensor is known here."""
        self.path = path
        self._stack = ExitStack()
        self._stored: dict[str, tuple[Any, str]] = {}  # name -> its open file, name in it
        for file in weight_files(path):
            try:
                opened = self._stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                self._stack.close()
                raise ModelError(f"{file} cannot be read ({error}); download it again") from None
            self._stored |= {rename(name): (opened, name) for name in opened.keys()}  # noqa: SIM118 - no mapping

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self._stored.clear()
        self._stack.close()

    @property
    def names(self) -> set[str]:
        return set(self._stored)

    def check(
        self,
        expected: Shapes,
        *,
        optional: Shapes | None = None,
        integers: tuple[str, ...] = (),
        ignored: tuple[str, ...] = (),
    ) -> None:
        """Raise ModelError naming the tensors that are missing, unexpected, misshapen or of a wrong type.

        Tensors are floating point, but those of `integers`. One whose name ends in one of `ignored` may be
        there and is not read.
        """
        shapes = {**expected, **(optional or {})}
        found = {name for name in self._stored if not name.endswith(ignored)}
        self._report(
            _named("missing", expected.keys() - found)
            + _named("unexpected", found - shapes.keys())
            + self._wrong({name: shapes[name] for name in found & shapes.keys()}, integers)
        )

    def check_some(self, expected: Shapes) -> None:
        """Like `check`, of a few floating-point tensors among others."""
        found = self._stored.keys() & expected.keys()
        self._report(
            _named("missing", expected.keys() - found)
            + self._wrong({name: expected[name] for name in found}, ())
        )

    def read(self, name: str, into: Tensor, *, first_row: int = 0, first_column: int = 0) -> None:
        """Copy (and cast) the part of a tensor that starts at the given indices and has `into`'s shape."""
        stored = self._slice(name)
        if into.dim() == 1:
            into.copy_(stored[first_row : first_row + len(into)])
            return
        num_rows, num_columns = into.shape
        block = max(1, _BLOCK_BYTES // (4 * num_columns))
        columns = slice(first_column, first_column + num_columns)
        for row in range(0, num_rows, block):
            last = min(row + block, num_rows)
            into[row:last].copy_(stored[first_row + row : first_row + last, columns])

    def tensor(self, name: str) -> Tensor:
        """The whole tensor, as stored; its memory is the mapped file's, which stays mapped with it."""
        file, stored_name = self._stored[name]
        return file.get_tensor(stored_name)

    def _slice(self, name: str) -> Any:
        file, stored_name = self._stored[name]
        return file.get_slice(stored_name)

    def _wrong(self, shapes: Shapes, integers: tuple[str, ...]) -> list[str]:
        wrong: list[str] = []
        for name, shape in shapes.items():
            stored, types = self._slice(name), _INTEGERS if name in integers else _FLOATS
            if tuple(stored.get_shape()) != shape:
                wrong.append(f"{name} is {tuple(stored.get_shape())}, not {shape}")
            elif stored.get_dtype() not in types:
                wrong.append(f"{name} is {stored.get_dtype()}, not one of {', '.join(types)}")
        return _named("wrong", wrong)

    def _report(self, problems: list[str]) -> None:
        if problems:
            raise ModelError(
                f"{self.path}: the weights do not fit config.json: {'; '.join(problems)}; "
                "use the config.json and weights of one release"
            )


def _named(what: str, names: Iterable[str]) -> list[str]:
    """At most one phrase: what is the matter with these, a few of them by name."""
    if not (names := sorted(names)):
        return []
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return [f"{what} {', '.join(names[:_NUM_NAMED])}{more}"]
