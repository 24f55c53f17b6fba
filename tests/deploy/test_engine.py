"""The engine's promises to a stream, against a scheduler that the test plays itself."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine

import pytest

from paceline.cluster.channel import Link, LocalHub
from paceline.cluster.config import Config, EngineConfig, ServerConfig
from paceline.cluster.drafter_choice import DrafterChoice
from paceline.cluster.errors import (
    ConfigError,
    EngineError,
    EngineStopped,
    ModelError,
    RankLost,
    RequestError,
)
from paceline.cluster.messages import (
    Cancel,
    Failed,
    Message,
    Output,
    Outputs,
    Refused,
    SamplingParams,
    ShardSilent,
    Stats,
    StepPlan,
    Submit,
)
from paceline.deploy import engine as engine_module
from paceline.deploy.engine import Engine

PARAMS = SamplingParams(max_tokens=100)


class PlayedLife:
    """One epoch; the test is its scheduler."""

    def __init__(self, epoch: int) -> None:
        self.hub = LocalHub(epoch)
        self.link: Link = self.hub.link("server")
        self.on_loss: Callable[[EngineError], None] | None = None
        self.num_closes = 0
        self.replaced: list[str] = []

    def watch(self, on_loss: Callable[[EngineError], None]) -> None:
        self.on_loss = on_loss

    def replace_shard(self, peer: str) -> None:
        self.replaced.append(peer)

    def close(self) -> None:
        self.num_closes += 1
        self.hub.close()

    def say(self, *outputs: Output) -> None:
        self.hub.send("server", Outputs(list(outputs)))

    async def hear(self) -> Message:
        received = await asyncio.to_thread(self.hub.recv, 5.0)
        assert received is not None, "the engine said nothing"
        return received[1]

    async def hear_submit(self) -> Submit:
        message = await self.hear()
        assert isinstance(message, Submit)
        return message


class PlayedLauncher:
    """Starts lives at once, or fails as told."""

    def __init__(self) -> None:
        self.lives: list[PlayedLife] = []
        self.failures: list[Exception] = []
        self.is_closed = False

    def launch(self, epoch: int) -> PlayedLife:
        if self.failures:
            raise self.failures.pop()
        self.lives.append(PlayedLife(epoch))
        return self.lives[-1]

    def swap_drafter(self, choice: DrafterChoice | None) -> set[str]:
        raise ConfigError(f"no drafter fits here, {choice} least of all")

    def abort(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


class Stage:
    """An engine and the launcher behind it."""

    def __init__(self, max_stream_backlog: int = 50) -> None:
        self.launcher = PlayedLauncher()
        server = ServerConfig(max_stream_backlog=max_stream_backlog)
        self.engine = Engine(self.launcher, Config(engine=EngineConfig(step_deadline_s=1.0), server=server))

    @property
    def life(self) -> PlayedLife:
        return self.launcher.lives[-1]

    async def next_life(self) -> PlayedLife:
        """The epoch after the present one, once it listens."""
        number = len(self.launcher.lives)
        await until(lambda: len(self.launcher.lives) > number and self.life.on_loss is not None)
        return self.life


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage()
    await stage.engine.start()
    yield stage
    await stage.engine.close()
    assert stage.launcher.is_closed
    assert all(life.num_closes == 1 for life in stage.launcher.lives)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not condition():
            await asyncio.sleep(0.005)


def tokens(request_id: str, first_index: int, *token_ids: int, last: bool = False) -> Output:
    return Output(
        request_id=request_id,
        first_index=first_index,
        token_ids=list(token_ids),
        finish_reason="length" if last else None,
    )


async def collect(stream: AsyncIterator[Output]) -> list[int]:
    return [token_id async for output in stream for token_id in output.token_ids]


def start(stage: Stage, request_id: str = "a") -> "asyncio.Task[list[int]]":
    return asyncio.create_task(collect(stage.engine.stream(request_id, [1, 2], PARAMS)))


async def test_a_stream_yields_its_own_outputs_until_the_last(stage: Stage) -> None:
    first, second = start(stage, "a"), start(stage, "b")
    submits = [await stage.life.hear_submit(), await stage.life.hear_submit()]
    assert submits == [Submit(request_id=name, prompt_ids=[1, 2], params=PARAMS) for name in ("a", "b")]
    stage.life.say(tokens("a", 0, 5), tokens("b", 0, 6))
    stage.life.say(tokens("b", 1, 7, 8, last=True), tokens("unknown", 0, 9))
    stage.life.say(tokens("a", 1, 10, last=True))
    assert await first == [5, 10]
    assert await second == [6, 7, 8]
    assert stage.engine.num_streams == 0
    assert stage.life.hub.recv(0.05) is None, "a finished stream cancels nothing"


async def leave_by_closing(engine: Engine) -> None:
    stream = engine.stream("a", [1, 2], PARAMS)
    await anext(stream)
    await stream.aclose()


async def leave_by_break(engine: Engine) -> None:
    async for _ in engine.stream("a", [1, 2], PARAMS):
        break


async def leave_by_cancellation(engine: Engine) -> None:
    async def read() -> None:
        async for _ in engine.stream("a", [1, 2], PARAMS):
            has_read.set()

    has_read = asyncio.Event()
    task = asyncio.create_task(read())
    await has_read.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("leave", [leave_by_closing, leave_by_break, leave_by_cancellation])
async def test_leaving_a_stream_cancels_the_request(
    stage: Stage, leave: Callable[[Engine], Coroutine[None, None, None]]
) -> None:
    leaving = asyncio.create_task(leave(stage.engine))
    await stage.life.hear_submit()
    stage.life.say(tokens("a", 0, 5))
    await leaving
    assert await stage.life.hear() == Cancel(request_id="a")
    assert stage.engine.num_streams == 0
    stage.life.say(tokens("a", 1, 6))  # it was on its way when the cancel came
    task = start(stage, "b")
    await stage.life.hear_submit()
    stage.life.say(tokens("b", 0, 7, last=True))
    assert await task == [7]


async def test_a_refusal_is_a_request_error_with_its_fields(stage: Stage) -> None:
    task = start(stage)
    await stage.life.hear_submit()
    stage.life.hub.send(
        "server",
        Refused(request_id="a", status=429, code="rate_limit_exceeded", message="full", retry_after_s=3),
    )
    with pytest.raises(RequestError, match="full") as caught:
        await task
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (
        429,
        "rate_limit_exceeded",
        3,
    )
    assert caught.value.error_type == "rate_limit_error"


async def test_a_slow_reader_loses_its_request_and_nobody_elses() -> None:
    stage = Stage(max_stream_backlog=10)
    await stage.engine.start()
    stream = stage.engine.stream("slow", [1], PARAMS)
    pending = asyncio.ensure_future(anext(stream))
    await stage.life.hear_submit()
    fast = start(stage, "fast")
    await stage.life.hear_submit()
    for index in range(12):
        stage.life.say(tokens("slow", index, index), tokens("fast", index, index, last=index == 11))
        await asyncio.sleep(0)
    assert await stage.life.hear() == Cancel(request_id="slow")
    assert await fast == list(range(12))
    read = [(await pending).token_ids]
    with pytest.raises(RequestError, match="tokens behind") as caught:
        read.extend([output.token_ids async for output in stream])
    assert caught.value.code == "slow_reader"
    await stage.engine.close()


@pytest.mark.parametrize("loss", ["sentinel", "failed", "hub closed", "gap"])
async def test_streams_continue_over_a_lost_epoch(stage: Stage, loss: str) -> None:
    first, life = start(stage, "a"), stage.life
    await life.hear_submit()
    second = start(stage, "b")
    await life.hear_submit()
    life.say(tokens("a", 0, 5, 6))
    await asyncio.sleep(0.02)
    if loss == "sentinel":
        assert life.on_loss is not None
        life.on_loss(RankLost("rank1 died"))
    elif loss == "failed":
        life.hub.send("server", Failed(source="scheduler", reason="a step overran"))
    elif loss == "gap":
        life.say(tokens("a", 3, 9))
    else:
        life.hub.close()
        life.num_closes -= 1
        life.close()
    heir = await stage.next_life()
    life.num_closes = 1
    resumed = [await heir.hear_submit(), await heir.hear_submit()]
    assert [(s.request_id, s.prompt_ids, s.emitted_ids) for s in resumed] == [
        ("a", [1, 2], [5, 6]),
        ("b", [1, 2], []),
    ]
    heir.say(tokens("a", 2, 7, last=True), tokens("b", 0, 8, last=True))
    assert await first == [5, 6, 7]
    assert await second == [8]
    assert (stage.engine.epoch, stage.engine.num_rebuilds) == (1, 1)
    stage.engine.check_health()


async def test_requests_made_and_left_while_the_engine_is_rebuilt(stage: Stage) -> None:
    stays, leaves, life = start(stage, "stays"), start(stage, "leaves"), stage.life
    await life.hear_submit()
    await life.hear_submit()
    assert life.on_loss is not None
    life.on_loss(RankLost("gone"))
    await asyncio.sleep(0)
    late = start(stage, "late")
    leaves.cancel()
    heir = await stage.next_life()
    assert {(await heir.hear_submit()).request_id for _ in range(2)} == {"stays", "late"}
    heir.say(tokens("stays", 0, 1, last=True), tokens("late", 0, 2, last=True))
    assert (await stays, await late) == ([1], [2])


async def test_a_resumed_stream_waits_for_a_full_queue(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "RETRY_S", 0.01)
    task, life = start(stage), stage.life
    await life.hear_submit()
    assert life.on_loss is not None
    life.on_loss(RankLost("gone"))
    heir = await stage.next_life()
    await heir.hear_submit()
    heir.hub.send("server", Refused(request_id="a", status=429, code="rate_limit_exceeded", message="full"))
    await heir.hear_submit()
    heir.say(tokens("a", 0, 3, last=True))
    assert await task == [3]


async def test_the_engine_gives_up_after_too_many_losses(stage: Stage) -> None:
    task = start(stage)
    await stage.life.hear_submit()
    for _ in range(engine_module.MAX_REBUILDS):
        life = stage.life
        assert life.on_loss is not None
        life.on_loss(RankLost("rank0 died"))
        await stage.next_life()
    assert stage.life.on_loss is not None
    stage.life.on_loss(RankLost("rank0 died"))
    with pytest.raises(EngineError, match="lost 4 times in 300 s, last: rank0 died"):
        await task
    with pytest.raises(EngineError, match="lost 4 times"):
        stage.engine.check_health()
    with pytest.raises(EngineError, match="lost 4 times"):
        await start(stage, "b")


async def test_an_epoch_that_does_not_start_is_tried_again(stage: Stage) -> None:
    task, life = start(stage), stage.life
    await life.hear_submit()
    stage.launcher.failures = [RankLost("no room"), OSError("no memory")]
    assert life.on_loss is not None
    life.on_loss(RankLost("gone"))
    heir = await stage.next_life()
    assert (await heir.hear_submit()).request_id == "a"
    heir.say(tokens("a", 0, 3, last=True))
    assert await task == [3]
    assert stage.engine.num_rebuilds == 3


async def test_a_mistake_in_the_configuration_comes_out_of_start_as_it_is() -> None:
    stage = Stage()
    for failure in (ModelError("no such model"), ConfigError("too little memory")):
        stage.launcher.failures = [failure]
        with pytest.raises(type(failure), match=str(failure)):
            await stage.engine.start()
    await stage.engine.close()
    assert stage.launcher.is_closed


async def test_closing_ends_streams_and_is_final(stage: Stage) -> None:
    task = start(stage)
    await stage.life.hear_submit()
    await stage.engine.close()
    with pytest.raises(EngineStopped):
        await task
    with pytest.raises(EngineStopped):
        await start(stage, "b")
    with pytest.raises(EngineStopped):
        stage.engine.check_health()


async def test_health_needs_reports_and_steps(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.life.hub.send("server", Stats(num_steps=7, has_work=True))
    await until(lambda: stage.engine.stats.num_steps == 7)
    stage.engine.check_health()
    monkeypatch.setattr(engine_module, "SILENCE_S", 0.1)
    for _ in range(30):  # alive, busy, and no step ends: deadline 1.0 s and silence 0.1 s pass
        stage.life.hub.send("server", Stats(num_steps=7, has_work=True))
        await asyncio.sleep(0.05)
    with pytest.raises(EngineError, match=r"no step has ended for \d s although there is work"):
        stage.engine.check_health()
    stage.life.hub.send("server", Stats(num_steps=8, has_work=True))
    await until(lambda: stage.engine.stats.num_steps == 8)
    stage.engine.check_health()


async def test_a_scheduler_that_falls_silent_is_lost(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "SILENCE_S", 0.1)
    task = start(stage)
    await stage.life.hear_submit()
    heir = await stage.next_life()
    assert (await heir.hear_submit()).request_id == "a"
    monkeypatch.undo()
    heir.say(tokens("a", 0, 3, last=True))
    assert await task == [3]


async def test_a_message_that_is_not_the_servers_ends_the_epoch(stage: Stage) -> None:
    stage.life.hub.send("server", StepPlan(step=1))
    await stage.next_life()
    assert stage.engine.num_rebuilds == 1


async def test_a_silent_shard_is_replaced_and_streams_go_on(stage: Stage) -> None:
    stream = start(stage)
    await stage.life.hear_submit()
    stage.life.hub.send("server", ShardSilent("shard0.0"))
    stage.life.say(tokens("a", 0, 7, last=True))

    assert await stream == [7]
    assert stage.life.replaced == ["shard0.0"]


async def test_a_drafter_that_is_refused_leaves_the_engine_serving(stage: Stage) -> None:
    with pytest.raises(ConfigError, match="no drafter fits"):
        await stage.engine.swap_drafter(None)

    stage.engine.check_health()
