"""The Serve deployment: one replica is one engine, its HTTP application and its gRPC methods.

`build_app` is an `import_path` for `serve deploy`; its arguments are the options of `cluster/config.py`.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application

from ..cluster.config import Config, load_config
from ..cluster.model_source import resolve_model
from ..cluster.placement import REPLICA_CPUS, bundles, rank_device, strategy_for
from .api.admin import AdminPort, create_admin_app
from .api.app import create_app
from .api.front import front_of
from .api.keys import ApiKey, load_keys, require_admin_key
from .assemble import start_engine
from .drafter_source import choose_drafter, with_drafter
from .grpc.service import GrpcMethods
from .logs import configure_logging

DEPLOYMENT_NAME = "paceline"

HEALTH_PERIOD_S = 5.0
HEALTH_TIMEOUT_S = 15.0
SPARE_REQUESTS = 64  # above what the engine takes, so that the engine's own 429 answers, not Serve's queue
BROADCAST_TIMEOUT_S = 5.0  # for the replicas that a scrape or an abort was not handed to
CLOSE_S = 10.0  # for the engine's processes, after the streams have ended

log = logging.getLogger(__name__)


class Server(GrpcMethods):
    """Owns an engine. Its children live in the replica's placement group and die with it."""

    async def __init__(self, config: Config, keys: tuple[ApiKey, ...] = ()) -> None:
        configure_logging(config.server.log_level, config.server.log_format)
        path = await asyncio.to_thread(resolve_model, config.model.model, config.model.revision)
        self._config, self._path = config, path
        self._engine = await start_engine(config, path)
        replica = serve.get_replica_context().replica_id.unique_id
        front = replace(front_of(config, path, self._engine, replica, keys), render_all=self._render_all)
        front.start_soon()
        self._front = front
        self._app = create_app(front)
        if front.batches is not None:
            front.batches.jobs.start(self._app)
        self.open_grpc(front, abort_elsewhere=self._abort_elsewhere)
        self._admin = self._open_admin(keys)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    async def check_health(self) -> None:
        """Raises when the engine makes no progress; Serve then replaces the replica."""
        self._engine.check_health()

    async def swap_drafter(self, name: str) -> None:
        """For the handle: draft with `name` from now on, as in `--drafter`; UserError if it does not fit."""
        config = with_drafter(self._config, name)
        await self._engine.swap_drafter(await asyncio.to_thread(choose_drafter, config, self._path))

    def _open_admin(self, keys: tuple[ApiKey, ...]) -> AdminPort | None:
        server = self._config.server
        if server.admin_port is None:
            return None
        app = create_admin_app(self._front, keys, self.swap_drafter, lambda: self._engine.num_streams)
        try:
            return AdminPort(app, server.admin_host, server.admin_port)
        except OSError as error:  # most likely of another replica on this node: no reason not to serve
            log.warning("no admin port at %s:%d: %s", server.admin_host, server.admin_port, error)
            return None

    async def render_metrics(self) -> bytes:
        """For the handle: what this replica counts."""
        return self._front.metrics.render()

    async def _render_all(self) -> Sequence[bytes]:
        # The ingress hands a scrape to any replica, so each must be able to answer for all.
        return await self._broadcast("render_metrics")

    async def _abort_elsewhere(self, caller: str, request_id: str) -> Sequence[bool]:
        return await self._broadcast("abort_request", caller, request_id)

    async def _broadcast(self, method: str, *args: Any) -> Sequence[Any]:
        """What every replica answers."""
        context = serve.get_replica_context()
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        return await asyncio.to_thread(handle.broadcast(method, *args).results, timeout_s=BROADCAST_TIMEOUT_S)

    async def __del__(self) -> None:
        # Serve calls this after the last stream has ended, or when `drain_s` is over.
        if self._front.batches is not None:
            await self._front.batches.jobs.close()
        if self._admin is not None:
            await self._admin.close()
        await self._engine.close()
        if self._front.tracer is not None:
            await asyncio.to_thread(self._front.tracer.close)


def build_app(args: dict[str, Any]) -> Application:
    """The application of a Serve configuration file: `import_path: paceline.deploy.replica:build_app`."""
    return application(load_config(flags=args))


def application(config: Config) -> Application:
    """The application for a configuration; Ray must be connected, since "auto" looks at its devices."""
    engine = config.engine
    device = rank_device(engine)
    deployment = serve.deployment(
        name=DEPLOYMENT_NAME,
        ray_actor_options={"num_cpus": REPLICA_CPUS},
        placement_group_bundles=bundles(engine.tensor_parallel_size, device),
        placement_group_strategy=strategy_for(engine, device),
        max_ongoing_requests=engine.max_num_seqs + engine.max_queued_requests + SPARE_REQUESTS,
        max_constructor_retry_count=1,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=config.server.drain_s + CLOSE_S,
        logging_config={"log_level": config.server.log_level.upper(), "enable_access_log": False},
    )
    keys = load_keys(config.server.api_key_file, os.environ)
    if config.server.admin_port is not None:
        require_admin_key(keys)
    return deployment(serve.ingress()(Server)).bind(config, keys)
