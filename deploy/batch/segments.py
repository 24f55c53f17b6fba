"""What a batch has answered, on disk: a folder of segments that a crash at any moment leaves readable.

    manifest.json               which input the folder belongs to
    segments/00000007.jsonl     result lines; complete and on disk before it has this name
    output.jsonl, errors.jsonl  all of it, once every line has a result

A result counts as done when the segment that holds it has its name. One process at a time may write.
"""

import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from ...cluster.errors import ConfigError

MAX_SEGMENTS = 512  # more are joined into one: a long batch must not fill a folder

Result = dict[str, Any]  # {"id", "custom_id", "response", "error"}


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

    def done(self) -> Iterator[Result]:
        """Every result, once."""
        seen: set[str] = set()
        for path in self._paths():
            for line in path.read_bytes().splitlines():
                result = msgspec.json.decode(line)
                if result["custom_id"] not in seen:  # twice only if a join was interrupted
                    seen.add(result["custom_id"])
                    yield result

    def append(self, results: list[Result]) -> None:
        """Make results durable; they count when this returns."""
        write_durably(self._parts / f"{self._next:08d}.jsonl", map(msgspec.json.encode, results))
        self._next += 1
        if len(paths := self._paths()) > MAX_SEGMENTS:
            self.append(list(self.done()))
            for path in paths:
                path.unlink()

    def finish(self, order: list[str] | None, bad: Iterable[Result]) -> None:
        """Write output.jsonl and errors.jsonl: in the order of these ids, or as the answers came."""
        results: Iterable[Result] = self.done()
        if order is not None:
            by_id = {result["custom_id"]: result for result in results}
            results = [by_id[custom_id] for custom_id in order]
        good: list[bytes] = []
        failed = [msgspec.json.encode(result) for result in bad]
        for result in results:
            (good if result["error"] is None else failed).append(msgspec.json.encode(result))
        write_durably(self._folder / "errors.jsonl", failed)
        write_durably(self._folder / "output.jsonl", good)

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
            file.write(line + b"\n")
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
