"""One drafter in several engines: the same checkpoint, prompts and block, greedy.

What an engine accepts of a drafter follows from the checkpoint and the text alone. So where two engines that
share no code accept the same, both compute the published formulas; where one accepts less, its taps,
positions or masks are wrong, however plausible its figures look. Each engine counts its verifies and the
drafts that stood at each slot, and tells them under `/metrics`.
"""

import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from ...cluster.errors import UserError
from ..ingress import free_port
from .client import BenchError
from .counters import HEARTBEAT_S
from .llama_cpp import install_llama_cpp, llama_cpp_server
from .report import OURS
from .servers import Launch, PeerUnavailable, running_server
from .setting import trained_drafts
from .vllm import install_vllm, vllm_server

_ANSWER_TIMEOUT_S = 600.0
_PREFIXES = ("vllm:", "llamacpp:")  # ours are vLLM's names


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """What every engine is asked."""

    model_path: Path
    drafter_path: Path
    num_drafts: int  # per block
    dtype: str
    prompts: list[list[int]]  # token ids
    max_tokens: int
    num_streams: int

    @property
    def longest(self) -> int:
        """Tokens of a sequence, at most, with a block behind it."""
        return max(map(len, self.prompts)) + self.max_tokens + self.num_drafts + 1


class Drafting(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine counted."""

    num_verifies: int = 0
    num_drafts: int = 0
    accepted_per_slot: list[int] = []

    @property
    def tokens_per_verify(self) -> float:
        return 1 + sum(self.accepted_per_slot) / max(1, self.num_verifies)

    @property
    def per_slot(self) -> list[float]:
        """Share of verifies in which the drafts up to each slot stood."""
        return [count / max(1, self.num_verifies) for count in self.accepted_per_slot]


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's row."""

    engine: str
    drafting: Drafting
    texts: list[str]
    num_tokens: int


def check_of(
    model_path: Path, drafter_path: Path, dtype: str, prompts: list[list[int]], max_tokens: int, streams: int
) -> Check:
    """Every engine drafts as many tokens as the drafter was trained for. Raises ModelError, UserError."""
    if not prompts:
        raise UserError("no prompt is left to ask; give --data DIR, or a longer --max-prompt-len")
    return Check(
        model_path=model_path.resolve(),
        drafter_path=drafter_path.resolve(),
        num_drafts=trained_drafts(drafter_path),
        dtype=dtype,
        prompts=prompts,
        max_tokens=max_tokens,
        num_streams=streams,
    )


def run_check(check: Check, engines: Sequence[str], console: Console) -> tuple[list[Answers], dict[str, str]]:
    """Ask each engine in turn. Returns the rows, and who was left out with the reason."""
    rows: list[Answers] = []
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="paceline-crosscheck-") as logs:
        for engine in engines:
            console.print(f"{engine}: {len(check.prompts)} prompts")
            try:
                launch = LAUNCHES[engine](check, free_port())
                with running_server(
                    launch.command, launch.environ, launch.port, Path(logs) / f"{engine}.log"
                ) as url:
                    rows.append(asyncio.run(ask_server(url, engine, check)))
            except (BenchError, PeerUnavailable) as error:
                skipped[engine] = str(error)
                console.print(f"{engine} is left out: {error}", style="red", soft_wrap=True, markup=False)
    return rows, skipped


