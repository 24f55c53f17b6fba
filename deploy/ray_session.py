"""The Ray that our commands start or join: its environment, its token, and where other commands find it."""

import contextlib
import logging
import math
import os
import secrets
from pathlib import Path

from ..cluster.choices import cache_dir
from ..cluster.config import Config

OBJECT_STORE_BYTES = 128 << 20  # nothing of ours is kept there

log = logging.getLogger(__name__)


def set_environment() -> None:
    """What Ray and Serve read before anything else; whatever the user has set stays."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "RAY_ADDRESS" not in os.environ and os.environ.setdefault("RAY_AUTH_MODE", "token") == "token":
        token_file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
        if not token_file.is_file() and "RAY_AUTH_TOKEN" not in os.environ:
            os.environ["RAY_AUTH_TOKEN_PATH"] = str(_own_token_file())


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


def address_file() -> Path:
    """Where the server that started last on this machine wrote its Ray's address, for other commands."""
    return cache_dir() / "ray_address"


def announce(address: str) -> None:
    """Let `paceline drafter`, `batch` and the like find this Ray."""
    try:
        address_file().parent.mkdir(parents=True, exist_ok=True)
        address_file().write_text(address)
    except OSError as error:  # as in a container whose root is read-only
        log.warning("other commands will need --address %s, for it cannot be noted: %s", address, error)


def retract(address: str) -> None:
    """Take back `announce`."""
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
