"""The channel delivers every message once and in order, and believes nobody who cannot prove himself."""

import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.address import Address
from paceline.cluster.channel import Hub, Link, LocalHub, connect
from paceline.cluster.errors import EngineError, EngineStopped, ProtocolError
from paceline.cluster.frames import TO_HUB, TO_PEER, Inbox, Outbox
from paceline.cluster.messages import Cancel, Message, SamplingParams, StepPlan, StepResult, Submit
from paceline.cluster.unix_channel import UnixHub
from paceline.cluster.zmq_channel import ZmqHub

KEY = b"k" * 32


@dataclass
class Star:
    """A hub and the way to open links to it; closes what it opened."""

    hub: Hub
    open_link: Callable[[str], Link]
    links: list[Link]

    def link(self, peer: str) -> Link:
        self.links.append(self.open_link(peer))
        return self.links[-1]


@pytest.fixture(params=["local", "unix", "tcp"])
def star(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Star]:
    yield from star_over(request.param, tmp_path)


@pytest.fixture(params=["unix", "tcp"])
def between(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Star]:
    """A star between processes."""
    yield from star_over(request.param, tmp_path)


def star_over(transport: str, tmp_path: Path) -> Iterator[Star]:
    if transport == "local":
        local = LocalHub(epoch=3)
        star = Star(local, local.link, [])
    else:
        hub = unix_hub(tmp_path) if transport == "unix" else ZmqHub(3, "127.0.0.1")
        star = Star(hub, lambda peer: connect(hub.address, peer), [])
    yield star
    for link in star.links:
        link.close()
    star.hub.close()


def unix_hub(tmp_path: Path) -> UnixHub:
    tmp_path.chmod(0o700)
    return UnixHub(3, tmp_path)


def numbered(message: Message | None) -> int:
    assert isinstance(message, StepResult)
    return message.step


def receive(hub: Hub) -> tuple[str, Message]:
    received = hub.recv(5.0)
    assert received is not None
    return received


def test_messages_arrive_in_order_from_every_peer_and_to_every_peer(star: Star) -> None:
    links = {peer: star.link(peer) for peer in ("rank0", "rank1", "server")}
    for step in range(200):
        for link in links.values():
            link.send(StepResult(step=step))
    seen: dict[str, list[int]] = {peer: [] for peer in links}
    for _ in range(600):
        peer, message = receive(star.hub)
        seen[peer].append(numbered(message))
    assert all(steps == list(range(200)) for steps in seen.values())

    for step in range(200):
        star.hub.broadcast(["rank0", "rank1"], StepResult(step=step))
    for peer in ("rank0", "rank1"):
        assert [numbered(links[peer].recv(5.0)) for _ in range(200)] == list(range(200))
    assert links["server"].recv(0.01) is None
    assert star.hub.num_ignored == 0


def test_what_is_sent_before_the_peer_connects_waits_for_it(star: Star) -> None:
    for step in range(3):
        star.hub.send("rank0", StepResult(step=step))
    link = star.link("rank0")
    link.send(Cancel(request_id="x"))
    receive(star.hub)  # the hub learns of the peer while it receives
    star.hub.recv(0.05)
    star.hub.send("rank0", StepResult(step=3))
    assert [numbered(link.recv(5.0)) for _ in range(4)] == [0, 1, 2, 3]


def test_recv_returns_none_after_the_timeout(star: Star) -> None:
    link = star.link("server")
    started = time.monotonic()
    assert star.hub.recv(0.05) is None
    assert link.recv(0.05) is None
    assert 0.1 <= time.monotonic() - started < 2.0
    assert star.hub.recv(0.0) is None


def test_messages_keep_their_values_and_the_ends_share_nothing(star: Star) -> None:
    prompt = [1, 2, 3]
    params = SamplingParams(max_tokens=4, seed=2**64 - 1, logit_bias={7: -1.5}, temperature=0.0)
    submit = Submit(request_id="r", prompt_ids=prompt, params=params)
    link = star.link("server")
    link.send(submit)
    prompt.append(4)
    _, message = receive(star.hub)
    assert message == msgspec.structs.replace(submit, prompt_ids=[1, 2, 3])


def test_one_thread_sends_while_another_receives(star: Star) -> None:
    link = star.link("server")
    received: list[int] = []

    def read() -> None:
        received.extend(numbered(link.recv(5.0)) for _ in range(300))

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(300):
        link.send(StepResult(step=step))
    for _ in range(300):
        peer, message = receive(star.hub)
        star.hub.send(peer, message)
    reader.join(10.0)
    assert received == list(range(300))


