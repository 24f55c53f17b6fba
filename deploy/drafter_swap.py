"""`paceline drafter swap`: another drafter for a server that runs, through its Serve handle."""

import logging
import os
from pathlib import Path

from ..cluster.errors import ConfigError, EngineError, PacelineError
from .ray_session import address_file, set_environment
from .serve import APP_NAME

SWAP_TIMEOUT_S = 900.0  # a download and a load; the server itself gives up earlier


def swap_drafter(name: str, address: str | None) -> None:
    """Have the server in the Ray cluster at `address`, or on this machine, draft with `name`.

    Raises UserError for a drafter that the server refuses; it then goes on with the one it has.
    """
    if address is None:
        set_environment()
        address = _address_here()
    import ray  # reads the environment when it is imported
    from ray import serve
    from ray.exceptions import RayTaskError
    from ray.serve.exceptions import RayServeException

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    path = Path(name).expanduser()
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no Ray answers at {address} ({_first_line(error)}); start paceline serve, or give --address"
        ) from None
    try:
        handle = serve.get_app_handle(APP_NAME)
        wanted = str(path.resolve()) if path.is_dir() else name
        handle.swap_drafter.remote(wanted).result(timeout_s=SWAP_TIMEOUT_S)
    except RayServeException as error:
        raise ConfigError(
            f"no paceline server runs in this Ray ({_first_line(error)}); start paceline serve"
        ) from None
    except RayTaskError as error:
        if isinstance(error.cause, PacelineError):
            raise error.cause from None
        raise
    except TimeoutError:
        raise EngineError(f"the server did not answer within {SWAP_TIMEOUT_S:.0f} s") from None
    finally:
        ray.shutdown()


def _address_here() -> str:
    """RAY_ADDRESS, or the Ray of the server that started last on this machine."""
    if "RAY_ADDRESS" in os.environ:
        return os.environ["RAY_ADDRESS"]
    try:
        return address_file().read_text()
    except FileNotFoundError:
        raise ConfigError("no server runs on this machine; start paceline serve, or give --address") from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
