"""Batches on Ray: replicas that come and go, `ray job submit`, and a stage of Ray Data."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
import ray.data
from batches import answers, command, requests
from front import byte_level, loaded
from ray.util.placement_group import placement_group_table
from tiny import make_checkpoint

from paceline.cluster.config import load_config
from paceline.deploy.batch.job import Totals, run_batch
from paceline.deploy.batch.ray_data import Generate
from paceline.deploy.batch.replicas import ReplicaPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that can be served."""
    path = make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama")
    loaded(byte_level(), path)
    return path


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, dict[str, str]]]:
    """A Ray cluster of this test's own, as `ray start` makes it: the `ray` command and its environment."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    port, dashboard, agent, client = (it.getsockname()[1] for it in sockets)
    for it in sockets:
        it.close()
    folder = tempfile.mkdtemp(prefix="pl-ray-", dir="/tmp")  # unix sockets must have short names
    ray_command = str(Path(sys.executable).with_name("ray"))
    argv = [
        *(ray_command, "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--temp-dir={folder}"),
        *(f"--port={port}", "--include-dashboard=true", f"--dashboard-port={dashboard}", "--num-cpus=8"),
        *(f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}"),
        "--object-store-memory=134217728",
    ]
    environ = {**os.environ, "RAY_ADDRESS": f"http://127.0.0.1:{dashboard}"}
    head = subprocess.Popen(
        argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 120
        listing = [ray_command, "job", "list"]
        while subprocess.run(listing, env=environ, capture_output=True, check=False).returncode != 0:
            assert head.poll() is None
            assert time.monotonic() < deadline
        yield ray_command, environ
    finally:
        family = [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]
        for process in family:
            process.terminate()
        for process in psutil.wait_procs(family, timeout=20)[1]:
            process.kill()
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)


def test_a_job_on_a_cluster(tmp_path: Path, model: Path, cluster: tuple[str, dict[str, str]]) -> None:
    ray_command, environ = cluster
    source, output = requests(tmp_path / "in.jsonl", 400, model.name), tmp_path / "out.jsonl"
    engine = [str(model), "--dtype", "float32", "--num-threads", 1, "--kv-cache-gib", 0.1, "--ordered"]
    replicas = ["--replicas", 2, "--min-replicas", 1]
    submit = [ray_command, "job", "submit", "--", *command(source, output, *engine, *replicas)]
    done = subprocess.run(submit, env=environ, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "400 of 400 lines (100%)" in done.stdout
    assert list(answers(output)) == [f"id-{i}" for i in range(400)]


async def test_a_replica_that_dies_is_replaced_and_costs_no_line(
    tmp_path: Path, model: Path, ray_local: None
) -> None:
    del ray_local
    source = requests(tmp_path / "in.jsonl", 600, model.name)
    flags = {"model": str(model), "dtype": "float32", "num_threads": 1, "kv_cache_gib": 0.05}
    pool = ReplicaPool(load_config(flags=flags, environ={}), num_min=1, num_max=2, num_slots=8)
    killed: list[int] = []

    def kill_once(totals: Totals) -> None:
        if totals.num_completed > 100 and not killed:
            killed.append(totals.num_completed)
            ray.kill(pool._members[0].actor)

    async with pool.running() as answer:
        totals = await run_batch(source, tmp_path / "out", answer, concurrency=16, progress=kill_once)
    assert killed
    assert totals.is_complete
    assert set(answers(tmp_path / "out" / "output.jsonl")) == {f"id-{i}" for i in range(600)}
    assert not [group for group in placement_group_table().values() if group["state"] == "CREATED"]


@pytest.mark.filterwarnings("ignore")  # Ray Data's own, about its progress bars and resources
def test_a_stage_of_ray_data(ray_local: None, model: Path) -> None:
    del ray_local
    rows = [{"id": i, "prompt": f"the fox {i}"} for i in range(40)] + [{"id": 40, "prompt": "x" * 5000}]
    options = {
        "model": str(model), "dtype": "float32", "num_threads": 1, "kv_cache_gib": 0.05,
        "sampling": {"max_tokens": 4, "seed": 1},
    }  # fmt: skip
    answered = ray.data.from_items(rows).map_batches(
        Generate, fn_constructor_kwargs=options, batch_size=16, num_cpus=0.1, concurrency=1
    )
    by_id = {row["id"]: row for row in answered.take_all()}
    assert set(by_id) == set(range(41))
    assert all(not row["error"] and row["completion_tokens"] for key, row in by_id.items() if key < 40)
    assert "tokens" in by_id[40]["error"]
    assert by_id[3]["completion_tokens"] <= 4
