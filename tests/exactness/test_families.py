"""Every family of models, any drafter, any schedule: with drafting a request gets the tokens it gets without.

The real state machine, rank and shard on tiny models, in lockstep, so that hypothesis decides between which
two answers requests come, leave, and the shard dies or is swapped.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from drive import make_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lockstep import Answer, Lockstep
from proposers import Continuations, Known, Rule, ScriptedProposer, mixed, right, wrong
from tiny import EOS_TOKEN_ID, FAMILIES, VOCAB_SIZE, Family, make_checkpoint
from tiny_drafter import config_of, make_drafter

from paceline.cluster.messages import SamplingParams, Submit
from paceline.drafter.dflash_proposer import DFlashProposer
from paceline.drafter.ngram import NgramProposer
from paceline.drafter.proposer import Proposer
from paceline.drafter.target import Target
from paceline.scheduler.limits import Limits
from paceline.workers.runner import Runner

MAX_LEN = 128
PAGE_SIZE = 16
NUM_LAYERS = 3
RULES: dict[str, Rule] = {"oracle": right, "adversary": wrong, "mixed": mixed}
TOKEN = st.integers(3, VOCAB_SIZE - 1)

torch.set_num_threads(1)


@st.composite
def sampling(draw: st.DrawFn) -> SamplingParams:
    """Each processor in some of them."""

    def sometimes(usual: float, *others: float) -> float:
        return draw(st.sampled_from([usual] * (2 * len(others)) + list(others)))

    max_tokens = draw(st.integers(1, 40))
    tokens = draw(st.lists(TOKEN, min_size=40, max_size=40, unique=True))
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=draw(st.sampled_from([0.0, 0.7, 1.0])),
        top_k=int(sometimes(0, 5, 50)),
        top_p=sometimes(1.0, 0.6, 0.95),
        min_p=sometimes(0.0, 0.05),
        repetition_penalty=sometimes(1.0, 1.3),
        presence_penalty=sometimes(0.0, 0.8),
        frequency_penalty=sometimes(0.0, 0.5),
        logit_bias={tokens[0]: 3.0, tokens[1]: -50.0} if draw(st.integers(0, 3)) == 0 else {},
        bad_words=[tokens[2:3], tokens[3:5]] if draw(st.integers(0, 3)) == 0 else [],
        allowed_token_ids=sorted(tokens) if draw(st.integers(0, 4)) == 0 else None,
        stop_token_ids=[EOS_TOKEN_ID, *range(3, draw(st.sampled_from([3, 3, 30])))],
        min_tokens=min(int(sometimes(0, 7)), max_tokens),
        logprobs=draw(st.sampled_from([None, None, None, 0, 2])),
        seed=draw(st.integers(0, 2**64 - 1)),
    )


@dataclass(frozen=True)
class History:
    """Everything that an example does."""

    submits: list[Submit]
    arrivals: list[int]  # before which answer each request comes
    cancels: dict[int, str]  # before which answer somebody leaves
    losses: dict[int, str]  # before which answer the shard is lost, or swapped, or comes back
    limits: Limits
    max_drafts: int
    num_draft_pages: int


@st.composite
def histories(draw: st.DrawFn) -> History:
    common = draw(st.lists(TOKEN, min_size=50, max_size=50))
    num_requests = draw(st.integers(1, 7))
    submits: list[Submit] = []
    for index in range(num_requests):
        own = draw(st.lists(TOKEN, min_size=1, max_size=20))
        prompt = common[: draw(st.sampled_from([0, 0, 16, 33, 50]))] + own
        submits.append(
            Submit(
                request_id=f"r{index}",
                prompt_ids=prompt,
                params=draw(sampling()),
                cache_salt=draw(st.sampled_from(["", "", "", "salt"])),
                max_draft_tokens=draw(st.sampled_from([None, None, None, None, 0, 2])),
            )
        )
    ticks = st.integers(0, 60)
    max_num_seqs = draw(st.integers(1, 6))
    limits = Limits(
        num_pages=draw(st.integers(MAX_LEN // PAGE_SIZE, 3 * MAX_LEN // PAGE_SIZE)),
        page_size=PAGE_SIZE,
        max_model_len=MAX_LEN,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 64)),
        max_queued_requests=num_requests,
        aging_s=1.0,
        prefix_cache=draw(st.booleans()),
        num_draft_tokens=draw(st.sampled_from([None, None, 1, 3])),
        context_cap=draw(st.sampled_from([0, 0, 16, 40])),
        draft_budget=draw(st.booleans()),
    )
    names = st.sampled_from([submit.request_id for submit in submits])
    return History(
        submits=submits,
        arrivals=[draw(st.sampled_from([0, 0, 0, 5, 17, 40])) for _ in submits],
        cancels=draw(st.dictionaries(ticks, names, max_size=2)),
        losses=draw(st.dictionaries(ticks, st.sampled_from(["lose", "start"]), max_size=3)),
        limits=limits,
        max_drafts=draw(st.integers(1, 7)),
        num_draft_pages=draw(st.sampled_from([2, 5, 12, 60])),
    )


class Models:
    """A target and a random drafter for it, per family."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._targets: dict[Family, Path] = {}
        config = config_of(
            layer_types=("sliding_attention", "full_attention"),
            num_target_layers=NUM_LAYERS,
            options={"target_layer_ids": [0, 2]},
        )
        self.drafter = make_drafter(path / "drafter", config)

    def target(self, family: Family) -> Path:
        if family not in self._targets:
            self._targets[family] = make_checkpoint(self._path / family, family)
        return self._targets[family]

    def runner(self, family: Family, tap_layer_ids: tuple[int, ...] = ()) -> Runner:
        config = make_config(max_len=MAX_LEN, max_num_batched_tokens=512, max_num_seqs=8, kv_cache_gib=0.01)
        return Runner(self.target(family), config, tap_layer_ids=tap_layer_ids)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("families"))


