"""`paceline train`: data, training, evaluation and export of a drafter for one's own model.

Also run as `python -m paceline.deploy.train`, which needs neither Ray nor sockets nor a network: what the
rest of the command line depends on is imported where it is used, or not at all.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..cluster.errors import ConfigError, PacelineError, UserError

if TYPE_CHECKING:
    import torch

train_app = typer.Typer(
    help="Train a drafter for your own model: data, fit, eval; bare: all of them.", add_completion=False
)

Model = Annotated[str, typer.Option(help="The target: 'default', a directory, or a Hugging Face id.")]
Prompts = Annotated[
    Path | None, typer.Option(help='JSON lines of {"messages": [...]}; none: the target invents them.')
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; none: all cores.")]
Device = Annotated[str, typer.Option(help="auto, cpu, or cuda.")]


def main() -> int:
    """Run the plain road; the caller's mistakes become one line on stderr and exit code 2."""
    try:
        return train_app(prog_name="paceline.deploy.train", standalone_mode=False) or 0
    except UserError as error:
        return _fail(str(error), 2)
    except PacelineError as error:
        return _fail(str(error), 1)
    except typer.TyperException as error:
        return _fail(error.format_message(), 2)
    except (KeyboardInterrupt, typer.Abort):
        return 130


def _fail(message: str, code: int) -> int:
    print(f"paceline train: {' '.join(message.split())}", file=sys.stderr)
    return code


@train_app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    preset: Annotated[str, typer.Option(help="All stages: smollm2-demo (one GPU) or laptop.")] = "laptop",
    out: Annotated[Path | None, typer.Option(help="Directory of all stages.")] = None,
    model: Model = "default",
    prompts: Prompts = None,
    scale: Annotated[float, typer.Option(help="Shrink data and training, to rehearse.")] = 1.0,
    threads: Threads = None,
    device: Device = "auto",
) -> None:
    """Without a sub-command: data, fit and eval by a preset, in this process."""
    if context.invoked_subcommand is not None:
        return
    if out is None:
        raise ConfigError("nothing to do; give --out DIR, or one of data, fit, eval (see --help)")
    from .training.stages import run_preset

    where, precision = choose_compute(device, "bfloat16", threads)
    run_preset(preset, out, resolve_target(model), where, precision, scale=scale, prompts=prompts)


@train_app.command()
def data(
    out: Annotated[Path, typer.Option(help="Directory of the data; continued if it has some.")],
    tokens: Annotated[int, typer.Option(min=1, help="Answer tokens wanted for training.")] = 1_000_000,
    model: Model = "default",
    prompts: Prompts = None,
    taps: Annotated[
        str | None, typer.Option(help="Blocks to tap, as 1,8,14,20,27; none: five by the published rule.")
    ] = None,
    tap_dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = "float16",
    dtype: Annotated[str, typer.Option(help="Precision of the target: float32 or bfloat16.")] = "float32",
    places: Annotated[int, typer.Option(min=1, help="Sequences written at once.")] = 96,
    round_len: Annotated[int, typer.Option(min=1, help="Prompts per round.")] = 1024,
    shard_len: Annotated[int, typer.Option(min=1, help="Sequences per shard file.")] = 128,
    max_prompt_len: Annotated[int, typer.Option(min=1, help="Longer prompts are left out.")] = 256,
    max_answer_len: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 256,
    heldout_share: Annotated[float, typer.Option(min=0, help="Share of prompts not trained on.")] = 0.04,
    sampled_share: Annotated[float, typer.Option(min=0, help="Share of answers drawn at T = 0.7.")] = 0.5,
    keep_last: Annotated[
        bool, typer.Option("--keep-last", help="Also what --distill needs: a fifth more bytes.")
    ] = False,
    seed: int = 0,
    threads: Threads = None,
    device: Device = "auto",
) -> None:
    """Let the target answer prompts and keep its answers with their tap rows."""
    from ..drafter.training.data import DataSettings, default_taps
    from ..drafter.training.shape import TargetShape
    from .training.stages import run_data

    path = resolve_target(model)
    settings = DataSettings(
        tap_layer_ids=parse_ids(taps) if taps else default_taps(TargetShape.load(path).num_layers, 5),
        tap_dtype=tap_dtype,
        prompts_file=None if prompts is None else str(prompts),
        round_len=round_len,
        shard_len=shard_len,
        max_prompt_len=max_prompt_len,
        max_answer_len=max_answer_len,
        heldout_share=heldout_share,
        sampled_share=sampled_share,
        keeps_last=keep_last,
        seed=seed,
    )
    where, precision = choose_compute(device, dtype, threads)
    run_data(out, path, settings, tokens, num_places=places, device=where, dtype=precision)


