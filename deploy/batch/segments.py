"""What a batch has answered, on disk: a folder of segments that a crash at any moment leaves readable.

    manifest.json               which input the folder belongs to
    segments/00000007.jsonl     result lines; complete and on disk before it has this name
    output.jsonl, errors.jsonl  all of it, once every line has a result

A result counts as done when the segment that holds it has its name. One process at a time may write.
"""

import contextlib
import fcntl
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ...cluster.errors import ConfigError

MAX_SEGMENTS = 512  # more are joined into one: a long batch must not fill a folder

Result = dict[str, Any]  # {"id", "custom_id", "response", "error"}


class Done(NamedTuple):
    """A result on disk."""

    custom_id: str
    is_failed: bool
    path: Path  # the segment, and where in it
    offset: int
    line: bytes  # with its newline


class _Head(msgspec.Struct):
    custom_id: str
    error: dict[str, Any] | None = None


_HEAD = msgspec.json.Decoder(_Head)


class Segments:
    """Owns the folder while it is open. Raises ConfigError for the folder of another input, or one in use."""

    def __init__(self, folder: Path, digest: str) -> None:
        self._folder = folder
        self._parts = folder / "segments"
        try:
            self._parts.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be written ({error.strerror}); choose another") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError(f"another batch is writing to {folder}; wait for it or end it") from None
        self._claim(digest)
        for torn in self._parts.glob("*.tmp"):
            torn.unlink()
        self._next = 1 + max((int(path.stem) for path in self._paths()), default=0)

    def close(self) -> None:
        os.close(self._lock)

    def done(self) -> Iterator[Done]:
        """Every result, once."""
        seen: set[str] = set()
        for path in self._paths():
            with path.open("rb") as file:
                offset = 0
                for line in file:
                    head = _HEAD.decode(line)
                    if head.custom_id not in seen:  # twice only if a join was interrupted
                        seen.add(head.custom_id)
                        yield Done(head.custom_id, head.error is not None, path, offset, line)
                    offset += len(line)

    def append(self, results: list[Result]) -> None:
        """Make results durable; they count when this returns."""
        self._write(msgspec.json.encode(result) + b"\n" for result in results)
        if len(paths := self._paths()) > MAX_SEGMENTS:
            self._write(result.line for result in self.done())
            for path in paths:
                path.unlink()

    def finish(self, order: list[str] | None, bad: Iterable[Result]) -> None:
        """Write output.jsonl and errors.jsonl: in the order of these ids, or as the answers came."""
        failed = (result.line for result in self._in_order(order) if result.is_failed)
        refused = (msgspec.json.encode(result) + b"\n" for result in bad)
        write_durably(self._folder / "errors.jsonl", itertools.chain(failed, refused))
        good = (result.line for result in self._in_order(order) if not result.is_failed)
        write_durably(self._folder / "output.jsonl", good)

    def _in_order(self, order: list[str] | None) -> Iterator[Done]:
        if order is None:
            yield from self.done()
            return
        # a batch may be larger than memory: only places are kept
        places = {result.custom_id: result._replace(line=b"") for result in self.done()}
        with contextlib.ExitStack() as stack:
            files = {path: stack.enter_context(path.open("rb")) for path in self._paths()}
            for custom_id in order:
                place = places[custom_id]
                files[place.path].seek(place.offset)
                yield place._replace(line=files[place.path].readline())

    def _write(self, lines: Iterable[bytes]) -> None:
        write_durably(self._parts / f"{self._next:08d}.jsonl", lines)
        self._next += 1

    def _paths(self) -> list[Path]:
        return sorted(self._parts.glob("*.jsonl"))

    def _claim(self, digest: str) -> None:
        manifest = self._folder / "manifest.json"
        if not manifest.exists():
            write_durably(manifest, [msgspec.json.encode({"version": 1, "input_sha256": digest})])
            return
        if msgspec.json.decode(manifest.read_bytes()).get("input_sha256") != digest:
            self.close()
            raise ConfigError(
                f"{self._folder} holds answers to another input; give the input it was begun with, "
                "choose another output, or remove the folder"
            )


def write_durably(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file so that it is either absent, or as it was, or whole."""
    fresh = path.with_name(path.name + ".tmp")
    with fresh.open("wb") as file:
        for line in lines:
            file.write(line)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
