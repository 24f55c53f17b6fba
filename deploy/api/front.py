"""What a front door knows about the engine behind it and the model it serves."""

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...cluster.config import DEFAULT_MODEL, Config, ModelConfig, ServerConfig
from ...workers.runner import max_model_len
from ...workers.spec import ModelSpec
from ..engine import Engine
from ..grammars import GrammarCheck, GrammarCompiler
from ..metrics import Metrics, merged
from ..tracing import Tracer
from .batch_jobs import BatchJobs
from .conversation import ChatFormat
from .drain import Drain
from .file_store import FileStore
from .keys import ApiKey, KeyRing
from .streaming import TokenSource
from .text import Tokenizer
from .validate import ServedModel

log = logging.getLogger(__name__)

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDoor:
    """What /v1/files and /v1/batches need."""

    store: FileStore
    jobs: BatchJobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """What the routes need."""

    source: TokenSource
    check_health: Callable[[], None]  # raises EngineError
    served: ServedModel
    metrics: Metrics
    max_body_bytes: int
    abandoned_s: float = 30.0  # a stream that is not read for so long ends
    tracer: Tracer | None = None
    has_page: bool = True  # the playground at /
    render_all: Callable[[], Awaitable[Sequence[bytes]]] | None = None  # the metrics of every replica
    is_serving: Callable[[], bool] = lambda: True
    keys: KeyRing = field(default_factory=KeyRing)  # whom the gate lets in; without any, everyone
    cors_origins: tuple[str, ...] = ()
    batches: BatchDoor | None = None
    drain: Drain = field(default_factory=Drain)
    start_soon: Callable[[], None] = lambda: None  # what the first requests would wait for
    started: int = field(default_factory=lambda: int(time.time()))

    async def render_metrics(self) -> bytes:
        """The metrics of all replicas, whichever of them was asked; of this one if the others are silent."""
        if self.render_all is None:
            return self.metrics.render()
        try:
            return merged(await self.render_all())
        except Exception as error:  # whatever keeps Serve from reaching them, ours are still true
            log.warning("the other replicas' metrics are missing: %s", error)
            return self.metrics.render()


def front_of(config: Config, path: Path, engine: Engine, replica: str, keys: Iterable[ApiKey] = ()) -> Front:
    """What the HTTP application needs to know about an engine that serves the model in `path`.

    Without `keys` everyone may ask: for applications that no socket leads to.
    """
    spec = ModelSpec.load(path)
    name = served_name(config.model)
    tokenizer = Tokenizer.load(path)
    served = ServedModel(
        name=name,
        tokenizer=tokenizer,
        chat_format=ChatFormat.of(tokenizer, config.model),
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len(spec, config.model.max_model_len),
        eos_token_ids=spec.eos_token_ids,
        report=config.server.per_request_speculation_metrics,
    )
    compiler = GrammarCompiler(path, spec.vocab_size, spec.eos_token_ids)
    return Front(
        source=GrammarCheck(engine, compiler),
        start_soon=compiler.start_soon,
        check_health=engine.check_health,
        served=served,
        metrics=Metrics(
            name,
            replica,
            lambda: engine.stats,
            num_rebuilds=lambda: engine.num_rebuilds,
            cache_config=_cache_config(config),
        ),
        max_body_bytes=config.server.max_body_bytes,
        abandoned_s=config.server.abandoned_s,
        tracer=_tracer(config, name, replica),
        has_page=config.server.playground,
        is_serving=lambda: engine.is_serving,
        keys=KeyRing(key for key in keys if not key.is_admin),
        batches=_batch_door(config.server),
        cors_origins=tuple(filter(None, (config.server.cors_origin or "").split(","))),
    )


def _cache_config(config: Config) -> dict[str, str]:
    return {
        "block_size": str(config.engine.page_size),
        "cache_dtype": config.model.dtype,
        "enable_prefix_caching": str(config.engine.prefix_cache),
        "gpu_memory_utilization": str(config.engine.gpu_memory_utilization),
    }


def _tracer(config: Config, model_name: str, replica: str) -> Tracer | None:
    server = config.server
    if server.otlp_endpoint is None:
        return None
    return Tracer.to(server.otlp_endpoint, server.trace_sample_ratio, model_name, replica)


def _batch_door(server: ServerConfig) -> BatchDoor | None:
    if server.batch_dir is None:
        return None
    store = FileStore(Path(server.batch_dir).expanduser(), server.max_file_bytes)
    return BatchDoor(store=store, jobs=BatchJobs(store, server.batch_concurrency))


def served_name(model: ModelConfig) -> str:
    """The `model` of requests: what was configured, else the id, or the last part of a path."""
    if model.served_model_name is not None:
        return model.served_model_name
    if model.model == DEFAULT_MODEL:
        return DEFAULT_MODEL_NAME
    path = Path(model.model)
    if path.suffix == ".gguf":
        return path.stem
    return path.resolve().name if path.is_dir() else model.model
