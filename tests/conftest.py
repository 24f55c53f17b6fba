"""What every test may use: the default model, and one local Ray for the whole session."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Ray's workers import actors that tests define.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
)
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # hermetic: no token from the user's home
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The directory of the real SmolLM2-135M-Instruct; fetched once into the cache."""
    from paceline.cluster.model_source import resolve_model

    return resolve_model("default")


@pytest.fixture(scope="session")
def ray_local() -> Iterator[None]:
    """A Ray of this machine alone, with more logical CPUs than cores: actors mostly wait."""
    import ray

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()
