"""The configuration as command line options: every field of `cluster/config.py` becomes a flag.

Nothing is decided here. An option that is not given stays None, so that `load_config` can look in the
environment, the file and the defaults, in that order.
"""

import functools
import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import typer

from ..cluster.config import SECTIONS, Config, load_config
from ..cluster.errors import ConfigError

HELP = {
    "model": "'default', a Hugging Face id, a directory, or a .gguf file",
    "revision": "branch, tag or commit of a Hugging Face id",
    "served_model_name": "what requests call the model",
    "dtype": "precision of weights and activations",
    "max_model_len": "tokens per sequence, prompt and output together",
    "tool_call_parser": "how the model writes calls of tools; auto: as its chat template tells",
    "reasoning_parser": "think: thoughts between <think> tags are told apart; auto: as its template tells",
    "tensor_parallel_size": "ranks that share the model",
    "device": "where the ranks compute",
    "backend": "kernels on CPU: ours where they are the fastest, else torch's (auto), or only the ones named",
    "num_threads": "CPU threads per rank",
    "max_num_seqs": "sequences in one step",
    "max_num_batched_tokens": "rows in one step, prefill and decode together",
    "max_queued_requests": "waiting requests, beyond which one is answered 429",
    "page_size": "tokens per page of K/V",
    "kv_cache_gib": "memory for K/V, over all ranks",
    "gpu_memory_utilization": "share of each GPU that may be filled",
    "gpus_per_node": "GPUs of a node; none given: the most that a node of the cluster has",
    "aging_s": "waiting this long is worth one step of priority",
    "prefix_cache": "keep K/V of prefixes and share them between requests",
    "drafter": "what proposes tokens: default (the model's own, else ngram), none, ngram (prompt lookup), "
    "a directory, or a Hugging Face id",
    "num_draft_tokens": "tokens proposed per step and sequence, at most; none given: what the drafter makes",
    "prompt_lookup": "beside a drafter with weights also copy from the text so far where that promises more",
    "min_draft_tokens": "tokens verified per step and sequence even if the budget says fewer",
    "draft_budget": "propose and verify only as many tokens as make it faster",
    "itl_target_ms": "milliseconds between two tokens that reading prompts should not exceed",
    "context_cap": "tokens of context per sequence in the drafter; 0: no cap",
    "drafter_cache_gib": "memory for the drafter's contexts, per rank",
    "draft_deadline_s": "after this long without an answer steps go on without a drafter",
    "step_deadline_s": "after this long without an answer a rank counts as hung",
    "start_timeout_s": "how long the ranks may take to be ready",
    "check_invariants": "check the scheduler's state after every event",
    "host": "address to listen on; 0.0.0.0 for all",
    "port": "port to listen on",
    "grpc_port": "port for gRPC, on the same address; none given: no gRPC",
    "drain_s": "how long streams may finish when the server stops",
    "max_body_bytes": "largest request body",
    "per_request_speculation_metrics": "what an answer tells of its drafts unless the request says",
    "abandoned_s": "a stream that its client does not read for so long is ended",
    "playground": "serve a page to chat on at /",
    "max_stream_backlog": "unread tokens after which a slow reader's request ends",
    "log_level": "least severe log line that is written",
    "log_format": "log lines for people, or as JSON",
    "otlp_endpoint": "send OpenTelemetry spans there, as http://host:4318; none given: no tracing",
    "trace_sample_ratio": "share of requests that are traced unless their caller decided it",
    "api_key_file": "file of API keys, one a line: KEY, or NAME KEY and limits; PACELINE_API_KEYS holds more",
    "cors_origin": "origins whose web pages may ask the server, with commas between them",
    "tls_cert": "certificate chain in PEM, for HTTPS",
    "tls_key": "private key of the certificate, in PEM",
    "admin_port": "port for operators, who need a key of PACELINE_ADMIN_KEYS",
    "admin_host": "address of the admin port",
    "batch_dir": "folder for the files of /v1/files and /v1/batches, which are not served without one",
    "max_file_bytes": "largest file of /v1/files",
    "batch_concurrency": "requests of batches under way at once",
}


def config_command(*sections: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command that takes `config: Config` the options of `sections`, a MODEL argument and `--config`.

    A function `f(config, own, ...)` becomes `f(own, ..., model, --config, --tensor-parallel-size, ...)`, in
    the form typer reads.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = [p for name, p in inspect.signature(command).parameters.items() if name != "config"]
        added = [_model_argument(), _file_option(), *_section_options(sections)]
        names = [parameter.name for parameter in added]

        @functools.wraps(command)
        def run(**values: Any) -> Any:
            given = {name: values.pop(name) for name in names}
            return command(config=_load(given), **values)

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in [*own, *added]]
        run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _load(given: dict[str, Any]) -> Config:
    positional, file = given.pop("model_argument"), given.pop("config_file")
    named = given.pop("model", None)
    if positional is not None and named is not None and positional != named:
        raise ConfigError(f"two models are given, {positional!r} and {named!r}; leave one out")
    return load_config(flags={**given, "model": positional or named}, file=file)


def _model_argument() -> inspect.Parameter:
    annotation = Annotated[str | None, typer.Argument(metavar="MODEL", help=HELP["model"])]
    return _parameter("model_argument", annotation)


def _file_option() -> inspect.Parameter:
    text = "TOML file with tables named model, engine and server"
    return _parameter("config_file", Annotated[Path | None, typer.Option("--config", help=text)])


def _section_options(sections: tuple[str, ...]) -> list[inspect.Parameter]:
    return [
        _parameter(field.name, _annotation(field, panel=f"{section.capitalize()} options"))
        for section in sections
        for field in msgspec.structs.fields(SECTIONS[section])
    ]


def _annotation(field: msgspec.structs.FieldInfo, panel: str) -> Any:
    name = field.name.replace("_", "-")
    flag = f"--{name}/--no-{name}" if field.default is True else f"--{name}"
    text = HELP[field.name] + (f" (default: {field.default})" if field.default is not None else "")
    return Annotated[_plain_kind(field.type) | None, typer.Option(flag, help=text, rich_help_panel=panel)]


def _plain_kind(kind: Any) -> Any:
    """What the command line parses: the type without None."""
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (arm for arm in get_args(kind) if arm is not type(None))
    assert get_origin(kind) is Literal or kind in (str, int, float, bool), kind
    return kind


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