def test_frames_repeated_or_of_another_epoch_are_counted_and_dropped() -> None:
    outbox, inbox = Outbox(KEY, TO_HUB, 5, "rank0"), Inbox(KEY, TO_HUB, 5)
    body = msgspec.msgpack.encode(Cancel(request_id="a"))
    first, second = outbox.seal(body), outbox.seal(body)
    assert inbox.open(first) == ("rank0", Cancel(request_id="a"))
    assert inbox.open(first) is None
    assert inbox.open(second) is not None
    assert inbox.open(first) is None
    assert inbox.open(Outbox(KEY, TO_HUB, 4, "rank0").seal(body)) is None
    assert inbox.open(Outbox(KEY, TO_HUB, 6, "rank0").seal(body)) is None
    assert inbox.open(Outbox(KEY, TO_PEER, 5, "rank0").seal(body)) is None, "a reflected frame"
    assert inbox.num_ignored == 5


def test_a_gap_is_an_error_that_names_peer_and_number() -> None:
    outbox, inbox = Outbox(KEY, TO_HUB, 0, "rank1"), Inbox(KEY, TO_HUB, 0)
    body = msgspec.msgpack.encode(Cancel(request_id="a"))
    inbox.open(outbox.seal(body))
    outbox.seal(body)
    with pytest.raises(ProtocolError, match="rank1: message 2 is missing, 3 came"):
        inbox.open(outbox.seal(body))


def test_a_body_that_is_no_message_is_an_error_of_its_authentic_sender() -> None:
    with pytest.raises(ProtocolError, match="rank0"):
        Inbox(KEY, TO_HUB, 0).open(Outbox(KEY, TO_HUB, 0, "rank0").seal(b"\xc1garbage"))


def test_a_second_hello_cannot_steal_a_peer() -> None:
    outbox, inbox = Outbox(KEY, TO_HUB, 0, "server"), Inbox(KEY, TO_HUB, 0)
    hello = outbox.hello()
    body = msgspec.msgpack.encode(Cancel(request_id="a"))
    assert inbox.open(outbox.seal(body)) is not None, "data may overtake the hello: another connection"
    assert inbox.open(hello) == ("server", None)
    assert inbox.open(hello) is None
    assert inbox.num_ignored == 1


@given(st.binary(max_size=200), st.integers(0, 300))
def test_garbage_never_raises(noise: bytes, at: int) -> None:
    inbox = Inbox(KEY, TO_HUB, 0)
    assert inbox.open(noise) is None
    frame = bytearray(Outbox(KEY, TO_HUB, 0, "rank0").seal(msgspec.msgpack.encode(Cancel(request_id="abc"))))
    frame[at % len(frame)] ^= 1 + at % 255
    assert inbox.open(bytes(frame)) is None
    assert inbox.open(bytes(frame[: at % len(frame)])) is None
    assert inbox.num_ignored == 3


def noise_over_zmq(address: Address) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.connect(address.endpoint)
        for parts in ([b""], [b"x" * 5000], [b"a", b"b", b"c"], [b"", b""]):
            raw.send_multipart(parts)


def noise_over_unix(address: Address) -> None:
    for piece in (b"", b"x" * 5000, b"abc", b"\0" * 50):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(address.endpoint.removeprefix("unix://"))
            raw.sendall(len(piece).to_bytes(4, "little") + piece)
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(address.endpoint.removeprefix("unix://"))
        raw.settimeout(5.0)
        raw.sendall(b"\xff" * 5)  # four gigabytes are announced: it is hung up on
        assert raw.recv(1) == b""


def test_a_stranger_at_the_socket_is_counted_and_harms_nobody(between: Star) -> None:
    hub = between.hub
    assert isinstance(hub, UnixHub | ZmqHub)
    honest = between.link("rank0")
    stranger = connect(Address(hub.address.endpoint, "0" * 64, hub.address.epoch), "rank0")
    between.links.append(stranger)
    stranger.send(StepResult(step=666))
    noise = noise_over_unix if isinstance(hub, UnixHub) else noise_over_zmq
    with ThreadPoolExecutor() as pool:
        done = pool.submit(noise, hub.address)
        while not done.done():
            assert hub.recv(0.05) is None
        done.result()
    honest.send(StepResult(step=1))
    assert receive(hub) == ("rank0", StepResult(step=1))
    assert hub.recv(0.05) is None
    hub.send("rank0", StepPlan(step=7))
    assert honest.recv(5.0) == StepPlan(step=7)
    assert stranger.recv(0.05) is None
    assert hub.num_ignored == 6  # the forged hello and message, and four pieces of noise


