"""Log lines of the server: for people, or as JSON, one object a line.

Replicas are Ray actors, whose own output ends in files of Ray's. So the `paceline serve` process listens on a
datagram socket and writes what replicas on its machine send there to its stderr; elsewhere, or when it is
gone, a replica's lines go to its own.
"""

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

SOCKET_VARIABLE = "_PACELINE_LOG_SOCKET"  # inherited by replicas; no option of the user's
MAX_LINE_BYTES = 60_000  # of a datagram

LogFormat = Literal["text", "json"]


def configure_logging(level: str, log_format: LogFormat) -> None:
    """Let this process's `paceline` loggers write in this format."""
    logger = logging.getLogger("paceline")
    logger.setLevel(level.upper())
    handler = _LineHandler(os.environ.get(SOCKET_VARIABLE))
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logger.handlers = [handler]
    logger.propagate = False


@contextmanager
def receive_lines(path: Path) -> Iterator[None]:
    """Write to stderr what replicas send to a socket at `path`; children are told of it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(path))
        os.environ[SOCKET_VARIABLE] = str(path)
        thread = threading.Thread(target=_copy, args=(receiver,), name="log lines", daemon=True)
        thread.start()
        try:
            yield
        finally:
            del os.environ[SOCKET_VARIABLE]
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.sendto(b"", str(path))  # an empty line ends the thread, behind all others
            thread.join()


def _copy(receiver: socket.socket) -> None:
    while line := receiver.recv(MAX_LINE_BYTES):
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()


class TextFormatter(logging.Formatter):
    """`12:04:31 INFO request: status=200 duration_ms=12.5`."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = " ".join(f"{name}={_one_word(value)}" for name, value in _fields(record).items())
        line = f"{at} {record.levelname} {record.getMessage()}{': ' if fields else ''}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One object: time (UTC), level, logger, message, and what the caller added."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        told: dict[str, Any] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


class _LineHandler(logging.Handler):
    """Sends lines to a socket, or writes them to stderr."""

    def __init__(self, path: str | None) -> None:
        super().__init__()
        self._path = path
        self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if path else None
        if self._sender is not None:
            self._sender.setblocking(False)  # a step must not wait for a terminal

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record).encode()[: MAX_LINE_BYTES - 1] + b"\n"
        except Exception:
            self.handleError(record)
            return
        try:
            if self._sender is not None and self._path is not None:
                self._sender.sendto(line, self._path)
                return
        except OSError:
            pass  # nobody listens, or not fast enough
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        super().close()


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


def _one_word(value: Any) -> str:
    """A value without spaces or control characters, which could pass for another line."""
    text = str(value)
    return text if text.isprintable() and not any(c in text for c in ' "=') else json.dumps(text)
