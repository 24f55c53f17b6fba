"""A scheduler actor that writes down what it sends to shards."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline.cluster.address import Address
from paceline.cluster.channel import Hub
from paceline.cluster.messages import Message, ShardPlan
from paceline.scheduler.actor import SchedulerActor

TRACE_FILE = "shard_plans.jsonl"


class Traced(msgspec.Struct):
    """One plan and the shard's life it went to."""

    peer: str
    plan: ShardPlan


class TracingHub:
    """A hub that keeps each ShardPlan in a file, one JSON object per line."""

    def __init__(self, hub: Hub, file: Path) -> None:
        self._hub = hub
        self._file = file.open("ab")

    @property
    def num_ignored(self) -> int:
        return self._hub.num_ignored

    def recv(self, timeout_s: float | None) -> tuple[str, Message] | None:
        return self._hub.recv(timeout_s)

    def send(self, peer: str, message: Message) -> None:
        if isinstance(message, ShardPlan):
            self._file.write(msgspec.json.encode(Traced(peer, message)) + b"\n")
            self._file.flush()
        self._hub.send(peer, message)

    def broadcast(self, peers: Sequence[str], message: Message) -> None:
        self._hub.broadcast(peers, message)

    def close(self) -> None:
        self._file.close()
        self._hub.close()


class TracingScheduler(SchedulerActor):
    """Traces into the directory of the gang's socket, which goes when the gang is closed."""

    def bind(self, epoch: int, directory: Path | None, host: str | None) -> Address:
        address = super().bind(epoch, directory, host)
        assert self._hub is not None
        assert directory is not None, "only a gang on one node is traced"
        self._hub = TracingHub(self._hub, directory / TRACE_FILE)
        return address


def read_trace(directory: Path) -> list[Traced]:
    lines = (directory / TRACE_FILE).read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Traced) for line in lines]