def test_sending_to_a_dead_peer_does_not_block_or_raise(between: Star) -> None:
    hub, link = between.hub, between.link("rank0")
    link.send(StepResult(step=1))
    link.send(StepResult(step=2))
    link.close()
    assert [numbered(receive(hub)[1]) for _ in range(2)] == [1, 2], "its last words are heard"
    hub.recv(0.05)
    for step in range(1000):
        hub.send("rank0", StepPlan(step=step))
    between.links.clear()


def test_a_link_whose_hub_is_gone_is_silent(between: Star) -> None:
    """Its process lives on until the gang ends it: a lost scheduler is not a rank's failure."""
    link = between.link("rank0")
    link.send(StepResult(step=1))
    receive(between.hub)
    between.hub.recv(0.05)
    between.hub.send("rank0", StepPlan(step=1))
    between.hub.close()
    assert link.recv(5.0) == StepPlan(step=1), "what was sent before the end arrives"
    started = time.monotonic()
    assert link.recv(0.1) is None
    assert time.monotonic() - started >= 0.1
    for step in range(100):
        link.send(StepResult(step=step))


def test_whoever_sends_never_waits_for_a_reader(star: Star) -> None:
    """Much more than a socket holds, both ways, while nobody reads, then more while it is read: in order."""
    link = star.link("server")
    link.send(StepResult(step=-1))
    receive(star.hub)
    star.hub.recv(0.05)
    prompt = list(range(1000, 21000))
    submits = [
        Submit(request_id=str(number), prompt_ids=prompt, params=SamplingParams(max_tokens=1))
        for number in range(100)
    ]
    started = time.monotonic()
    for submit in submits:
        link.send(submit)
        star.hub.send("server", submit)
    assert time.monotonic() - started < 5.0
    with ThreadPoolExecutor() as pool:
        more = pool.submit(lambda: [link.send(submit) for submit in submits])
        assert [receive(star.hub)[1] for _ in range(200)] == [*submits, *submits]
        more.result()
    assert [link.recv(5.0) for _ in submits] == submits


def send_often(send: Callable[[], None]) -> None:
    for _ in range(30):
        send()


def test_a_reader_far_behind_is_an_error_and_not_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.cluster.unix_channel.MAX_QUEUED_MESSAGES", 10)
    hub = unix_hub(tmp_path)
    link = connect(hub.address, "rank0")
    big = Submit(request_id="r", prompt_ids=[70000] * 50000, params=SamplingParams(max_tokens=1))
    try:
        with pytest.raises(EngineError, match="the hub has left 10 messages unread"):
            send_often(lambda: link.send(big))
        with pytest.raises(EngineError, match="rank1 has left 10 messages unread"):
            send_often(lambda: hub.send("rank1", big))
    finally:
        hub.close()
        link.close()


def test_a_peer_that_never_reads_is_an_error_and_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cluster.channel.MAX_QUEUED_MESSAGES", 10)
    hub = LocalHub()
    for step in range(10):
        hub.send("rank0", StepPlan(step=step))
    with pytest.raises(EngineError, match="rank0 has left 10 messages unread"):
        hub.send("rank0", StepPlan(step=11))


def test_closing_a_local_hub_ends_its_links_after_the_last_message() -> None:
    hub = LocalHub()
    early = hub.link("rank0")
    hub.send("rank0", StepPlan(step=1))
    hub.close()
    assert early.recv(1.0) == StepPlan(step=1)
    for link in (early, early, hub.link("rank1")):
        with pytest.raises(EngineStopped):
            link.recv(1.0)


def test_an_address_does_not_print_its_token() -> None:
    assert "secret" not in repr(Address("tcp://x", "secret", 1)) + str(Address("tcp://x", "secret", 1))


@pytest.mark.parametrize("num_peers", [1, 2])
def test_a_round_trip_is_fast(star: Star, num_peers: int) -> None:
    """Plan out, results in; prints the median. The bound only catches a transport that blocks or polls."""
    peers = [f"rank{i}" for i in range(num_peers)]
    links = [star.link(peer) for peer in peers]

    def echo(link: Link) -> None:
        for _ in range(400):
            link.send(StepResult(step=numbered(link.recv(10.0))))

    threads = [threading.Thread(target=echo, args=[link]) for link in links]
    for thread in threads:
        thread.start()
    times = []
    for step in range(400):
        started = time.perf_counter()
        star.hub.broadcast(peers, StepResult(step=step))
        for _ in peers:
            receive(star.hub)
        times.append(time.perf_counter() - started)
    for thread in threads:
        thread.join(10.0)
    median_us = statistics.median(times[50:]) * 1e6
    print(f"{type(star.hub).__name__} {num_peers} peers: {median_us:.0f} us")
    assert median_us < 10_000
