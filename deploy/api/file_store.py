"""Files of clients, in a folder of the server: what batches read and write.

    files/file-<32 hex digits>/meta.json   who owns it, its name, its size, when it expires
    files/file-<32 hex digits>/content

A file is there once it has its name; one that was being written when the server died is removed later. Names
of clients are text and never part of a path. Several replicas may share the folder.
"""

import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ...cluster.errors import ConfigError, RequestError

PURPOSES = ("batch", "user_data")
COPY_BYTES = 1 << 20
TORN_S = 3600.0  # a file that is still being written after so long was given up

_FILE_ID = re.compile(r"file-[0-9a-f]{32}")


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a file beside its content."""

    id: str
    owner: str  # the name of a key; empty where there are none
    filename: str
    purpose: str
    num_bytes: int
    created_at: int  # Unix time, as all here
    expires_at: int | None = None

    def object(self) -> dict[str, Any]:
        """OpenAI's file object."""
        shown: dict[str, Any] = {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }
        return shown if self.expires_at is None else {**shown, "expires_at": self.expires_at}


_record = msgspec.json.Decoder(FileRecord)


class FileStore:
    """Owns the folder. Its methods block; what they refuse is a RequestError."""

    def __init__(self, folder: Path, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self.max_bytes = max_bytes
        self.folder = folder
        self._files = folder / "files"
        self._clock = clock
        try:
            self._files.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"batch_dir {folder} cannot be used: {error.strerror}") from None

    def add(
        self, source: BinaryIO, *, owner: str, filename: str, purpose: str, expires_after_s: int | None = None
    ) -> FileRecord:
        """Keep a copy of `source`."""
        now = int(self._clock())
        file_id = f"file-{secrets.token_hex(16)}"
        fresh = self._files / f"{file_id}.tmp"
        fresh.mkdir(mode=0o700)
        with (fresh / "content").open("xb") as content:
            shutil.copyfileobj(source, content, COPY_BYTES)
            num_bytes = content.tell()
            content.flush()
            os.fsync(content.fileno())
        record = FileRecord(
            id=file_id,
            owner=owner,
            filename=filename,
            purpose=purpose,
            num_bytes=num_bytes,
            created_at=now,
            expires_at=None if expires_after_s is None else now + expires_after_s,
        )
        (fresh / "meta.json").write_bytes(msgspec.json.encode(record))
        fresh.rename(self._files / file_id)
        return record

    def get(self, file_id: str, owner: str) -> FileRecord:
        """RequestError 404 for a file that is not there, has expired, or is someone else's."""
        record = self._read(file_id) if _FILE_ID.fullmatch(file_id) else None
        if record is None or record.owner != owner:
            raise RequestError(
                f"there is no file {file_id[:64]!r}", status=404, code="file_not_found", param="file_id"
            )
        return record

    def content(self, record: FileRecord) -> Path:
        return self._files / record.id / "content"

    def of_owner(self, owner: str) -> list[FileRecord]:
        """The files of an owner, newest first."""
        own = [record for record in self._all() if record.owner == owner]
        return sorted(own, key=lambda record: (record.created_at, record.id), reverse=True)

    def delete(self, record: FileRecord) -> None:
        """Gone in one step, and then its bytes; deleting twice is no mistake."""
        gone = self._files / f"{record.id}.{secrets.token_hex(4)}.tmp"
        try:
            (self._files / record.id).rename(gone)
        except FileNotFoundError:
            return
        shutil.rmtree(gone, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what has expired or was never finished."""
        now = self._clock()
        for path in self._files.iterdir():
            if path.name.endswith(".tmp"):
                if now - path.stat().st_mtime > TORN_S:
                    shutil.rmtree(path, ignore_errors=True)
            elif (record := self._load(path)) is not None and _has_expired(record, now):
                self.delete(record)

    def _all(self) -> Iterator[FileRecord]:
        for path in self._files.iterdir():
            if _FILE_ID.fullmatch(path.name) and (record := self._read(path.name)) is not None:
                yield record

    def _read(self, file_id: str) -> FileRecord | None:
        record = self._load(self._files / file_id)
        return None if record is None or _has_expired(record, self._clock()) else record

    def _load(self, path: Path) -> FileRecord | None:
        try:
            return _record.decode((path / "meta.json").read_bytes())
        except FileNotFoundError:  # it was deleted meanwhile
            return None


def _has_expired(record: FileRecord, now: float) -> bool:
    return record.expires_at is not None and record.expires_at <= now
