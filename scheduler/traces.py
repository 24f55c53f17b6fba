"""Traces: who asks for what and when, written down or drawn from a seed; the simulator replays them.

A trace file is JSON lines, each an Arrival. Arrivals of one `session` are its turns, in their order: a turn's
prompt is all of the turns before it, answers included, and `prompt_len` new tokens; it comes `at_s` after the
answer before it has ended.
"""

import random
from collections.abc import Iterable

import msgspec

from ..cluster.errors import UserError


class Arrival(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request. Lengths count tokens."""

    at_s: float  # since the trace began; of a later turn: since the end of the one before
    prompt_len: int
    output_len: int
    session: str = ""
    shared_len: int = 0  # of the prompt's first tokens, those that all of its `family` begin with
    family: int = 0
    priority: int = 0

    def __post_init__(self) -> None:
        if self.at_s < 0 or self.prompt_len < 1 or self.output_len < 1:
            raise ValueError("at_s is at least 0, prompt_len and output_len at least 1")
        if not 0 <= self.shared_len <= self.prompt_len:
            raise ValueError("shared_len is between 0 and prompt_len")


def parse_trace(lines: Iterable[bytes]) -> list[Arrival]:
    """Raises UserError that names the line which is no Arrival."""
    trace: list[Arrival] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                trace.append(msgspec.json.decode(line, type=Arrival))
            except msgspec.DecodeError as error:
                raise UserError(
                    f'trace, line {number}: {error}; write {{"at_s", "prompt_len", "output_len"}}'
                ) from None
    if not trace:
        raise UserError("the trace is empty; give one arrival a line")
    return trace


def poisson(
    rate: float, num_requests: int, *, prompt_len: int = 256, output_len: int = 128, seed: int = 0
) -> list[Arrival]:
    """`rate` requests per second, independent of one another; lengths vary by half around their means."""
    return bursty(rate, num_requests, burst=1, prompt_len=prompt_len, output_len=output_len, seed=seed)


def bursty(
    rate: float,
    num_requests: int,
    *,
    burst: int = 16,
    prompt_len: int = 256,
    output_len: int = 128,
    seed: int = 0,
) -> list[Arrival]:
    """The same mean rate, but `burst` requests come at once."""
    chooser = random.Random(seed)
    trace: list[Arrival] = []
    at_s = 0.0
    while len(trace) < num_requests:
        at_s += chooser.expovariate(rate / burst)
        trace += [
            Arrival(at_s=at_s, prompt_len=_vary(chooser, prompt_len), output_len=_vary(chooser, output_len))
            for _ in range(min(burst, num_requests - len(trace)))
        ]
    return trace


def conversations(
    num_sessions: int,
    num_turns: int,
    *,
    prompt_len: int = 64,
    output_len: int = 64,
    think_s: float = 5.0,
    seed: int = 0,
) -> list[Arrival]:
    """Sessions that begin within one think time and pause for about `think_s` before each further turn."""
    chooser = random.Random(seed)
    return [
        Arrival(
            at_s=chooser.uniform(0, think_s) if turn == 0 else chooser.expovariate(1 / think_s),
            prompt_len=prompt_len,
            output_len=output_len,
            session=f"session-{session}",
        )
        for session in range(num_sessions)
        for turn in range(num_turns)
    ]


def _vary(chooser: random.Random, mean: int) -> int:
    return max(1, round(mean * chooser.uniform(0.5, 1.5)))
