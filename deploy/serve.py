"""`paceline serve`: a Ray of its own (or the one in RAY_ADDRESS), Serve on it, and one application.

environment -> Ray -> Serve and its ingress -> replica: engine -> /health answers -> wait for a signal ->
the application drains and is deleted -> our Ray goes, and every process with it
"""

import importlib
import ipaddress
import logging
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from ..cluster import errors
from ..cluster.config import Config, ServerConfig
from ..cluster.errors import ConfigError, EngineError, PacelineError
from .api.front import served_name
from .api.keys import KEYS_VARIABLE, load_keys
from .haproxy import check_tls
from .ingress import grpc_options, http_options, set_ingress_environment, with_ports
from .logs import configure_logging, receive_lines
from .ray_session import announce, retract, set_environment, start_ray
from .startup import StartupView

ANSWER_TIMEOUT_S = 30.0  # from a running replica to the first answer through the ingress

log = logging.getLogger(__name__)

APP_NAME = "paceline"

# As a failure in a replica is quoted by Serve.
_QUOTED_ERROR = re.compile(r"paceline\.cluster\.errors\.(\w+): (.+)")


def run_server(config: Config, view: StartupView | None = None) -> None:
    """Serve until SIGINT or SIGTERM, then finish the streams, for at most `drain_s`, and end every process.

    Raises the UserError or EngineError that kept the replica from starting.
    """
    view = view or StartupView()
    config = with_ports(config)
    check_tls(config.server)
    _warn_if_open(config.server)
    if config.server.tls_cert is not None and "RAY_ADDRESS" in os.environ:
        raise ConfigError(
            "TLS is set up with the Ray that paceline serve starts; in a Ray that runs already (RAY_ADDRESS) "
            "the ingress has begun without it: end TLS in front of it, and leave out --tls-cert and --tls-key"
        )
    with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
        set_environment()
        set_ingress_environment(Path(scratch), config.server)
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
            http_options=http_options(config.server),
            grpc_options=grpc_options(config.server),
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
        announce(ray.get_runtime_context().gcs_address)
        view.done(url, served_name(config.model))
        while True:
            signal.pause()
    except KeyboardInterrupt:
        view.close()
        log.info("stopping: streams may finish for %g s", config.server.drain_s)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if is_deployed:
            retract(ray.get_runtime_context().gcs_address)
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