@train_app.command()
def fit(
    data: Annotated[list[Path], typer.Option(help="Directory of data; may be repeated.")],
    out: Annotated[Path, typer.Option(help="Directory of the training; continued if it has some.")],
    model: Model = "default",
    layers: Annotated[int, typer.Option(min=1, help="Layers of the drafter.")] = 2,
    block: Annotated[int, typer.Option(min=2, help="Rows of a block: the anchor and its drafts.")] = 8,
    mask_token_id: Annotated[int | None, typer.Option(help="None: the special one used least.")] = None,
    gamma: Annotated[float | None, typer.Option(help="Slot k weighs e^-((k-1)/gamma).")] = None,
    passes: Annotated[float, typer.Option(help="How often each answer is seen.")] = 3.0,
    max_minutes: Annotated[float | None, typer.Option(help="The schedule ends by then.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per step and process.")] = 2,
    anchors: Annotated[int, typer.Option(min=1, help="Blocks per sequence and step.")] = 16,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 1e-3,
    warmup_steps: Annotated[int, typer.Option(min=0, help="Steps to that rate.")] = 40,
    max_vocab: Annotated[int, typer.Option(min=0, help="Tokens of the head in training; 0: all.")] = 16384,
    sample_vocab: Annotated[int, typer.Option(min=0, help="Of the other tokens, at each step.")] = 0,
    export_vocab: Annotated[
        int, typer.Option(min=0, help="Most frequent tokens the result can draft; 0: all.")
    ] = 0,
    distill: Annotated[
        float, typer.Option(help="Share of the loss that is the distance from the target's distribution.")
    ] = 0.0,
    init: Annotated[Path | None, typer.Option(help="A drafter to go on from.")] = None,
    log_every: Annotated[int, typer.Option(min=1, help="Steps per row of the log.")] = 50,
    save_every: Annotated[int, typer.Option(min=1, help="Steps per checkpoint.")] = 500,
    walk_every: Annotated[int, typer.Option(min=1, help="Steps per look at held-out text.")] = 1000,
    walk_len: Annotated[int, typer.Option(min=1, help="Held-out sequences it looks at.")] = 32,
    workers: Annotated[int, typer.Option(min=1, help="Processes; above 1 over Ray Train.")] = 1,
    shard: Annotated[bool, typer.Option("--shard", help="Divide the weights among them (FSDP).")] = False,
    seed: int = 0,
    threads: Threads = None,
    device: Device = "auto",
) -> None:
    """Train a drafter on the data of `paceline train data`."""
    from ..drafter.training.fit import FitPace, FitSettings
    from .training.stages import run_fit

    settings = FitSettings(
        num_layers=layers,
        block_size=block,
        mask_token_id=mask_token_id,
        gamma=gamma,
        passes=passes,
        max_minutes=max_minutes,
        batch_size=batch_size,
        num_anchors=anchors,
        lr=lr,
        warmup_steps=warmup_steps,
        max_vocab=max_vocab,
        sampled_vocab=sample_vocab,
        export_vocab=export_vocab,
        distill_share=distill,
        init=None if init is None else str(init),
        seed=seed,
    )
    pace = FitPace(log_every=log_every, save_every=save_every, walk_every=walk_every, walk_len=walk_len)
    where, _ = choose_compute(device, "float32", threads)
    run_fit(data, resolve_target(model), out, settings, pace, where, num_workers=workers, is_sharded=shard)


@train_app.command(name="eval")
def evaluate(
    drafter: Annotated[list[str], typer.Option(help="DIR, DIR+ngram, ngram; may be repeated.")],
    data: Annotated[
        list[Path] | None, typer.Option(help="Its held-out prompts are the chats; may be repeated.")
    ] = None,
    model: Model = "default",
    temperature: Annotated[list[float] | None, typer.Option(help="May be repeated; none: 0.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts per domain, at most.")] = 200,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer, at most.")] = 128,
    max_prompt_len: Annotated[int, typer.Option(min=1, help="Longer prompts are left out.")] = 512,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    places: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 8,
    out: Annotated[Path | None, typer.Option(help="Scores as JSON.")] = None,
    threads: Threads = None,
    device: Device = "auto",
) -> None:
    """Measure acceptance in the engine, by domain."""
    from ..cluster.config import load_config
    from ..drafter.training.shape import TargetShape
    from .api.text import Tokenizer
    from .training.evaluation import evaluate as run
    from .training.evaluation import gather_prompts, table, write_scores

    path = resolve_target(model)
    flags = {"dtype": dtype, "device": device, "num_threads": threads, "max_num_seqs": places}
    longest = min(max_prompt_len, TargetShape.load(path).max_len - max_tokens)
    prompts = gather_prompts(data or [], Tokenizer.load(path), limit, longest)
    scores = run(load_config(flags=flags), path, drafter, prompts, temperature or [0.0], max_tokens)
    print(table(scores))
    if out is not None:
        write_scores(out, scores)


def resolve_target(model: str) -> Path:
    """A directory is itself; any other name is looked up as everywhere."""
    if Path(model).expanduser().is_dir():
        return Path(model).expanduser()
    from ..cluster.model_source import resolve_model

    return resolve_model(model)


def parse_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--taps {text!r} is no list of block numbers; write 1,8,14,20,27") from None


def choose_compute(device: str, dtype: str, threads: int | None) -> "tuple[torch.device, torch.dtype]":
    """Where to compute and in what; sets the number of CPU threads."""
    import torch

    from ..kernels.dtypes import compute_dtype

    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device {device!r} is unknown; choose auto, cpu or cuda")
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype {dtype!r} is unknown; choose float32 or bfloat16")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no GPU; install a CUDA torch or choose cpu")
    if threads is not None:
        torch.set_num_threads(threads)
    where = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
    return where, compute_dtype(dtype, where)


if __name__ == "__main__":
    sys.exit(main())
