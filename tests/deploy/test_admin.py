"""The admin port: keys of its own, status, another drafter, draining."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from front import MODEL, scripted_front

from paceline.cluster.errors import ConfigError, EngineError, ModelError
from paceline.deploy.api.admin import AdminPort, create_admin_app
from paceline.deploy.api.front import Front
from paceline.deploy.api.keys import load_keys, require_admin_key

ENVIRON = {"PACELINE_API_KEYS": "alice sk-alices-key", "PACELINE_ADMIN_KEYS": "ops sk-operators"}


class Operated:
    """A front door's admin port, and the drafters it was told to use."""

    def __init__(self, front: Front, client: httpx.AsyncClient) -> None:
        self.front, self.client = front, client
        self.drafters: list[str] = []

    async def swap(self, name: str) -> None:
        if name == "absent":
            raise ModelError("there is no drafter at absent; give a directory")
        if name == "later":
            raise EngineError("the engine is being rebuilt")
        self.drafters.append(name)


@pytest.fixture
async def operated(tmp_path: Path, unused_tcp_port: int) -> AsyncIterator[Operated]:
    front, _ = scripted_front(tmp_path)
    headers = {"authorization": "Bearer sk-operators"}
    url = f"http://127.0.0.1:{unused_tcp_port}"
    async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False) as client:
        it = Operated(front, client)
        app = create_admin_app(front, load_keys(None, ENVIRON), it.swap, lambda: 3)
        port = AdminPort(app, "127.0.0.1", unused_tcp_port)
        yield it
        await port.close()


async def test_status(operated: Operated) -> None:
    status = (await operated.client.get("/status")).json()

    assert status["model"] == MODEL
    assert (status["is_serving"], status["is_draining"], status["num_streams"]) == (True, False, 3)


async def test_only_admin_keys_open_it(operated: Operated) -> None:
    for key in ("", "Bearer sk-alices-key", "Bearer sk-operatorx"):
        for method, path in (
            ("GET", "/status"),
            ("POST", "/drain"),
            ("POST", "/drafter"),
            ("DELETE", "/drain"),
        ):
            answer = await operated.client.request(method, path, headers={"authorization": key})
            assert answer.status_code == 401, (key, path)
    assert not operated.front.drain.is_on
    assert operated.drafters == []


async def test_another_drafter(operated: Operated) -> None:
    async def swap(**body: object) -> tuple[int, str | None]:
        answer = await operated.client.post("/drafter", json=body)
        return answer.status_code, answer.json().get("error", {}).get("code")

    assert await swap(drafter="ngram") == (200, None)
    assert operated.drafters == ["ngram"]
    assert await swap(drafter="absent") == (400, "drafter_refused")
    assert await swap(drafter="later") == (503, "engine_unavailable")
    assert await swap() == (400, "missing_required_parameter")
    assert await swap(drafter=5) == (400, "invalid_type")


async def test_draining_is_turned_on_and_off(operated: Operated) -> None:
    assert (await operated.client.post("/drain")).json()["is_draining"] is True
    assert operated.front.drain.is_on
    assert (await operated.client.delete("/drain")).json()["is_draining"] is False
    assert not operated.front.drain.is_on


async def test_a_taken_port_is_an_os_error(operated: Operated) -> None:
    app = create_admin_app(operated.front, load_keys(None, ENVIRON), operated.swap, lambda: 0)
    port = operated.client.base_url.port
    assert port is not None
    with pytest.raises(OSError, match="in use"):
        AdminPort(app, "127.0.0.1", port)
    await asyncio.sleep(0)


def test_without_an_admin_key_there_is_no_port() -> None:
    with pytest.raises(ConfigError, match="PACELINE_ADMIN_KEYS"):
        require_admin_key(load_keys(None, {"PACELINE_API_KEYS": "alice sk-alices-key"}))