def undisturbed(models: Models, family: Family, submits: list[Submit]) -> dict[str, Answer]:
    """All together in roomy pages, with nobody drafting."""
    limits = Limits(
        num_pages=MAX_LEN // PAGE_SIZE * 2 * len(submits),
        page_size=PAGE_SIZE,
        max_model_len=MAX_LEN,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_queued_requests=len(submits),
        aging_s=1.0,
        prefix_cache=False,
    )
    plain = Lockstep(models.runner(family), limits)
    for submit in submits:
        plain.submit(submit)
    plain.run()
    return plain.answers


def answers_of(
    models: Models, family: Family, submits: list[Submit]
) -> tuple[dict[str, Answer], Continuations]:
    """What each request says without a drafter, and what it would say if no stop token ended it."""
    ended = {submit.request_id: submit for submit in submits}
    endless = {
        f"{name} endless": msgspec.structs.replace(
            submit,
            request_id=f"{name} endless",
            params=msgspec.structs.replace(submit.params, stop_token_ids=[]),
        )
        for name, submit in ended.items()
        if not submit.params.min_tokens  # else the stop tokens are masked for a while, and belong to it
    }
    answers = undisturbed(models, family, [*submits, *endless.values()])
    known = Continuations()
    for name, submit in ended.items():
        answer = answers.get(f"{name} endless", answers[name])
        known.learn(submit.prompt_ids, submit.params, Known(answer.token_ids))
    return answers, known


def proposer_of(
    name: str, models: Models, family: Family, history: History, known: Continuations
) -> tuple[Callable[[], Proposer], tuple[int, ...]]:
    """How a life of the drafter is made, and the taps it reads."""
    if name == "ngram":
        return (lambda: NgramProposer(history.max_drafts)), ()
    if name == "dflash":
        target = Target.load(models.target(family), MAX_LEN, torch.float32, torch.device("cpu"))

        def load() -> Proposer:
            return DFlashProposer.load(
                models.drafter,
                target,
                context_bytes=history.num_draft_pages * 8192,
                page_size=PAGE_SIZE,
                block_size=history.max_drafts + 1,
                dtype=torch.float32,
            )

        return load, (0, 2)
    rule, _, without_taps = name.partition(" ")
    taps = () if without_taps else (1,)
    return (
        lambda: ScriptedProposer(
            RULES[rule],
            known,
            max_drafts=history.max_drafts,
            tap_layer_ids=taps,
            num_pages=history.num_draft_pages,
        )
    ), taps


