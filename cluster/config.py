"""Configuration: one source of defaults for file, environment and command line; frozen once built.

Precedence: flags, then `PACELINE_*` variables, then the TOML file, then the defaults written here. Option
names are unique over all sections, so a flag (`--max-num-seqs`) and a variable (`PACELINE_MAX_NUM_SEQS`) need
no prefix.
"""

import difflib
import math
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from .choices import BackendChoice, Device, Dtype
from .errors import ConfigError

ToolCallParser = Literal["auto", "none", "hermes", "llama3_json", "pythonic", "mistral"]
ReasoningParser = Literal["auto", "none", "think"]
ReportLevel = Literal["none", "summary", "detailed"]

# Variables that are read elsewhere: a place, and secrets, which are no options.
_NO_OPTIONS = {"PACELINE_CACHE", "PACELINE_API_KEY", "PACELINE_API_KEYS", "PACELINE_ADMIN_KEYS"}

DEFAULT_MODEL = "default"
BUILT_IN_DRAFTERS = ("default", "none", "ngram")  # names that are no path and no id


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which weights are served, and in what precision."""

    model: str = DEFAULT_MODEL  # "default", a Hugging Face id, a directory, or a .gguf file
    revision: str | None = None  # of a Hugging Face id
    served_model_name: str | None = None  # the `model` of requests; None: derived from `model`
    dtype: Dtype = "bfloat16"
    max_model_len: int | None = None  # tokens per sequence; None: what the model was trained for
    tool_call_parser: ToolCallParser = "auto"  # how it writes calls of tools; "auto": its template tells
    reasoning_parser: ReasoningParser = "auto"  # whether it thinks between tags; "auto": its template tells


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The engine: ranks, batches, pages."""

    tensor_parallel_size: int = 1
    device: Device = "auto"
    backend: BackendChoice = "auto"  # kernels on CPU: our own where they are the fastest, else torch's
    num_threads: int | None = None  # per rank on CPU; None: the machine's cores shared out
    max_num_seqs: int = 32  # sequences in one step
    max_num_batched_tokens: int = 512  # rows in one step
    max_queued_requests: int = 256  # waiting; beyond it a request is answered 429
    page_size: int = 16  # tokens per page of K/V
    kv_cache_gib: float | None = None  # over all ranks; None: 1 GiB on CPU, measured free memory on GPU
    gpu_memory_utilization: float = 0.9
    gpus_per_node: int | None = None  # None: the most that a node has now; say it where nodes come and go
    aging_s: float = 30.0  # waiting this long is worth one step of priority
    prefix_cache: bool = True  # K/V pages of known prefixes are kept and shared
    drafter: str = "default"  # "default" (the model's own, else n-gram), "none", "ngram", a directory, an id
    num_draft_tokens: int | None = None  # per step and sequence; None: the most the drafter makes
    prompt_lookup: bool = True  # beside a drafter with weights: used where it promises more
    min_draft_tokens: int = 0  # verified per step and sequence even if the budget would not
    draft_budget: bool = True  # verify drafts only as far as that pays; False: always all there are
    itl_target_ms: float | None = None  # between tokens, kept by reading prompts in smaller parts
    context_cap: int = 16384  # tokens of context per sequence in the drafter; 0: no cap
    drafter_cache_gib: float | None = None  # per shard; None: what the target's K/V leaves for it
    draft_deadline_s: float = 5.0  # after which a step goes on without a silent shard
    step_deadline_s: float = 60.0
    start_timeout_s: float = 600.0
    check_invariants: bool = False  # run check() after every event

    @property
    def needs_step_costs(self) -> bool:
        """Whether the scheduler decides anything by what a step costs."""
        return self.itl_target_ms is not None or (self.draft_budget and self.drafter != "none")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The front door."""

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None  # None: no gRPC
    drain_s: float = 20.0  # how long a replica may finish its streams when it is asked to stop
    max_body_bytes: int = 4 << 20
    per_request_speculation_metrics: ReportLevel = "none"  # what an answer tells of its drafts
    abandoned_s: float = 30.0  # a stream that its client does not read for so long is ended
    playground: bool = True  # a page to look at, at /
    max_stream_backlog: int = 4096  # undelivered tokens after which a slow reader's request is ended
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    otlp_endpoint: str | None = None  # OpenTelemetry over HTTP, as http://host:4318; None: no tracing
    trace_sample_ratio: float = 1.0  # of requests whose caller has not decided it
    api_key_file: str | None = None  # who may ask; see deploy/api/keys.py. None, and no variable: everyone
    cors_origin: str | None = None  # web pages of these origins may ask; several with commas between them
    tls_cert: str | None = None  # certificate chain in PEM; with tls_key the server speaks HTTPS
    tls_key: str | None = None
    admin_port: int | None = None  # of each replica, for whoever has an admin key; None: none
    admin_host: str = "127.0.0.1"
    batch_dir: str | None = None  # where /v1/files and /v1/batches keep their files; None: not served
    max_file_bytes: int = 200 << 20  # of one file in batch_dir
    batch_concurrency: int = 16  # requests of batches that are under way at once


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is decided before a process starts."""

    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "model": ModelConfig,
    "engine": EngineConfig,
    "server": ServerConfig,
}
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.\[\]:-]+")
_SECTION_OF = {
    field.name: section for section, kind in SECTIONS.items() for field in msgspec.structs.fields(kind)
}


