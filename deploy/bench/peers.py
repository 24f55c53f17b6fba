"""Measure Paceline beside other engines on this machine: `python -m paceline.deploy.bench.peers`.

Every round starts each peer in turn, measures it at every concurrency, and ends it before the next one
starts, so no two engines share the cores and a drift of the machine meets all of them. The order turns from
round to round.
"""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Annotated

import msgspec
import psutil
import typer
from rich.console import Console

from ...cluster.choices import Dtype
from ...cluster.config import DEFAULT_MODEL
from ...cluster.errors import UserError
from ...cluster.model_source import resolve_model
from . import llama_cpp, vllm
from .client import BenchError
from .llama_cpp import install_llama_cpp, measure_llama_cpp
from .measure import Measurement
from .prompts import make_chat_prompts, make_prompts
from .report import OURS, Report, Round, around_markers, markdown, rich_table, this_machine, write_into
from .servers import PeerUnavailable, measure_paceline
from .setting import Setting, Workload, num_prompts_for, trained_drafts
from .vllm import install_vllm, measure_vllm

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"


class Peer(StrEnum):
    """Who can be measured, in the order of the first round."""

    PACELINE = OURS  # without a drafter, as the others run
    PACELINE_NGRAM = "paceline-ngram"
    PACELINE_DFLASH = "paceline-dflash"
    VLLM = "vllm"
    VLLM_DFLASH = "vllm-dflash"
    LLAMA_CPP = "llama.cpp"
    LLAMA_CPP_DFLASH = "llama.cpp-dflash"
    TRANSFORMERS = "transformers"


def measure_transformers(setting: Setting, log_file: Path) -> list[Measurement]:
    """`generate` in a process of its own: static batches, no HTTP."""
    with log_file.open("wb") as log:
        done = subprocess.run(
            [sys.executable, "-m", "paceline.deploy.bench.transformers_peer"],
            input=msgspec.json.encode(setting),
            stdout=subprocess.PIPE,
            stderr=log,
            check=False,
        )
    if done.returncode != 0:
        lines = log_file.read_text(errors="replace").strip().splitlines() or ["no message"]
        raise BenchError(f"transformers exited with code {done.returncode}: {lines[-1]}")
    return msgspec.json.decode(done.stdout, type=list[Measurement])


def measure_paceline_dflash(setting: Setting, log_file: Path) -> list[Measurement]:
    """Paceline with the checkpoint that the other drafting peers have."""
    assert setting.drafter_path is not None
    return measure_paceline(setting.drafter_path, setting, log_file)


WITH_DRAFTER = {Peer.PACELINE_DFLASH, Peer.VLLM_DFLASH, Peer.LLAMA_CPP_DFLASH}
MEASURES: dict[Peer, Callable[[Setting, Path], list[Measurement]]] = {
    Peer.PACELINE: partial(measure_paceline, "none"),
    Peer.PACELINE_NGRAM: partial(measure_paceline, "ngram"),
    Peer.PACELINE_DFLASH: measure_paceline_dflash,
    Peer.VLLM: measure_vllm,
    Peer.VLLM_DFLASH: partial(measure_vllm, drafts=True),
    Peer.LLAMA_CPP: measure_llama_cpp,
    Peer.LLAMA_CPP_DFLASH: partial(measure_llama_cpp, drafts=True),
    Peer.TRANSFORMERS: measure_transformers,
}


def install_peers(peers: list[Peer], console: Console) -> dict[str, str]:
    """Install what of `peers` does not come with Paceline; who cannot be had, and why."""
    absent: dict[str, str] = {}
    for install, needs, them in (
        (install_vllm, "making the environment of vLLM (3.4 GB, minutes", {Peer.VLLM, Peer.VLLM_DFLASH}),
        (
            install_llama_cpp,
            "building llama.cpp (a quarter of an hour on two cores",
            {Peer.LLAMA_CPP, Peer.LLAMA_CPP_DFLASH},
        ),
    ):
        wanted = [peer for peer in peers if peer in them]
        if not wanted:
            continue
        try:
            with console.status(f"{needs}, the first time only)"):
                install()
        except PeerUnavailable as error:
            for peer in wanted:
                console.print(f"{peer} is left out: {error}", style="red", soft_wrap=True, markup=False)
                absent[peer] = str(error)
    return absent


def run_rounds(
    setting: Setting, peers: list[Peer], num_rounds: int, console: Console
) -> tuple[list[Round], dict[str, str]]:
    """Measure `peers` in turn. Returns the rounds, and who was left out after a failure, with the reason.

    Raises UserError when there is nobody to measure.
    """
    if not peers:
        raise UserError("no peer is left to measure; drop an --only or a --skip")
    rounds: list[Round] = []
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as logs:
        for index in range(num_rounds):
            this_round = Round(copy_gb_per_s=measure_copy_gb_per_s(), idle_percent={}, measured={})
            shift = index % len(peers)
            for peer in [*peers[shift:], *peers[:shift]]:
                if peer in skipped:
                    continue
                idle = measure_idle_percent()
                console.print(f"round {index + 1} of {num_rounds}: {peer} (cores {idle:.0f} % idle)")
                try:
                    measured = MEASURES[peer](setting, Path(logs) / f"{peer}-{index}.log")
                except (BenchError, PeerUnavailable) as error:
                    skipped[peer] = str(error)
                    console.print(f"{peer} is left out: {error}", style="red", soft_wrap=True, markup=False)
                    continue
                this_round.idle_percent[peer] = idle
                this_round.measured[peer] = measured
            rounds.append(this_round)
    return rounds, skipped