def live_through(engine: Lockstep, history: History) -> None:
    """Perform the history; whoever is left is served to the end."""
    tick = 0
    while engine.advance() or tick <= max(history.arrivals):
        for submit, arrival in zip(history.submits, history.arrivals, strict=True):
            if arrival == tick:
                engine.submit(submit)
        if (name := history.cancels.get(tick)) in engine.answers:
            engine.cancel(name)
        match history.losses.get(tick):
            case "lose":
                engine.lose_shard()
            case "start":
                engine.start_shard()
        tick += 1


def assert_same(got: Answer, expected: Answer, name: str) -> None:
    if got.finish_reason == "cancelled":
        assert got.token_ids == expected.token_ids[: len(got.token_ids)], name
        return
    assert (got.token_ids, got.finish_reason) == (expected.token_ids, expected.finish_reason), name
    assert len(got.logprobs) == len(expected.logprobs)
    for mine, theirs in zip(got.logprobs, expected.logprobs, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [value for _, value in mine.top] == pytest.approx([v for _, v in theirs.top], abs=1e-4)


def check_exact(models: Models, family: Family, drafter: str, history: History) -> None:
    expected, known = answers_of(models, family, history.submits)
    make_proposer, taps = proposer_of(drafter, models, family, history, known)
    engine = Lockstep(models.runner(family, taps), history.limits, make_proposer)
    live_through(engine, history)
    for submit in history.submits:
        assert_same(engine.answers[submit.request_id], expected[submit.request_id], submit.request_id)
    stats = engine.stats
    assert not stats.has_work
    assert stats.num_free_pages == stats.num_pages
    if drafter.startswith("adversary"):
        assert stats.num_accepted_tokens == 0


DRAFTERS = st.sampled_from(
    ["oracle", "oracle without taps", "adversary", "mixed", "mixed", "mixed without taps", "ngram", "dflash"]
)
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


@given(family=st.sampled_from(FAMILIES), drafter=DRAFTERS, history=histories())
@settings(max_examples=60, deadline=None, suppress_health_check=QUIET, print_blob=True)
def test_any_history(models: Models, family: Family, drafter: str, history: History) -> None:
    check_exact(models, family, drafter, history)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(family=st.sampled_from(FAMILIES), drafter=DRAFTERS, history=histories())
@settings(max_examples=400, deadline=None, suppress_health_check=QUIET, print_blob=True)
def test_many_histories(models: Models, family: Family, drafter: str, history: History) -> None:
    check_exact(models, family, drafter, history)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_drafts(models: Models, family: Family) -> None:
    """The oracle's blocks stand whole: every verify gives a block, but for a request's first and last."""
    numbers = random.Random(3)
    submits = [
        Submit(
            request_id=f"r{index}",
            prompt_ids=[numbers.randrange(3, VOCAB_SIZE) for _ in range(20 + index)],
            params=SamplingParams(max_tokens=33, temperature=float(index % 2), seed=index),
        )
        for index in range(4)
    ]
    expected, known = answers_of(models, family, submits)
    limits = Limits(
        num_pages=64,
        page_size=PAGE_SIZE,
        max_model_len=MAX_LEN,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        max_queued_requests=4,
        aging_s=1.0,
        context_cap=32,
        draft_budget=False,
    )
    engine = Lockstep(
        models.runner(family, (1,)),
        limits,
        lambda: ScriptedProposer(right, known, tap_layer_ids=(1,), num_pages=60),
    )
    for submit in submits:
        engine.submit(submit)
    engine.run()
    for name, answer in engine.answers.items():
        assert_same(answer, expected[name], name)
        assert [output.num_accepted for output in answer.outputs] == [0, 7, 7, 7, 7]
    assert engine.stats.num_slides > 0
