"""Shards in one process: whatever they draft, and however they fail, streams keep their tokens."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from streams import collect, requests, tiny_config, together, wait_idle, wait_until_all_emit
from tiny import make_checkpoint
from tiny_drafter import config_of, make_drafter

from paceline.cluster import drafter_choice
from paceline.cluster.config import Config
from paceline.cluster.drafter_choice import DrafterChoice, Restarts, check_swap
from paceline.cluster.errors import ConfigError, ModelError, UserError
from paceline.cluster.messages import Draft, Open, Propose
from paceline.deploy.assemble import start_engine, start_local_engine
from paceline.deploy.drafter_source import choose_drafter, with_drafter
from paceline.deploy.engine import Engine
from paceline.drafter.ngram import NgramProposer

WANTED = requests(12, 60)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random one for the tiny checkpoint."""
    return tiny_drafter(tmp_path_factory.mktemp("drafter"), [0, 2])


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """What the streams give without a drafter."""

    async def run() -> list[list[int]]:
        engine = await start_local_engine(tiny_config(drafter="none"), checkpoint)
        token_ids = await together(engine, WANTED)
        assert engine.stats.shards == []
        await engine.close()
        return token_ids

    return asyncio.run(run())


def tiny_drafter(path: Path, taps: list[int], seed: int = 0) -> Path:
    config = config_of(options={"target_layer_ids": taps}, num_target_layers=3)
    return make_drafter(path / f"drafter-{seed}", config, seed=seed)


class Oracle(NgramProposer):
    """Drafts what the undisturbed streams went on with."""

    def __init__(self, outputs: list[list[int]]) -> None:
        super().__init__()
        self._known = [[*prompt, *output] for (prompt, _), output in zip(WANTED, outputs, strict=True)]
        self._tokens: dict[int, list[int]] = {}

    def open(self, opened: Open) -> None:
        self._tokens[opened.sequence_id] = list(opened.token_ids)

    def propose(self, proposals: Sequence[Propose], num_drafts: int) -> list[Draft]:
        drafts: list[Draft] = []
        for proposal in proposals:
            tokens = self._tokens[proposal.sequence_id]
            tokens += proposal.new_tokens
            rest = next(known[len(tokens) :] for known in self._known if known[: len(tokens)] == tokens)
            drafts.append(Draft(proposal.sequence_id, rest[:num_drafts], [1.0] * len(rest[:num_drafts])))
        return drafts


class FailingProposer(NgramProposer):
    """Breaks down at its `num_plans`-th proposal."""

    def __init__(self, num_plans: int) -> None:
        super().__init__()
        self._num_left = num_plans

    def propose(self, proposals: Sequence[Propose], num_drafts: int) -> list[Draft]:
        self._num_left -= 1
        if self._num_left == 0:
            raise MemoryError("the shard breaks down")
        return super().propose(proposals, num_drafts)


@pytest.mark.parametrize("name", ["default", "checkpoint"])
async def test_drafting_changes_no_token(
    name: str, checkpoint: Path, drafter: Path, expected: list[list[int]]
) -> None:
    config = tiny_config(drafter=str(drafter) if name == "checkpoint" else name)
    engine = await start_local_engine(config, checkpoint)
    assert await together(engine, WANTED) == expected
    await wait_idle(engine)
    stats = engine.stats
    assert stats.num_drafts > 0
    assert (stats.num_commit_rows > 0) == (name == "checkpoint")
    assert [(shard.peer, shard.state) for shard in stats.shards] == [("shard0.0", "ready")]
    await engine.close()


async def test_right_drafts_save_steps(checkpoint: Path, expected: list[list[int]]) -> None:
    engine = await start_local_engine(tiny_config(), checkpoint, make_proposer=lambda _: Oracle(expected))
    assert await together(engine, WANTED) == expected
    await wait_idle(engine)
    stats = engine.stats
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
    assert stats.num_steps < 20, "60 tokens in blocks of 9, after the prompts were read"
    await engine.close()


async def test_a_shard_that_breaks_down_comes_back(checkpoint: Path, expected: list[list[int]]) -> None:
    lives = iter([FailingProposer(10), FailingProposer(20), NgramProposer()])
    engine = await start_local_engine(tiny_config(), checkpoint, make_proposer=lambda _: next(lives))
    assert await together(engine, WANTED) == expected
    await wait_ready(engine, "shard0.2")
    assert await together(engine, WANTED, "again") == expected
    assert engine.num_rebuilds == 0
    await engine.close()


