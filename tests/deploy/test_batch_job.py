"""Batches as users run them: killed, stopped, and run again."""

import json
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from batches import answers, command, requests
from front import MODEL, ScriptedEngine, byte_level, listening, loaded, scripted_front
from tiny import make_checkpoint

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
