"""Plans executed by ranks: the same tokens however they are chunked, batched, drafted or split over ranks."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from drive import Driver, Stream, make_config, start_group
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import VOCAB_SIZE, make_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.cluster.errors import ProtocolError
from paceline.cluster.messages import Admit, Chunk, SamplingParams, StepPlan
from paceline.workers.runner import Runner

GREEDY = SamplingParams(max_tokens=12, temperature=0)
SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, seed=11)
EVERYTHING = SamplingParams(
    max_tokens=12,
    temperature=0.9,
    top_k=200,
    top_p=0.95,
    min_p=0.001,
    repetition_penalty=1.2,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias={5: 2.0, 6: -100.0},
    bad_words=[[7], [8, 9]],
    stop_token_ids=[2],
    min_tokens=5,
    logprobs=3,
    seed=2**64 - 1,
)
PARAMS = {"greedy": GREEDY, "sampled": SAMPLED, "everything": EVERYTHING}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def driver(path: Path) -> Driver:
    return Driver(Runner(path, make_config()))


@pytest.fixture(scope="module")
def alone(driver: Driver) -> dict[str, list[list[int]]]:
    """What every prompt gives by itself, prompt in one chunk."""
    return {
        name: [driver.generate([prompt], params)[0].output for prompt in prompts()]
        for name, params in PARAMS.items()
    }


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = (1, 5, 16, 33, 50)
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


def test_greedy_equals_transformers(path: Path, driver: Driver) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for prompt, stream in zip(prompts(), driver.generate(prompts(), GREEDY), strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            expected = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=12,
                eos_token_id=None,
            )
        assert stream.output == expected[0, len(prompt) :].tolist()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_any_schedule_gives_the_same_tokens(
    driver: Driver, alone: dict[str, list[list[int]]], seed: int
) -> None:
    """Random arrivals, chunk sizes and company; a preempted sequence is admitted again with what it has."""
    dice = random.Random(seed)
    waiting = [(dice.choice(sorted(PARAMS)), dice.randrange(5)) for _ in range(dice.randint(1, 5))]
    running: list[tuple[tuple[str, int], Stream]] = []
    while waiting or running:
        if waiting and (not running or dice.random() < 0.5):
            name, index = waiting.pop()
            running.append(((name, index), driver.admit(prompts()[index], PARAMS[name])))
        if chosen := [stream for _, stream in running if dice.random() < 0.8]:
            driver.advance(chosen, lambda _: dice.randint(1, 20))
        if running and dice.random() < 0.05:
            key, stream = running.pop(0)
            driver.release(stream)
            running.append((key, readmit(driver, stream)))
        for (name, index), stream in [entry for entry in running if entry[1].is_done]:
            assert stream.output == alone[name][index]
            driver.release(stream)
        running = [entry for entry in running if not entry[1].is_done]


def readmit(driver: Driver, stream: Stream) -> Stream:
    """The same request as a new sequence, as after a preemption."""
    again = driver.admit(stream.tokens[: stream.prompt_len], stream.params)
    driver.step(release=[again.sequence_id])
    again.tokens = stream.tokens
    driver.step(admit=[Admit(again.sequence_id, again.tokens.copy(), again.prompt_len, again.params)])
    return again


@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel_gives_the_same_tokens(
    path: Path, alone: dict[str, list[list[int]]], size: int
) -> None:
    """With four ranks two of them share each key-value head."""
    group = Driver(*start_group(path, make_config(), size))
    for name, params in PARAMS.items():
        assert [stream.output for stream in group.generate(prompts(), params)] == alone[name]


def test_tensor_parallel_with_biases_and_uneven_vocabulary(tmp_path: Path) -> None:
    """A row-parallel bias counts once; the last rank holds fewer tokens than the others."""
    checkpoint = make_checkpoint(tmp_path, "llama", attention_bias=True, mlp_bias=True, vocab_size=509)
    some = [[token_id % 509 for token_id in prompt] for prompt in prompts()]
    solo, group = (
        Driver(Runner(checkpoint, make_config())),
        Driver(*start_group(checkpoint, make_config(), 2)),
    )
    for params in PARAMS.values():
        expected = [stream.output for stream in solo.generate(some, params)]
        assert [stream.output for stream in group.generate(some, params)] == expected


def test_tensor_parallel_scores_a_prompt_alike(path: Path, driver: Driver) -> None:
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=2)
    mixed = [params, SamplingParams(max_tokens=2, temperature=0)] * 4
    group = Driver(*start_group(path, make_config(), 2))

    def told(which: Driver) -> list[tuple[int, int, list[int], list[float]]]:
        first_id = which.admit([3], params).sequence_id + 1
        which.scores.clear()
        which.generate(prompts()[:4], mixed[:4])
        return [
            (scores.sequence_id - first_id, scores.first + index, [i for i, _ in at.top], [at.logprob])
            for scores in which.scores
            for index, at in enumerate(scores.logprobs)
        ]

    alone, split = told(driver), told(group)
    assert [entry[:3] for entry in split] == [entry[:3] for entry in alone]
    logprobs = [[value for *_, values in entries for value in values] for entries in (split, alone)]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
    assert len(alone) == sum(len(prompt) - 1 for prompt in prompts()[:4:2])


@pytest.mark.parametrize("name", PARAMS)
def test_drafted_block_decides_what_single_steps_decide(
    driver: Driver, alone: dict[str, list[list[int]]], name: str
) -> None:
    """Right drafts stand; behind a wrong one the next block starts over, and nothing needs undoing."""
    for index, prompt in enumerate(prompts()):
        expected = alone[name][index]
        stream = driver.admit(prompt, PARAMS[name])
        while not stream.output:
            driver.advance([stream], 7)
        num_blocks = 0
        while len(stream.output) < len(expected):
            done = len(stream.output)
            drafts = expected[done : done + 4]
            if num_blocks % 2 and len(drafts) > 2:
                drafts = [*drafts[:2], (drafts[2] + 1) % VOCAB_SIZE, *drafts[3:]]  # the third will not stand
            (decision,) = driver.step(chunks=[driver.chunk(stream, 0, drafts)])
            standing = next((i for i, d in enumerate(drafts) if decision.token_ids[i] != d), len(drafts))
            stream.tokens += decision.token_ids[: standing + 1]
            stream.computed += standing + 1
            num_blocks += 1
        assert stream.output[: len(expected)] == expected
        driver.release(stream)


def test_company_of_other_parameters_changes_nothing(
    driver: Driver, alone: dict[str, list[list[int]]]
) -> None:
    names = ["greedy", "everything", "sampled", "everything", "greedy"]
    streams = driver.generate(prompts(), [PARAMS[name] for name in names])
    assert [s.output for s in streams] == [alone[name][i] for i, name in enumerate(names)]


def test_real_model_greedy_equals_transformers(default_model: Path) -> None:
    check_greedy(default_model, REAL_PROMPTS[:2], 32)


@pytest.mark.slow
def test_real_model_ten_prompts_of_128_tokens_equal_transformers(default_model: Path) -> None:
    check_greedy(default_model, REAL_PROMPTS, 128)


REAL_PROMPTS = [
    "The capital of France is",
    "Explain what a tide is to a child.",
    "Write a short poem about riding bicycles in a line.",
    "def fibonacci(n):",
    "Once upon a time, in a village by the sea,",
    "List three uses of copper.",
    "The quick brown fox",
    "In 1969, astronauts",
    "Water boils at",
    "Dear colleague, I am writing to you because",
]


def check_greedy(model_path: Path, texts: list[str], num_tokens: int) -> None:
    """All prompts in one batch here, each alone there."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    token_ids = [tokenizer(text).input_ids for text in texts]
    runner = Runner(model_path, make_config(kv_cache_gib=0.25))
    streams = Driver(runner).generate(token_ids, SamplingParams(max_tokens=num_tokens, temperature=0))
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    for prompt, stream in zip(token_ids, streams, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            expected = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=num_tokens,
                eos_token_id=[],
            )
        assert stream.output == expected[0, len(prompt) :].tolist()