def measure_copy_gb_per_s() -> float:
    """How fast memory is copied, bytes read and written together: the bound of decoding at small batches."""
    import torch

    source = torch.ones(64 << 20, dtype=torch.float32)
    target = torch.empty_like(source)
    target.copy_(source)
    best_s = float("inf")
    for _ in range(8):
        started = perf_counter()
        target.copy_(source)
        best_s = min(best_s, perf_counter() - started)
    return 2 * source.nbytes / best_s / 1e9


def measure_idle_percent() -> float:
    """The idle share of all cores over two seconds: what else runs here would be measured too."""
    return 100.0 - psutil.cpu_percent(interval=2.0)


def main(
    model: Annotated[
        str, typer.Option(help="default, a Hugging Face id, a directory, a GGUF file")
    ] = "default",
    dtype: Annotated[Dtype, typer.Option(help="of weights and K/V, for every peer")] = "bfloat16",
    rounds: Annotated[int, typer.Option(min=1, max=20, help="the more, the steadier the medians")] = 1,
    streams: Annotated[
        list[int] | None, typer.Option(min=1, max=256, help="requests at once; repeatable; else 1, 8, 32")
    ] = None,
    prompt_len: Annotated[int, typer.Option(min=1, max=4096)] = 128,
    new_tokens: Annotated[int, typer.Option(min=2, max=4096)] = 128,
    chat: Annotated[bool, typer.Option("--chat", help="ask in the chat template")] = False,
    only: Annotated[list[Peer] | None, typer.Option(help="measure just this one; repeatable")] = None,
    skip: Annotated[list[Peer] | None, typer.Option(help="leave this one out; repeatable")] = None,
    drafter_path: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="DFlash checkpoint, of all that draft"),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="write the report as JSON")] = None,
    page: Annotated[Path | None, typer.Option(help="write the tables between this page's markers")] = None,
) -> None:
    """Tokens per second, time to first token and time per token over HTTP streams, beside other engines."""
    # Without this, a terminated benchmark would leave its servers behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console()
    peers = [peer for peer in MEASURES if (not only or peer in only) and peer not in (skip or [])]
    if drafter_path is None:
        peers = [peer for peer in peers if peer not in WITH_DRAFTER]
    workload = Workload(prompt_len=prompt_len, num_new_tokens=new_tokens, is_chat=chat)
    try:
        if page is not None:
            around_markers(page)  # found out now, not after the minutes of measuring
        absent = install_peers(peers, console)
        setting = prepare(model, dtype, workload, tuple(sorted(set(streams or [1, 8, 32]))), drafter_path)
        measured, failed = run_rounds(setting, [p for p in peers if p not in absent], rounds, console)
        skipped = absent | failed
        report = Report(
            date=datetime.now(UTC).strftime("%Y-%m-%d"),
            model=DEFAULT_MODEL_NAME if model == DEFAULT_MODEL else model,
            dtype=dtype,
            versions=versions_of(peers),
            workload=workload,
            machine=this_machine(),
            rounds=measured,
            skipped=skipped,
        )
        if output is not None:
            output.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
        console.print(rich_table(report))
        if page is not None:
            write_into(page, markdown(report))
    except UserError as error:
        typer.echo(f"bench: {error}", err=True)
        raise typer.Exit(2) from None
    if skipped:
        raise typer.Exit(1)


def prepare(
    model: str,
    dtype: str,
    workload: Workload,
    concurrencies: tuple[int, ...],
    drafter_path: Path | None = None,
) -> Setting:
    """Fetch the model if need be, and cut the prompts with its tokenizer."""
    path = resolve_model(model)
    num_prompts, prompt_len = num_prompts_for(concurrencies), workload.prompt_len
    if workload.is_chat:
        prompts = make_chat_prompts(path, num_prompts, prompt_len)
    else:
        prompts = make_prompts(path / "tokenizer.json", num_prompts, prompt_len)
    return Setting(
        model_path=str(path),
        dtype=dtype,
        workload=workload,
        concurrencies=concurrencies,
        prompts=prompts,
        drafter_path=None if drafter_path is None else str(drafter_path.resolve()),
        num_drafts=0 if drafter_path is None else trained_drafts(drafter_path),
    )


def versions_of(peers: list[Peer]) -> dict[str, str]:
    """The distributions whose speed a report with these peers tells of."""
    versions = {name: version(name) for name in ("paceline", "torch", "transformers")}
    for requirement, them in (
        (vllm.REQUIREMENT, {Peer.VLLM, Peer.VLLM_DFLASH}),
        (llama_cpp.REQUIREMENT, {Peer.LLAMA_CPP, Peer.LLAMA_CPP_DFLASH}),
    ):
        if them & set(peers):
            name, _, number = requirement.partition("==")
            versions[name] = number
    return versions


if __name__ == "__main__":
    typer.run(main)
