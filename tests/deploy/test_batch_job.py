"""Batches as users run them: killed and run again, on Ray, and by `ray job submit` on a cluster."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from front import MODEL, ScriptedEngine, byte_level, listening, loaded, scripted_front
from tiny import make_checkpoint

from paceline.deploy.batch.ray_data import Generate

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that can be served."""
    path = make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama")
    loaded(byte_level(), path)
    return path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, ScriptedEngine]]:
    front, engine = scripted_front(tmp_path)
    with listening(front) as url:
        yield url, engine


def requests(path: Path, num_lines: int, model: str, max_tokens: int = 4) -> Path:
    with path.open("w") as file:
        for i in range(num_lines):
            body: dict[str, Any] = {"model": model, "max_tokens": max_tokens}
            if i % 2:
                url, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": f"the fox {i}"}]
            else:
                url, body["prompt"] = "/v1/completions", f"the fox {i}"
            line = {"custom_id": f"id-{i}", "method": "POST", "url": url, "body": body}
            file.write(json.dumps(line) + "\n")
    return path


def command(source: Path, output: Path, *options: object) -> list[str]:
    return [sys.executable, "-m", "paceline.deploy.batch", str(source), str(output), *map(str, options)]


def answers(output: Path) -> dict[str, str]:
    """Text by custom_id; each id stands in the file once."""
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert max(Counter(line["custom_id"] for line in lines).values()) == 1
    choices = [line["response"]["body"]["choices"][0] for line in lines]
    texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]
    return {line["custom_id"]: text for line, text in zip(lines, texts, strict=True)}


def killed_at(argv: list[str], parts: Path, num_done: int) -> None:
    """Run until so many lines are durable, then kill -9."""
    process = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    try:
        while sum(len(f.read_bytes().splitlines()) for f in parts.glob("segments/*.jsonl")) < num_done:
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()


def test_killed_three_times_it_answers_each_line_once(
    tmp_path: Path, server: tuple[str, ScriptedEngine]
) -> None:
    url, engine = server
    engine.step_s = 0.03
    source, output = requests(tmp_path / "in.jsonl", 300, MODEL), tmp_path / "out.jsonl"
    argv = command(source, output, "--url", url, "--concurrency", 4)
    for num_done in (20, 70, 130):
        killed_at(argv, tmp_path / "out.parts", num_done)
        assert not output.exists()
    engine.step_s = 0.0
    num_before = len(engine.prompts)
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert set(answers(output)) == {f"id-{i}" for i in range(300)}
    assert len(engine.prompts) - num_before <= 300 - 130
    summary = json.loads((tmp_path / "out.summary.json").read_text())
    assert (summary["num_completed"], summary["num_failed"]) == (300, 0)
    assert summary["num_resumed"] >= 130
    assert not (tmp_path / "out.parts").exists()
    again = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    assert (again.returncode, again.stdout) == (0, f"{output} is complete: 300 answers\n")
    requests(source, 10, MODEL)
    other = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    assert other.returncode == 2
    assert "exists; remove it" in other.stderr


def test_sigterm_keeps_what_is_done_and_a_bad_line_has_its_own_exit_code(
    tmp_path: Path, server: tuple[str, ScriptedEngine]
) -> None:
    url, engine = server
    engine.step_s = 0.05
    source, output = requests(tmp_path / "in.jsonl", 60, MODEL), tmp_path / "out.jsonl"
    with source.open("a") as file:
        file.write("{broken\n")
    argv = command(source, output, "--url", url, "--concurrency", 2, "--grace-s", 1)
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "out.parts" / "segments").exists() or not list(
        (tmp_path / "out.parts" / "segments").iterdir()
    ):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    _, said = process.communicate(timeout=30)
    assert time.monotonic() - began < 3, "ray job stop kills after 3 s"
    assert process.returncode == 128 + signal.SIGTERM
    assert "run it again to go on" in said
    engine.step_s = 0.0
    assert subprocess.run(argv, check=False, timeout=120, stderr=subprocess.DEVNULL).returncode == 3
    assert len(answers(output)) == 60
    (error,) = map(json.loads, (tmp_path / "out.errors.jsonl").read_text().splitlines())
    assert (error["custom_id"], error["error"]["line"]) == (None, 61)


@pytest.mark.slow
def test_ten_thousand_lines_killed_at_random(tmp_path: Path, model: Path) -> None:
    source = requests(tmp_path / "in.jsonl", 10_000, model.name)
    engine = [str(model), "--dtype", "float32", "--num-threads", 1, "--kv-cache-gib", 0.1]
    argv = command(source, tmp_path / "out.jsonl", *engine)
    for num_done in sorted(random.sample(range(200, 9_000), 3)):
        killed_at(argv, tmp_path / "out.parts", num_done)
    subprocess.run(argv, check=True, timeout=600)
    texts = answers(tmp_path / "out.jsonl")
    assert set(texts) == {f"id-{i}" for i in range(10_000)}
    few = requests(tmp_path / "few.jsonl", 50, model.name)
    subprocess.run(command(few, tmp_path / "few.out.jsonl", *engine), check=True, timeout=300)
    assert answers(tmp_path / "few.out.jsonl").items() <= texts.items()  # kills change no answer


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, dict[str, str]]]:
    """A Ray cluster of this test's own, as `ray start` makes it: the `ray` command and its environment."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    port, dashboard, agent, client = (it.getsockname()[1] for it in sockets)
    for it in sockets:
        it.close()
    folder = tempfile.mkdtemp(prefix="pl-ray-", dir="/tmp")  # unix sockets must have short names
    ray = str(Path(sys.executable).with_name("ray"))
    argv = [
        *(ray, "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--temp-dir={folder}"),
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
        listing = [ray, "job", "list"]
        while subprocess.run(listing, env=environ, capture_output=True, check=False).returncode != 0:
            assert head.poll() is None
            assert time.monotonic() < deadline
        yield ray, environ
    finally:
        family = [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]
        for process in family:
            process.terminate()
        for process in psutil.wait_procs(family, timeout=20)[1]:
            process.kill()
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_a_job_on_a_cluster(tmp_path: Path, model: Path, cluster: tuple[str, dict[str, str]]) -> None:
    ray, environ = cluster
    source, output = requests(tmp_path / "in.jsonl", 400, model.name), tmp_path / "out.jsonl"
    engine = [str(model), "--dtype", "float32", "--num-threads", 1, "--kv-cache-gib", 0.1, "--ordered"]
    replicas = ["--replicas", 2, "--min-replicas", 1]
    submit = [ray, "job", "submit", "--", *command(source, output, *engine, *replicas)]
    done = subprocess.run(submit, env=environ, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "400 of 400 lines (100%)" in done.stdout
    assert list(answers(output)) == [f"id-{i}" for i in range(400)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray Data's own, about its progress bars and resources
def test_a_stage_of_ray_data(ray_local: None, model: Path) -> None:
    import ray.data

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
