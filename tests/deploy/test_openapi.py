"""The OpenAPI document: it names every route, and what it promises holds for whatever is sent."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import schemathesis
from fastapi.routing import APIRoute
from front import listening, scripted_front
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode, checks
from schemathesis.core.result import Ok

from paceline.deploy.api.app import create_app
from paceline.deploy.api.batch_jobs import BatchJobs
from paceline.deploy.api.file_store import FileStore
from paceline.deploy.api.front import BatchDoor
from paceline.deploy.api.openapi import BODIES

SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
NUM_EXAMPLES = 10  # of each route, good and bad


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("model")
    store = FileStore(path / "batches", 1 << 20)
    front, _ = scripted_front(path, batches=BatchDoor(store=store, jobs=BatchJobs(store, 2)))
    with listening(front) as url:
        yield url


def test_every_post_route_has_a_body(tmp_path: Path) -> None:
    front, _ = scripted_front(tmp_path)
    app = create_app(front)
    posts = {
        route.path
        for route in app.routes
        if isinstance(route, APIRoute) and "POST" in (route.methods or ()) and route.include_in_schema
    }

    assert posts <= set(BODIES)


def test_the_document_is_complete(url: str) -> None:
    document = httpx.get(f"{url}/openapi.json", trust_env=False).json()

    assert document["openapi"].startswith("3.1")
    assert {"/v1/responses", "/v1/messages", "/v1/files/{file_id}/content", "/health"} <= set(
        document["paths"]
    )
    assert document["components"]["schemas"]["ChatRequest"]["required"] == ["model", "messages"]
    for operations in document["paths"].values():
        assert all("422" not in operation["responses"] for operation in operations.values())


def test_whatever_is_sent_is_answered_as_documented(url: str) -> None:
    """Schemathesis makes requests, good and bad, from the document: never 5xx, always a documented answer."""
    checks.load_all_checks()
    held = [
        checks.not_a_server_error,
        *(
            checks.CHECKS.get_one(name)
            for name in ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
        ),
    ]
    statuses: set[int] = set()
    for result in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        assert isinstance(result, Ok), result.err()
        operation = result.ok()
        for mode in GenerationMode:

            @settings(
                max_examples=NUM_EXAMPLES,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=[
                    HealthCheck.too_slow,
                    HealthCheck.filter_too_much,
                    HealthCheck.data_too_large,
                ],
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case: schemathesis.Case) -> None:
                response = case.call(timeout=10)
                statuses.add(response.status_code)
                case.validate_response(response, checks=held)

            with contextlib.suppress(Unsatisfiable):  # a GET without parameters has no bad form
                check()
    assert {200, 400, 404} <= statuses
    assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