def test_plans_out_of_order_are_refused(path: Path) -> None:
    runner = Runner(path, make_config())
    runner.execute(StepPlan(step=1))
    with pytest.raises(ProtocolError, match="expected step 2, got 3"):
        runner.execute(StepPlan(step=3))
    with pytest.raises(ProtocolError, match="expected step 2, got 1"):
        runner.execute(StepPlan(step=1))
    runner.execute(StepPlan(step=2))


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (Chunk(9, 0, 3, [], [0], 1), "sequence 9, which is not here"),
        (Chunk(1, 0, 3, [], [], 1), "does not fit 0 pages"),
        (Chunk(1, 0, 17, [], [0], 1), "does not fit 1 pages"),
        (Chunk(1, 0, 2, [5, 5, 5], [0], 1), "tail of 3"),
        (Chunk(1, 0, 2, [], [0], 3), "3 deciding"),
        (Chunk(1, 250, 10, [], list(range(16)), 1), "does not fit 16 pages"),
    ],
)
def test_contradicting_chunks_are_refused(path: Path, chunk: Chunk, message: str) -> None:
    runner = Runner(path, make_config())
    with pytest.raises(ProtocolError, match=message):
        runner.execute(StepPlan(step=1, admit=[Admit(1, [4, 5, 6], 3, GREEDY)], chunks=[chunk]))


def test_unknown_and_repeated_sequences_are_refused(path: Path) -> None:
    runner = Runner(path, make_config(max_num_batched_tokens=32))
    admit = Admit(1, list(range(40)), 40, GREEDY)
    with pytest.raises(ProtocolError, match="released but is not here"):
        runner.execute(StepPlan(step=1, release=[1]))
    with pytest.raises(ProtocolError, match="admitted twice"):
        runner.execute(StepPlan(step=2, admit=[admit, admit]))
    with pytest.raises(ProtocolError, match="40 rows exceeds 32"):
        runner.execute(StepPlan(step=3, chunks=[Chunk(1, 0, 40, [], [0, 1, 2], 1)]))
    with pytest.raises(ProtocolError, match="257 tokens exceed 256"):
        runner.execute(StepPlan(step=4, admit=[Admit(2, [1] * 257, 257, GREEDY)]))
