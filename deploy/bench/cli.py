"""The `paceline bench` commands. What they need is imported inside them, so that `--help` answers at once."""

import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ...cluster.choices import Dtype
from ...cluster.config import Config
from ...cluster.errors import UserError
from ..options import config_command
from .planning_mode import PlanningMode

app = typer.Typer(help="Measure a server, an engine, or the scheduler alone.", no_args_is_help=True)

JsonFile = Annotated[Path | None, typer.Option("--json-file", help="Write the figures here.")]
Picture = Annotated[Path | None, typer.Option("--png", help="Draw the figures here.")]


@app.command()
def serve(
    url: Annotated[list[str] | None, typer.Option(help="A server; a second one is compared with it.")] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests in flight, closed loop; repeatable.")
    ] = None,
    rate: Annotated[
        list[float] | None, typer.Option(min=1e-3, help="Requests per second, Poisson; repeatable.")
    ] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Per load and round.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="In which the servers take turns.")] = 1,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests that are not measured, per server.")] = 4,
    prompts: Annotated[
        Path | None,
        typer.Option(help='JSON lines, each {"prompt": ...} or {"messages": [...]}; else synthetic ones.'),
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="Model whose tokens synthetic prompts are of.")] = "default",
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens of a synthetic prompt.")] = 128,
    shared_len: Annotated[int, typer.Option(min=0, help="Of these, tokens it shares with others.")] = 0,
    num_shared: Annotated[int, typer.Option(min=1, help="Different shared beginnings.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per request.")] = 128,
    stop_at_eos: Annotated[bool, typer.Option("--stop-at-eos", help="Answers end by themselves.")] = False,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="Goodput counts requests that meet this.")] = None,
    slo_itl_ms: Annotated[float | None, typer.Option(help="Likewise, 99th percentile of a request.")] = None,
    slo_e2e_ms: Annotated[float | None, typer.Option(help="Likewise, to the last token.")] = None,
    json_file: JsonFile = None,
    png: Picture = None,
) -> None:
    """Measure an OpenAI server that is up, or two in turns: TTFT, ITL, e2e, tokens/s, goodput, acceptance."""
    from rich.console import Console

    from ...cluster.model_source import resolve_model
    from .client import Asked, BenchError
    from .load import Load
    from .measure import Objective
    from .plot import draw_serve, require_matplotlib
    from .prompts import make_queries, read_queries
    from .serve import ServeRun, run_serve

    if png is not None:
        require_matplotlib()
    loads = [Load(concurrency=c) for c in concurrency or []] + [Load(rate=r) for r in rate or []]
    run = ServeRun(
        urls=list(dict.fromkeys(url or ["http://127.0.0.1:8000"])),
        loads=loads or [Load(concurrency=1), Load(concurrency=8)],
        num_requests=num_requests,
        num_rounds=rounds,
        num_warm_up=warm_up,
        asked=Asked(max_tokens=max_tokens, ignore_eos=not stop_at_eos, temperature=temperature),
        objective=Objective(ttft_s=_s(slo_ttft_ms), itl_s=_s(slo_itl_ms), e2e_s=_s(slo_e2e_ms)),
    )
    if prompts is not None:
        queries = read_queries(prompts)
    else:
        num_queries = warm_up + rounds * len(run.loads) * num_requests
        file = resolve_model(tokenizer) / "tokenizer.json"
        queries = make_queries(file, num_queries, prompt_len, shared_len=shared_len, num_shared=num_shared)
    try:
        report = run_serve(run, queries, Console(), json_file)
    except BenchError as error:
        print(f"paceline: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    if png is not None:
        draw_serve(report, png)


@app.command()
@config_command("model", "engine")
def step(
    config: Config,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Sequences at once; repeatable.")] = None,
    prompt_len: Annotated[int, typer.Option(min=1)] = 128,
    max_tokens: Annotated[int, typer.Option(min=2, help="New tokens per sequence.")] = 64,
    profile_batch: Annotated[
        int | None, typer.Option("--profile", min=1, help="Also list the operations of a batch like this.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Say where the time of a step goes, in an engine without channel and HTTP."""
    from rich.console import Console

    from .prompts import make_prompts
    from .step import BareEngine, measure_steps, profile, table_of

    batches = _batches(config, batch)
    path = _prepare(config)
    num_prompts = 2 * sum(batches) + 2 * (profile_batch or 0)
    prompts = iter(make_prompts(path / "tokenizer.json", num_prompts, prompt_len))
    engine = BareEngine(config, path)
    rows = measure_steps(engine, batches, prompts, max_tokens)
    if as_json:
        _print_json({"rows": rows})
    else:
        Console().print(table_of(rows))
    if profile_batch is not None:
        chosen = [next(prompts) for _ in range(profile_batch)]
        print(profile(lambda: engine.run(chosen, max_tokens)), file=sys.stderr if as_json else sys.stdout)


@app.command()
def scheduler(
    running: Annotated[list[int] | None, typer.Option(min=1, help="Running sequences; repeatable.")] = None,
    num_steps: Annotated[int, typer.Option(min=10, help="Measured at each.")] = 200,
    mode: Annotated[
        list[PlanningMode] | None,
        typer.Option(help="Without drafts, with them, or with the budget choosing; repeatable."),
    ] = None,
    drafts: Annotated[int, typer.Option(min=1, help="Drafts per sequence and step.")] = 7,
    accepted: Annotated[int, typer.Option(min=0, help="Of these, how many stand.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Say how long deciding a step takes, by the number of running sequences."""
    from rich.console import Console

    from .planning import measure_planning, table_of

    runnings = running or [1, 32, 256, 1024, 4096]
    report = measure_planning(runnings, num_steps, mode or [PlanningMode.PLAIN], drafts, accepted)
    if as_json:
        _print_json(report)
    else:
        Console().print(table_of(report))


@app.command()
@config_command("model", "engine")
def budget(
    config: Config,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Sequences at once; repeatable.")] = None,
    fixed: Annotated[list[int] | None, typer.Option("--k", min=1, help="Fixed numbers; repeatable.")] = None,
    prompt_len: Annotated[int, typer.Option(min=1)] = 128,
    max_tokens: Annotated[int, typer.Option(min=2, help="New tokens per sequence.")] = 128,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    wrong: Annotated[bool, typer.Option("--wrong", help="Spoil every draft: nothing may be lost.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Compare the draft budget with every fixed number of drafts, and with none."""
    from rich.console import Console

    from .budget import measure_budget, table_of
    from .prompts import make_prompts

    batches = _batches(config, batch)
    path = _prepare(config)
    num_prompts = (rounds + 1) * sum(batches)
    rows = measure_budget(
        config,
        path,
        batches,
        fixed or [1, 2, 4, 7],
        iter(make_prompts(path / "tokenizer.json", num_prompts, prompt_len)),
        max_tokens=max_tokens,
        num_rounds=rounds,
        is_wrong=wrong,
    )
    if as_json:
        _print_json({"rows": rows})
    else:
        Console().print(table_of(rows))


@app.command()
@config_command("model", "engine")
def turns(
    config: Config,
    sessions: Annotated[int, typer.Option(min=1)] = 16,
    num_turns: Annotated[int, typer.Option("--turns", min=2)] = 10,
    prompt_len: Annotated[int, typer.Option(min=1, help="New tokens of a turn.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Measure what the prefix cache saves in conversations, with and without the drafter's contexts."""
    from rich.console import Console

    from .prompts import make_prompts
    from .turns import measure_turns, table_of

    path = _prepare(config)
    ids = iter(make_prompts(path / "tokenizer.json", sessions * num_turns, prompt_len))
    words = [[next(ids) for _ in range(sessions)] for _ in range(num_turns)]
    rows = measure_turns(config, path, words, max_tokens)
    if as_json:
        _print_json({"rows": rows})
    else:
        Console().print(table_of(rows))


@app.command()
def crosscheck(
    drafter: Annotated[Path, typer.Option(exists=True, file_okay=False, help="A DFlash checkpoint.")],
    model: Annotated[
        str, typer.Option(help="Its target: default, a Hugging Face id, a directory.")
    ] = "default",
    data: Annotated[
        list[Path] | None, typer.Option(help="Of `paceline train data`: its held-out chats; may be repeated.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts per domain, at most.")] = 10,
    max_prompt_len: Annotated[int, typer.Option(min=1, help="Longer prompts are left out.")] = 512,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer, at most.")] = 128,
    dtype: Annotated[Dtype, typer.Option(help="Of weights and K/V, in every engine.")] = "float32",
    streams: Annotated[int, typer.Option(min=1, help="Answers at once.")] = 1,
    skip: Annotated[list[str] | None, typer.Option(help="Leave this engine out; may be repeated.")] = None,
    json_file: JsonFile = None,
) -> None:
    """One drafter in this engine, vLLM's CPU build and llama.cpp: what each accepts of it, greedy."""
    from rich.console import Console

    from ...cluster.model_source import resolve_model
    from ..api.text import Tokenizer
    from ..training.evaluation import gather_prompts
    from .crosscheck import LAUNCHES, check_of, run_check, table_of

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # or it leaves a server behind
    if unknown := set(skip or []) - LAUNCHES.keys():
        raise UserError(f"--skip {min(unknown)} is no engine; choose {', '.join(LAUNCHES)}")
    path = resolve_model(model)
    by_domain = gather_prompts(data or [], Tokenizer.load(path), limit, max_prompt_len)
    prompts = [prompt for some in by_domain.values() for prompt in some]
    check = check_of(path, drafter, dtype, prompts, max_tokens, streams)
    engines = [engine for engine in LAUNCHES if engine not in (skip or [])]
    rows, skipped = run_check(check, engines, Console(stderr=True))
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1))
    print(table_of(rows))
    if skipped:
        raise typer.Exit(1)


class Pattern(StrEnum):
    """How simulated requests come."""

    POISSON = "poisson"
    BURSTY = "bursty"
    TURNS = "turns"


@app.command()
def simulate(
    groups: Annotated[list[int] | None, typer.Option(min=1, help="Engines; repeatable.")] = None,
    rate: Annotated[
        list[float] | None, typer.Option(min=1e-3, help="Requests per second; repeatable.")
    ] = None,
    pattern: Annotated[
        Pattern, typer.Option(help="turns: rate/2 sessions of ten turns each.")
    ] = Pattern.POISSON,
    trace: Annotated[Path | None, typer.Option(help="JSON lines of arrivals, instead of a pattern.")] = None,
    num_requests: Annotated[int, typer.Option(min=2)] = 200,
    prompt_len: Annotated[int, typer.Option(min=1, help="Mean.")] = 256,
    output_len: Annotated[int, typer.Option(min=1, help="Mean.")] = 128,
    costs: Annotated[str, typer.Option(help="small-cpu, gpu-8b, or a JSON file.")] = "small-cpu",
    chance: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="That a draft stands; none given: no drafter.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1)] = 32,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1)] = 512,
    num_pages: Annotated[int, typer.Option(min=1, help="Of 16 tokens, per group.")] = 4096,
    itl_target_ms: Annotated[float | None, typer.Option(min=0.1)] = None,
    slo_ttft_ms: Annotated[float, typer.Option(help="Service is good if met.")] = 2000.0,
    slo_itl_ms: Annotated[float, typer.Option(help="Likewise, 99th percentile of a request.")] = 200.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
    png: Picture = None,
) -> None:
    """Replay a load against simulated groups: the real scheduler in virtual time."""
    from rich.console import Console

    from ...scheduler.limits import Limits
    from ...scheduler.traces import bursty, conversations, parse_trace, poisson
    from .measure import Objective
    from .plot import require_matplotlib
    from .simulate import draw_capacity, read_costs, table_of
    from .simulate import simulate as run

    if png is not None:
        require_matplotlib()
    known = read_costs(costs)
    limits = Limits(
        num_pages=num_pages,
        page_size=16,
        max_model_len=16 * num_pages,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_batched_tokens, max_num_seqs),
        max_queued_requests=1 << 30,
        aging_s=30.0,
        itl_target_ms=itl_target_ms,
    )
    objective = Objective(ttft_s=slo_ttft_ms / 1e3, itl_s=slo_itl_ms / 1e3)
    rates = sorted(set(rate or [1.0]))
    make = {
        Pattern.POISSON: lambda r: poisson(r, num_requests, prompt_len=prompt_len, output_len=output_len),
        Pattern.BURSTY: lambda r: bursty(r, num_requests, prompt_len=prompt_len, output_len=output_len),
        Pattern.TURNS: lambda r: conversations(max(1, round(r / 2)), 10, prompt_len=prompt_len),
    }[pattern]
    if trace is None:
        traces = {f"{r:g}/s": make(r) for r in rates}
    else:
        traces = {trace.name: parse_trace(trace.read_bytes().splitlines())}
    rows = {
        f"{n} groups": [run(found, n, limits, known, chance, objective) for found in traces.values()]
        for n in sorted(set(groups or [1]))
    }
    if as_json:
        _print_json(rows)
    else:
        named = [(name, row) for found in rows.values() for name, row in zip(traces, found, strict=True)]
        Console().print(table_of(named))
    if png is not None:
        draw_capacity(png, f"{pattern}, {prompt_len} + {output_len} tokens, {costs}", rows)


def _prepare(config: Config) -> Path:
    """Fetch the model and compile the kernels, if need be, where somebody watches."""
    from ...cluster.model_source import resolve_model
    from ...kernels.backend import prepare_backend
    from ..startup import StartupView

    with StartupView() as view:
        path = resolve_model(config.model.model, config.model.revision, view.phase)
        prepare_backend(config.engine.device, config.engine.backend, view.phase)
    return path


def _batches(config: Config, batch: list[int] | None) -> list[int]:
    """Those asked for, else the usual ones that fit. Raises UserError for one that does not."""
    most = config.engine.max_num_seqs
    if batch and max(batch) > most:
        raise UserError(f"a batch of {max(batch)} is above --max-num-seqs ({most}); raise it")
    return batch or [n for n in (1, 8, 32) if n <= most]


def _s(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _print_json(figures: object) -> None:
    print(msgspec.json.encode(figures).decode())
