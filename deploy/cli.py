"""The `paceline` command.

Exit codes: 0, done; 1, something failed that the caller cannot mend, or `doctor` found a reason not to serve;
2, the caller's mistake, named in one line on stderr with its remedy; 3, a batch is complete, but some of its
lines failed; 130 or 143, interrupted.

Modules that bring torch or Ray are imported inside the commands, so that `--help` answers at once.
"""

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from ..cluster.config import BUILT_IN_DRAFTERS, Config
from ..cluster.errors import ConfigError, PacelineError, UserError
from ..cluster.model_source import resolve_model
from .bench.cli import app as bench_app
from .options import config_command
from .train import train_app

drafter_app = typer.Typer(help="The drafter of a running server.", no_args_is_help=True)
app = typer.Typer(
    name="paceline",
    help="An LLM server on Ray, built around speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")
app.add_typer(drafter_app, name="drafter")
app.add_typer(train_app, name="train")


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code; the caller's mistakes become one line on stderr."""
    try:
        return app(argv, prog_name="paceline", standalone_mode=False) or 0
    except UserError as error:
        return _fail(str(error), code=2)
    except PacelineError as error:
        return _fail(f"the engine failed: {error}", code=1)
    except typer.TyperException as error:
        if message := error.format_message():
            _fail(f"{message} (see paceline --help)", code=2)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        # the reader has what it wanted; keep the interpreter's own flush at exit from complaining
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _fail(message: str, code: int) -> int:
    print(f"paceline: {' '.join(message.split())}", file=sys.stderr)
    return code


@app.callback(invoke_without_command=True)
def root(
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if show_version:
        print(f"paceline {version('paceline')}")
        raise typer.Exit


@app.command()
@config_command("model", "engine", "server")
def serve(config: Config) -> None:
    """Serve MODEL over HTTP with OpenAI's API."""
    from ..kernels.backend import prepare_backend
    from ..workers.spec import ModelSpec
    from .doctor import check_port
    from .startup import StartupView

    check_port(config.server.host, config.server.port)
    with StartupView() as view:
        if "RAY_ADDRESS" not in os.environ:  # in a cluster the model is where the replica is
            path = resolve_model(config.model.model, config.model.revision, view.phase)
            ModelSpec.load(path).check_tensor_parallel(config.engine.tensor_parallel_size)
            if config.engine.drafter not in BUILT_IN_DRAFTERS:
                from .drafter_source import choose_drafter

                view.phase("looking at the drafter")
                choose_drafter(config, path)
            prepare_backend(config.engine.device, config.engine.backend, view.phase)
        view.phase("loading the server")
        from .serve import run_server

        run_server(config, view)


@app.command()
@config_command("model", "engine")
def generate(
    config: Config,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Text to continue; may be repeated.")
    ] = None,
    chat_message: Annotated[
        list[str] | None, typer.Option("--chat", "-c", help="User message to answer; may be repeated.")
    ] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(help='JSON lines, each {"prompt": text} or {"messages": [{"role", "content"}, ...]}.'),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens per prompt.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Least probability mass kept.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Candidates kept; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws; the same for every prompt.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt.")] = False,
) -> None:
    """Generate from prompts with a local engine; no server."""
    from ..cluster.messages import SamplingParams
    from ..kernels.backend import prepare_backend
    from .startup import StartupView

    if config.engine.tensor_parallel_size > 1:
        from .ray_session import set_environment

        set_environment()  # Ray, which the next import brings, reads it only once
    from .generate import read_prompts, run_generate

    prompts = read_prompts(prompt or [], chat_message or [], prompts_file)
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
    )
    with StartupView() as view:
        path = resolve_model(config.model.model, config.model.revision, view.phase)
        prepare_backend(config.engine.device, config.engine.backend, view.phase)
        run_generate(config, path, prompts, params, view, as_json=as_json)


@app.command()
@config_command("model", "engine")
def batch(
    config: Config,
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="Requests in OpenAI's batch format.")],
    output: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Where the answers go.")],
    url: Annotated[
        str | None, typer.Option(help="Ask this server; none given: an engine of the batch's own.")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Lines under way at once, per engine; none given: what it takes."),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Engines on Ray, at most; none given: one, in this process.")
    ] = None,
    min_replicas: Annotated[
        int | None, typer.Option(min=1, help="Engines at the least; none given: as many as at most.")
    ] = None,
    ordered: Annotated[bool, typer.Option("--ordered", help="Answers in the order of the lines.")] = False,
    grace_s: Annotated[
        float, typer.Option(min=0.0, help="How long lines under way may finish after SIGTERM.")
    ] = 2.0,
) -> None:
    """Answer a file of requests; run it again after a crash and it goes on where it was."""
    from .batch.command import BatchOptions, run_command

    if min_replicas is not None and (replicas is None or min_replicas > replicas):
        raise ConfigError("--min-replicas must be at most --replicas; give both")
    if url is not None and replicas is not None:
        raise ConfigError("--url and --replicas exclude each other; leave one out")
    if url is None:
        from .ray_session import set_environment

        set_environment()  # Ray reads it when it is imported
    options = BatchOptions(
        source=source,
        output=output,
        url=url,
        concurrency=concurrency,
        num_replicas=replicas,
        min_replicas=min_replicas,
        is_ordered=ordered,
        grace_s=grace_s,
    )
    raise typer.Exit(run_command(config, options))


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="One of the server's models; none: its first.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens per answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="None: the server's default.")] = None,
) -> None:
    """Talk to a server in the terminal."""
    from .chat import run_chat

    run_chat(url, model=model, system=system, max_tokens=max_tokens, temperature=temperature)


@app.command()
@config_command("model", "engine", "server")
def doctor(config: Config) -> None:
    """Say what is installed, what fits, and what would keep `serve` from working."""
    from .doctor import run_doctor

    raise typer.Exit(0 if run_doctor(config) else 1)


@app.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML file of `serve deploy`.")],
) -> None:
    """Check a Ray Serve configuration FILE, down to its last key, before it is deployed."""
    from .serve_config import read_serve_config

    for config in read_serve_config(file):
        print(f"{file}: fine; {config.model.model} on {config.engine.tensor_parallel_size} rank(s)")


@drafter_app.command()
def swap(
    name: Annotated[
        str, typer.Argument(metavar="DRAFTER", help="none, ngram, a directory, or a Hugging Face id.")
    ],
    address: Annotated[
        str | None, typer.Option(help="Of the Ray cluster; none: that of the server on this machine.")
    ] = None,
) -> None:
    """Let a running server draft with DRAFTER from now on; its streams go on and keep their tokens."""
    from .drafter_swap import swap_drafter

    swap_drafter(name, address)
    print(f"drafting with {name}")
