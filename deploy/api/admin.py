"""The admin port of a replica: what operators do, with keys of their own. Clients never get near it.

GET    /status    what is served, and whether requests are taken
POST   /drafter   {"drafter": NAME}: draft with another one from now on, as `paceline drafter swap` does
POST   /drain     take no new requests; what has begun goes on. DELETE takes them again
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator
from importlib.metadata import version
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import Field
from starlette.exceptions import HTTPException

from ...cluster.errors import RequestError, UserError
from .bodies import parse_request, read_body
from .errors import answer_error, answer_http_exception, as_request_error
from .front import Front
from .gate import Gate
from .keys import ApiKey, KeyRing
from .openai_protocol import Strict

MAX_BODY_BYTES = 64 << 10

log = logging.getLogger(__name__)


class DrafterRequest(Strict):
    """POST /drafter."""

    drafter: str = Field(min_length=1, max_length=4096)


def create_admin_app(
    front: Front,
    keys: Iterable[ApiKey],
    swap_drafter: Callable[[str], Awaitable[None]],
    num_streams: Callable[[], int],
) -> FastAPI:
    """The application behind the admin port, for the holders of admin keys among `keys`."""
    ring = KeyRing(key for key in keys if key.is_admin)
    assert not ring.is_open, "the configuration was checked"
    app = FastAPI(title="Paceline, for operators", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(RequestError, answer_error)
    app.add_exception_handler(HTTPException, answer_http_exception)
    app.add_exception_handler(Exception, answer_error)
    app.add_middleware(Gate, ring=ring)

    def status() -> dict[str, Any]:
        return {
            "version": version("paceline"),
            "model": front.served.name,
            "is_serving": front.is_serving(),
            "is_draining": front.drain.is_on,
            "num_streams": num_streams(),
        }

    @app.get("/status")
    async def show_status() -> JSONResponse:
        return JSONResponse(status())

    @app.post("/drafter")
    async def change_drafter(request: Request) -> JSONResponse:
        name = parse_request(DrafterRequest, await read_body(request, MAX_BODY_BYTES)).drafter
        try:
            await swap_drafter(name)
        except RequestError:
            raise
        except UserError as error:
            raise RequestError(str(error), code="drafter_refused", param="drafter") from None
        except Exception as error:
            raise as_request_error(error) from None
        return JSONResponse({"drafter": name})

    @app.post("/drain")
    async def drain() -> JSONResponse:
        front.drain.is_on = True
        log.warning("draining: new requests are refused")
        return JSONResponse(status())

    @app.delete("/drain")
    async def take_again() -> JSONResponse:
        front.drain.is_on = False
        log.warning("no longer draining")
        return JSONResponse(status())

    return app


class AdminPort:
    """A socket in this event loop, which `app` answers."""

    def __init__(self, app: FastAPI, host: str, port: int) -> None:
        """Raises OSError when the port is taken."""
        self._socket = socket.create_server((host, port), family=_family(host))
        self._server = _Server(uvicorn.Config(app, log_config=None, lifespan="off", access_log=False))
        self._task = asyncio.create_task(self._server.serve([self._socket]), name="admin port")

    async def close(self) -> None:
        self._server.should_exit = True
        await self._task
        self._socket.close()


class _Server(uvicorn.Server):
    """Leaves signals to the process it is a guest in."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
