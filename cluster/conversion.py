"""Directories that are made once, whatever dies in between: here those of converted GGUF files.

Order of events: take the lock, look again, fill a directory whose name ends in `.partial`, rename it. What
dies leaves a `.partial` directory, which the next holder of the lock removes; a finished directory is never
written to.
"""

import fcntl
import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .choices import cache_dir
from .model_directory import check_directory

Progress = Callable[[str, float | None], None]
"""Told what is going on, and the share done (0..1) where it is known."""

FORMAT = 1  # of converted directories; raised when convert_gguf() writes something else than before


def resolve_gguf(path: Path, report: Progress) -> Path:
    """The directory that a GGUF file was converted to, now or earlier."""
    target = converted_target(path)
    with creating(target) as partial:
        if partial is not None:
            convert(path, partial, report)
    return target


def converted_target(path: Path) -> Path:
    """Where the conversion of a GGUF file is kept."""
    path = path.resolve()
    stat = path.stat()
    identity = f"{path} {stat.st_size} {stat.st_mtime_ns}"  # reading gigabytes at each start would be slow
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return cache_dir() / "models" / f"{path.stem}-{key}-{FORMAT}"


@contextmanager
def creating(target: Path) -> Iterator[Path | None]:
    """Yield a directory that becomes `target` when the block ends well, or None when `target` exists.

    Of several processes one creates and the others wait for it.
    """
    if target.is_dir():
        yield None
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_name(f"{target.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            yield None
            return
        partial = emptied(target.with_name(f"{target.name}.partial"))
        try:
            yield partial
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def emptied(directory: Path) -> Path:
    """The directory, made anew."""
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    return directory


def convert(source: Path, target: Path, report: Progress) -> None:
    """Write the model of a GGUF file into the directory `target`."""
    from .gguf import convert_gguf  # brings torch, which a converted model does not need

    report("converting to bfloat16", 0.0)
    convert_gguf(source, target, lambda share: report("converting to bfloat16", share))
    check_directory(target)