def load_config(
    *,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Config:
    """Build the configuration; a flag whose value is None counts as not given.

    Raises ConfigError for an unknown key (naming the nearest), a value of the wrong type, or a contradiction.
    """
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    if file is not None:
        _merge_file(values, file)
    _merge_environ(values, os.environ if environ is None else environ)
    for name, value in (flags or {}).items():
        if value is not None:
            values[_section_of(name, "option")][name] = value
    try:
        config = msgspec.convert(values, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"configuration: {error}") from None
    _validate(config)
    return config


def _merge_file(values: dict[str, dict[str, Any]], file: Path) -> None:
    try:
        document = tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"configuration file {file} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {file} is not TOML: {error}") from None
    for section, table in document.items():
        if section not in SECTIONS:
            raise ConfigError(f"{file}: unknown section [{section}]{nearest(section, SECTIONS)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{file}: [{section}] must be a table of options")
        known = [field.name for field in msgspec.structs.fields(SECTIONS[section])]
        for name, value in cast(dict[str, Any], table).items():
            if name not in known:
                raise ConfigError(f"{file}: unknown option {name!r} in [{section}]{nearest(name, known)}")
            values[section][name] = value


def _merge_environ(values: dict[str, dict[str, Any]], environ: Mapping[str, str]) -> None:
    for variable, text in environ.items():
        if not variable.startswith("PACELINE_") or variable in _NO_OPTIONS:
            continue
        name = variable.removeprefix("PACELINE_").lower()
        section = _section_of(name, f"variable {variable}:")
        kind = next(f.type for f in msgspec.structs.fields(SECTIONS[section]) if f.name == name)
        try:
            values[section][name] = msgspec.convert(text, kind, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"variable {variable}={text!r}: {error}") from None


def _section_of(name: str, what: str) -> str:
    if name not in _SECTION_OF:
        raise ConfigError(f"{what} {name!r} is unknown{nearest(name, _SECTION_OF)}")
    return _SECTION_OF[name]


def nearest(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """The end of a message that refuses `name`: the known name it resembles, else all of them."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else f"; known are {', '.join(sorted(known))}"


def _validate(config: Config) -> None:
    engine, server, model = config.engine, config.server, config.model
    for name, value in (
        ("tensor_parallel_size", engine.tensor_parallel_size),
        ("max_num_seqs", engine.max_num_seqs),
        ("max_queued_requests", engine.max_queued_requests),
        ("num_threads", engine.num_threads),
        ("gpus_per_node", engine.gpus_per_node),
        ("max_model_len", model.max_model_len),
        ("max_body_bytes", server.max_body_bytes),
        ("max_stream_backlog", server.max_stream_backlog),
        ("abandoned_s", server.abandoned_s),
        ("max_file_bytes", server.max_file_bytes),
        ("batch_concurrency", server.batch_concurrency),
        ("step_deadline_s", engine.step_deadline_s),
        ("start_timeout_s", engine.start_timeout_s),
        ("aging_s", engine.aging_s),
        ("kv_cache_gib", engine.kv_cache_gib),
        ("num_draft_tokens", engine.num_draft_tokens),
        ("drafter_cache_gib", engine.drafter_cache_gib),
        ("draft_deadline_s", engine.draft_deadline_s),
        ("itl_target_ms", engine.itl_target_ms),
    ):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} is {value}; it must be above 0, and finite")
    if engine.page_size not in (8, 16, 32, 64, 128):
        raise ConfigError(f"page_size is {engine.page_size}; choose 8, 16, 32, 64 or 128")
    if engine.max_num_batched_tokens < engine.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({engine.max_num_batched_tokens}) is below max_num_seqs "
            f"({engine.max_num_seqs}): each sequence needs a row; raise the first or lower the second"
        )
    if engine.context_cap != 0 and engine.context_cap < engine.page_size:
        raise ConfigError(
            f"context_cap is {engine.context_cap}; it must be 0 (no cap) or at least a page of "
            f"{engine.page_size} tokens"
        )
    most_drafts = math.inf if engine.num_draft_tokens is None else engine.num_draft_tokens
    if not 0 <= engine.min_draft_tokens <= most_drafts:
        raise ConfigError(
            f"min_draft_tokens is {engine.min_draft_tokens}; "
            "it must be at least 0 and at most num_draft_tokens"
        )
    if not engine.drafter:
        raise ConfigError("drafter is empty; write none to serve without one")
    if not 0 < engine.gpu_memory_utilization <= 1:
        raise ConfigError(
            f"gpu_memory_utilization is {engine.gpu_memory_utilization}; it is a share, above 0 and at most 1"
        )
    if not 0 <= server.trace_sample_ratio <= 1:
        raise ConfigError(
            f"trace_sample_ratio is {server.trace_sample_ratio}; it is a share, between 0 and 1"
        )
    if server.otlp_endpoint is not None and not server.otlp_endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"otlp_endpoint is {server.otlp_endpoint!r}; write a URL such as http://127.0.0.1:4318"
        )
    if not 0 <= server.port <= 65535:
        raise ConfigError(f"port is {server.port}; it must be between 0 and 65535")
    if server.grpc_port is not None and not 0 <= server.grpc_port <= 65535:
        raise ConfigError(f"grpc_port is {server.grpc_port}; it must be between 0 and 65535")
    if server.admin_port is not None and not 0 < server.admin_port <= 65535:
        raise ConfigError(f"admin_port is {server.admin_port}; it must be between 1 and 65535")
    if (server.tls_cert is None) != (server.tls_key is None):
        raise ConfigError("tls_cert and tls_key belong together; give both or neither")
    for origin in (server.cors_origin or "").split(","):
        if origin and not _ORIGIN.fullmatch(origin):
            raise ConfigError(f"cors_origin {origin!r} is no origin; write https://HOST or https://HOST:PORT")
