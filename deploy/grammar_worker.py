"""A process that compiles grammars, to be killed when one takes too much: `python -m ... MODEL VOCAB EOS...`.

It reads grammars from stdin and answers each on stdout, in frames: a length of four bytes, then MessagePack.
The first frame it writes says that it is ready. It ends with its stdin.
"""

import resource
import signal
import struct
import sys
from pathlib import Path
from typing import BinaryIO

import msgspec

from ..cluster.messages import Grammar
from ..kernels.grammar import GRAMMAR_ERRORS, Grammars

COMPILE_CPU_S = 2.0
COMPILE_BYTES = 512 << 20  # of address space, above what the process has once it is ready
_LENGTH = struct.Struct("<I")


class Compiled(msgspec.Struct, frozen=True):
    """What became of a grammar: what it takes, or why it was not compiled."""

    num_bytes: int = 0
    worst_mask_s: float = 0.0
    problem: str | None = None


def write_frame(stream: BinaryIO, message: msgspec.Struct) -> None:
    payload = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(payload)) + payload)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next payload; None at the stream's end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    payload = stream.read(_LENGTH.unpack(head)[0])
    return payload if len(payload) == _LENGTH.unpack(head)[0] else None


def main() -> None:
    model_path, vocab_size, *eos_token_ids = sys.argv[1:]
    grammars = Grammars(Path(model_path), int(vocab_size), tuple(map(int, eos_token_ids)))
    grammars.load()
    # A first one, so that nothing is loaded under the limit.
    grammars.try_out(Grammar("json_schema", "{}"))
    limit = _address_space_bytes() + COMPILE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    replies = sys.stdout.buffer
    write_frame(replies, Compiled())
    while (payload := read_frame(sys.stdin.buffer)) is not None:
        grammar = msgspec.msgpack.decode(payload, type=Grammar)
        signal.setitimer(signal.ITIMER_PROF, COMPILE_CPU_S)  # nobody handles SIGPROF: it kills
        try:
            trial = grammars.try_out(grammar)
            reply = Compiled(num_bytes=trial.num_bytes, worst_mask_s=trial.worst_mask_s)
        except (*GRAMMAR_ERRORS, MemoryError) as error:
            reply = Compiled(problem=str(error) or type(error).__name__)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(replies, reply)


def _address_space_bytes() -> int:
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    return num_pages * resource.getpagesize()


if __name__ == "__main__":
    main()