async def ask_server(url: str, engine: str, check: Check) -> Answers:
    """Let a server that drafts answer every prompt. Raises BenchError when it fails, or drafts nothing."""
    places = asyncio.Semaphore(check.num_streams)
    try:
        async with aiohttp.ClientSession(
            url,
            timeout=aiohttp.ClientTimeout(total=_ANSWER_TIMEOUT_S),
            connector=aiohttp.TCPConnector(force_close=True),  # llama.cpp closes each connection
        ) as session:
            async with session.get("/v1/models") as response:
                model = (await response.json())["data"][0]["id"]

            async def ask(prompt: list[int]) -> tuple[str, int]:
                body = {"model": model, "prompt": prompt, "max_tokens": check.max_tokens, "temperature": 0.0}
                async with places, session.post("/v1/completions", json=body) as response:
                    if response.status != 200:
                        raise BenchError(f"answered {response.status}: {(await response.text())[:300]}")
                    answer = await response.json()
                    return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]

            answers = await asyncio.gather(*map(ask, check.prompts))
            await asyncio.sleep(HEARTBEAT_S)
            async with session.get("/metrics") as response:
                drafting = parse_drafting(await response.text())
    except (aiohttp.ClientError, TimeoutError, KeyError) as error:
        raise BenchError(f"{url}: {type(error).__name__}: {error}") from error
    if not drafting.num_verifies:
        raise BenchError(f"{engine} counted no verified drafts")
    texts, num_tokens = zip(*answers, strict=True)
    return Answers(engine=engine, drafting=drafting, texts=list(texts), num_tokens=sum(num_tokens))


def parse_drafting(exposition: str) -> Drafting:
    """The counters of speculative decoding in a Prometheus text, summed over engines."""
    sums: dict[str, int] = {}
    slots: dict[int, int] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            prefix = next((prefix for prefix in _PREFIXES if sample.name.startswith(prefix)), None)
            if prefix is None or not sample.name.endswith("_total"):
                continue
            name = sample.name.removeprefix(prefix).removesuffix("_total")
            if name == "spec_decode_num_accepted_tokens_per_pos":
                slot = int(sample.labels["position"])
                slots[slot] = slots.get(slot, 0) + int(sample.value)
            else:
                sums[name] = sums.get(name, 0) + int(sample.value)
    return Drafting(
        num_verifies=sums.get("spec_decode_num_drafts", 0),
        num_drafts=sums.get("spec_decode_num_draft_tokens", 0),
        accepted_per_slot=[slots.get(slot, 0) for slot in range(max(slots, default=-1) + 1)],
    )


def table_of(rows: Sequence[Answers]) -> str:
    """Markdown; ratios and equal texts are to the first row."""
    lines = [
        "| engine | answers | same text | tokens | verifies | tokens per verify | ratio | up to slot 1.. |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        found, first = row.drafting, rows[0]
        slots = " ".join(f"{share:.3f}" for share in found.per_slot)
        num_same = sum(text == other for text, other in zip(row.texts, first.texts, strict=True))
        ratio = found.tokens_per_verify / first.drafting.tokens_per_verify
        lines.append(
            f"| {row.engine} | {len(row.texts)} | {num_same} | {row.num_tokens} | {found.num_verifies} | "
            f"{found.tokens_per_verify:.3f} | {ratio:.3f} | {slots} |"
        )
    return "\n".join(lines)


def _launch_paceline(check: Check, port: int) -> Launch:
    command = [sys.executable, "-m", "paceline.deploy", "serve", str(check.model_path)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", check.dtype]
    command += ["--drafter", str(check.drafter_path), "--max-num-seqs", str(check.num_streams)]
    command += ["--no-draft-budget", "--no-prompt-lookup"]  # every draft of the drafter, and of it alone
    return Launch(command, {}, port)


def _launch_vllm(check: Check, port: int) -> Launch:
    install_vllm()
    return vllm_server(
        str(check.model_path),
        check.dtype,
        port,
        num_places=check.num_streams,
        drafter_path=str(check.drafter_path),
        num_drafts=check.num_drafts,
        is_compiled=False,
    )


def _launch_llama_cpp(check: Check, port: int) -> Launch:
    install_llama_cpp()
    return llama_cpp_server(
        check.model_path,
        check.dtype,
        port,
        num_slots=check.num_streams,
        slot_len=check.longest,
        drafter_path=check.drafter_path,
        num_drafts=check.num_drafts,
    )


LAUNCHES: dict[str, Callable[[Check, int], Launch]] = {
    OURS: _launch_paceline,
    "vllm": _launch_vllm,
    "llama.cpp": _launch_llama_cpp,
}
