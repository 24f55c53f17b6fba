"""The real application over a scripted engine: one for a test file, as each of its tests found it."""

from collections.abc import Iterator

import httpx
import pytest
from front import ScriptedEngine, listening, scripted_front


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ScriptedEngine]]:
    """Its address, and the engine behind it."""
    front, engine = scripted_front(tmp_path_factory.mktemp("model"))
    with listening(front) as url:
        yield url, engine


@pytest.fixture
def engine(served: tuple[str, ScriptedEngine]) -> Iterator[ScriptedEngine]:
    before = dict(served[1].__dict__)
    yield served[1]
    served[1].__dict__.update(before)
    served[1].cancelled.clear()


@pytest.fixture
def http(served: tuple[str, ScriptedEngine]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served[0], trust_env=False) as it:
        yield it