async def test_a_shard_that_never_works_is_given_up(
    checkpoint: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: DrafterChoice) -> NgramProposer:
        raise RuntimeError("no luck")

    monkeypatch.setattr(drafter_choice, "LONGEST_PAUSE_S", 0.01)
    engine = await start_local_engine(tiny_config(), checkpoint, make_proposer=fail)
    assert await together(engine, WANTED) == expected
    await engine.close()


async def test_a_drafter_is_swapped_under_streams(
    checkpoint: Path, drafter: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    config = tiny_config(drafter=str(drafter))
    engine = await start_local_engine(config, checkpoint)
    successor = tiny_drafter(tmp_path, [0, 2], seed=1)
    names = [str(successor), "ngram", "none", str(drafter)]
    for name, number in zip(names, (1, 2, None, 3), strict=True):
        streams = asyncio.create_task(together(engine, WANTED, name))
        await wait_until_all_emit(engine, 5)
        await engine.swap_drafter(choose_drafter(with_drafter(config, name), checkpoint))
        assert await streams == expected, name
        await wait_until(
            lambda name=name: (
                {s.state for s in engine.stats.shards} == {"absent" if name == "none" else "ready"}
            )
        )
        assert engine.num_streams == 0, number
    await wait_idle(engine)
    assert engine.num_rebuilds == 0
    await engine.close()


async def test_a_swap_that_fails_leaves_the_old_one(checkpoint: Path, drafter: Path, tmp_path: Path) -> None:
    config = tiny_config(drafter=str(drafter))
    engine = await start_local_engine(config, checkpoint)
    other_taps = choose_drafter(with_drafter(config, str(tiny_drafter(tmp_path, [1]))), checkpoint)
    with pytest.raises(ConfigError, match=r"after blocks 1, but .* tap blocks 0, 2; restart the server with"):
        await engine.swap_drafter(other_taps)
    broken = tiny_drafter(tmp_path, [0, 2], seed=2)
    choice = choose_drafter(with_drafter(config, str(broken)), checkpoint)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot be read"):
        await engine.swap_drafter(choice)
    await wait_ready(engine, "shard0.0")
    assert len(await collect(engine, "a", WANTED[0])) == 60
    await engine.close()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_target_layers": 8}, "target of 8 layers, this one has 3"),
        ({"vocab_size": 100}, "vocabulary of 100"),
        ({"architectures": ["LlamaForCausalLM"]}, "is no drafter we have"),
    ],
)
async def test_a_drafter_that_does_not_fit_is_refused_at_start(
    checkpoint: Path, tmp_path: Path, overrides: dict[str, object], message: str
) -> None:
    path = tmp_path / "wrong"
    path.mkdir()
    (path / "model.safetensors").touch()
    config = config_of(options={"target_layer_ids": [0, 2]}, num_target_layers=3)
    (path / "config.json").write_text(json.dumps(config | overrides))
    for start in (start_local_engine, start_engine):
        with pytest.raises(ModelError, match=message):
            await start(tiny_config(drafter=str(path)), checkpoint)


async def test_more_drafts_than_it_was_trained_for_are_refused(checkpoint: Path, drafter: Path) -> None:
    with pytest.raises(ModelError, match="block size 9 is not between 2 and 8"):
        await start_local_engine(tiny_config(drafter=str(drafter), num_draft_tokens=8), checkpoint)


async def test_damaged_weights_end_the_start(checkpoint: Path, tmp_path: Path) -> None:
    broken = tiny_drafter(tmp_path, [0, 2])
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot be read"):
        await start_local_engine(tiny_config(drafter=str(broken)), checkpoint)


@pytest.mark.parametrize(
    ("name", "message"),
    [("no such thing", "is no directory here and no Hugging Face id"), ("/tmp", "config")],
)
def test_a_drafter_that_is_not_there_is_named(name: str, message: str, checkpoint: Path) -> None:
    with pytest.raises(UserError, match=message):
        choose_drafter(Config(engine=tiny_config(drafter=name).engine), checkpoint)


def test_restarts_pause_longer_and_longer_and_end() -> None:
    restarts = Restarts()
    assert [restarts.after_loss(100.0) for _ in range(6)] == [100.0, 101.0, 102.0, 104.0, 108.0, None]
    assert restarts.after_loss(500.0) == 500.0, "old losses are forgotten"


def test_a_choice_without_taps_fits_every_engine() -> None:
    check_swap(None, (1, 2))
    check_swap(DrafterChoice(name="ngram"), ())
    with pytest.raises(ConfigError, match="tap blocks none"):
        check_swap(DrafterChoice(name="x", tap_layer_ids=(1,)), ())


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0):
        while not condition():
            await asyncio.sleep(0.05)


async def wait_ready(engine: Engine, *peers: str) -> None:
    await wait_until(lambda: {s.peer for s in engine.stats.shards if s.state == "ready"} == set(peers))
