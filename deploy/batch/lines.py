"""The lines of a batch in OpenAI's format: which can be asked, and what is wrong with the others.

{"custom_id": "a-1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ...cluster.errors import ConfigError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
SEEDED_URLS = ("/v1/chat/completions", "/v1/completions")
MAX_LINE_BYTES = 16 << 20
MAX_ID_LEN = 512  # characters


@dataclass(frozen=True, slots=True)
class Place:
    """Where a line that can be asked stands in the file, and the only thing that must be remembered of it."""

    custom_id: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that no server is asked about."""

    number: int  # of the file, from 1
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Batch:
    """A file, read once."""

    path: Path
    digest: str  # sha256 of the file, in hexadecimal
    places: list[Place]
    bad_lines: list[BadLine]


class _Refused(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def read_batch(path: Path) -> Batch:
    """Look at every line. Raises ConfigError when the file cannot be read or holds no line at all."""
    digest = hashlib.sha256()
    places: list[Place] = []
    bad_lines: list[BadLine] = []
    seen: dict[str, int] = {}
    try:
        with path.open("rb") as file:
            for number, offset, line in _lines(file, digest):
                try:
                    custom_id = _checked(line)["custom_id"]
                    if custom_id in seen:
                        problem = f"custom_id {custom_id!r} is that of line {seen[custom_id]}"
                        raise _Refused("duplicate_custom_id", problem)
                except _Refused as refusal:
                    bad_lines.append(BadLine(number, refusal.code, str(refusal)))
                else:
                    seen[custom_id] = number
                    places.append(Place(custom_id, offset, len(line)))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); check the input file") from None
    if not places and not bad_lines:
        raise ConfigError(f"{path} has no lines; write one request per line")
    return Batch(path, digest.hexdigest(), places, bad_lines)


def read_lines(batch: Batch, places: list[Place]) -> Iterator[dict[str, Any]]:
    """The lines at `places`, as they are to be asked."""
    with batch.path.open("rb") as file:
        for place in places:
            file.seek(place.offset)
            line = _checked(file.read(place.num_bytes))
            if line["url"] in SEEDED_URLS:
                # so that a batch that was interrupted answers as one that was not
                line["body"].setdefault("seed", _seed(place.custom_id))
            yield line


def _lines(file: BinaryIO, digest: Any) -> Iterator[tuple[int, int, bytes]]:
    """(number, offset, line) of each line that is not empty, without its ending or a byte order mark."""
    offset = 0
    for number, raw in enumerate(file, 1):
        digest.update(raw)
        start = 3 if number == 1 and raw.startswith(b"\xef\xbb\xbf") else 0
        line = raw[start:].rstrip(b"\r\n")
        if line.strip():
            yield number, offset + start, line
        offset += len(raw)


def _checked(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise _Refused("line_too_long", f"the line is longer than {MAX_LINE_BYTES} bytes")
    try:
        parsed = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _Refused("invalid_json", f"the line is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise _Refused("invalid_json", "the line is not a JSON object")
    custom_id = parsed.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_LEN:
        raise _Refused("invalid_custom_id", f"custom_id must be a string of 1 to {MAX_ID_LEN} characters")
    if parsed.get("method") != "POST":
        raise _Refused("invalid_method", "method must be POST")
    if parsed.get("url") not in URLS:
        raise _Refused("invalid_url", f"url must be one of {', '.join(URLS)}")
    body = parsed.get("body")
    if not isinstance(body, dict):
        raise _Refused("invalid_body", "body must be a JSON object")
    if body.get("stream"):
        raise _Refused("stream_not_supported", "a batch has no streams; leave out 'stream'")
    return {"custom_id": custom_id, "method": "POST", "url": parsed["url"], "body": body}


def _seed(custom_id: str) -> int:
    return int.from_bytes(hashlib.sha256(custom_id.encode()).digest()[:4], "big")
