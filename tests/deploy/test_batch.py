"""Batches: which lines are asked, what is kept, and what a crash, a failure or a signal leaves."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.errors import ConfigError
from paceline.deploy.batch import job, segments
from paceline.deploy.batch.job import AnswererLost, Line, Response, Totals, run_batch
from paceline.deploy.batch.segments import Segments

CHAT = "/v1/chat/completions"


def line(custom_id: Any, **changes: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": f"say {custom_id}"}]}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body, **changes}


def written(path: Path, lines: list[Any]) -> Path:
    path.write_bytes(b"".join(x if isinstance(x, bytes) else json.dumps(x).encode() + b"\n" for x in lines))
    return path


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def ok(asked: Line) -> Response:
    text = asked["body"]["messages"][0]["content"]
    usage = {"prompt_tokens": 2, "completion_tokens": 3}
    return {"status_code": 200, "request_id": "r", "body": {"text": text, "usage": usage}}


def failure(status: int, code: str = "no") -> Response:
    return {"status_code": status, "request_id": "r", "body": {"error": {"code": code, "message": "No."}}}


async def echo(asked: Line) -> Response:
    await asyncio.sleep(0)
    return ok(asked)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(job, "MAX_PAUSE_S", 0.01)
    monkeypatch.setattr(job, "FLUSH_S", 0.02)


async def test_every_line_has_one_result(tmp_path: Path) -> None:
    source = written(tmp_path / "in", [line(f"id-{i}") for i in range(300)])
    seen: list[tuple[int, int]] = []

    def progress(totals: Totals) -> None:
        seen.append((totals.num_completed, totals.completion_tokens))

    totals = await run_batch(source, tmp_path / "out", echo, concurrency=7, progress=progress)

    assert totals.is_complete
    assert (totals.num_completed, totals.num_failed, totals.completion_tokens) == (300, 0, 900)
    assert seen == sorted(seen)
    output = results(tmp_path / "out" / "output.jsonl")
    assert {r["custom_id"]: r["response"]["body"]["text"] for r in output} == {
        f"id-{i}": f"say id-{i}" for i in range(300)
    }
    assert len(output) == 300
    assert set(output[0]) == {"id", "custom_id", "response", "error"}
    assert (tmp_path / "out" / "errors.jsonl").read_bytes() == b""


async def test_bad_lines_go_to_the_errors_and_harm_no_other(tmp_path: Path) -> None:
    bad: list[tuple[Any, str]] = [
        (b"{not json\n", "invalid_json"),
        (b"[1]\n", "invalid_json"),
        (b'{"custom_id": "n", "body": {"x": NaN}}\n', "invalid_json"),
        (b'{"custom_id": "\xff"}\n', "invalid_json"),
        (b"[" * 100_000 + b"\n", "invalid_json"),
        (line(None), "invalid_custom_id"),
        (line(7), "invalid_custom_id"),
        (line(""), "invalid_custom_id"),
        (line("x" * 600), "invalid_custom_id"),
        (line("a", method="GET"), "invalid_method"),
        (line("b", url="/v1/embeddings"), "invalid_url"),
        (line("c", url=["/v1/completions"]), "invalid_url"),
        (line("d", body="text"), "invalid_body"),
        (line("e", body={"stream": True}), "stream_not_supported"),
        (line("good"), "duplicate_custom_id"),
    ]
    first = b"\xef\xbb\xbf" + json.dumps(line("good")).encode() + b"\r\n"
    source = written(tmp_path / "in", [first, b"\n", b"  \r\n", *(text for text, _ in bad), line("last")])

    totals = await run_batch(source, tmp_path / "out", echo, concurrency=2)

    assert totals.is_complete
    assert (totals.num_completed, totals.num_failed) == (2, len(bad))
    assert {r["custom_id"] for r in results(tmp_path / "out" / "output.jsonl")} == {"good", "last"}
    errors = [r["error"] for r in results(tmp_path / "out" / "errors.jsonl")]
    assert [(e["line"], e["code"]) for e in errors] == [(n, code) for n, (_, code) in enumerate(bad, 4)]


async def test_a_refused_line_is_an_error_with_the_server_s_answer(tmp_path: Path) -> None:
    source = written(tmp_path / "in", [line("a"), line("b")])

    async def answer(asked: Line) -> Response:
        return ok(asked) if asked["custom_id"] == "a" else failure(400, "model_not_found")

    await run_batch(source, tmp_path / "out", answer, concurrency=1)
    (error,) = results(tmp_path / "out" / "errors.jsonl")

    assert error["custom_id"] == "b"
    assert error["error"] == {"code": "model_not_found", "message": "No."}
    assert error["response"]["status_code"] == 400


async def test_what_may_pass_is_tried_again(tmp_path: Path) -> None:
    asked_for: Counter[str] = Counter()

    async def answer(asked: Line) -> Response:
        custom_id = asked["custom_id"]
        asked_for[custom_id] += 1
        if custom_id == "full" and asked_for[custom_id] <= 3 * job.MAX_ATTEMPTS:
            return failure(429)
        if custom_id == "shaky" and asked_for[custom_id] == 1:
            return failure(502)
        if custom_id == "away" and asked_for[custom_id] == 1:
            raise AnswererLost("refused")
        return failure(500) if custom_id == "broken" else ok(asked)

    source = written(tmp_path / "in", [line(i) for i in ("full", "shaky", "away", "broken", "fine")])
    totals = await run_batch(source, tmp_path / "out", answer, concurrency=5)

    assert (totals.num_completed, totals.num_failed) == (4, 1)
    assert asked_for["broken"] == job.MAX_ATTEMPTS
    assert asked_for["fine"] == 1


async def test_a_server_that_stays_away_ends_the_run_and_fails_no_line(tmp_path: Path) -> None:
    source = written(tmp_path / "in", [line(str(i)) for i in range(20)])
    num_asked = 0

    async def dying(asked: Line) -> Response:
        nonlocal num_asked
        num_asked += 1
        if num_asked > 8:
            raise AnswererLost("connection refused")
        return ok(asked)

    with pytest.raises(AnswererLost, match="refused"):
        await run_batch(source, tmp_path / "out", dying, concurrency=2)
    assert not (tmp_path / "out" / "output.jsonl").exists()
    asked: list[str] = []

    async def remembering(line: Line) -> Response:
        asked.append(line["custom_id"])
        return ok(line)

    totals = await run_batch(source, tmp_path / "out", remembering, concurrency=2)
    assert (totals.num_completed, totals.num_resumed, len(asked)) == (20, 8, 12)
    assert len(results(tmp_path / "out" / "output.jsonl")) == 20


async def test_stopping_keeps_what_is_done_and_waits_no_longer_than_its_grace(tmp_path: Path) -> None:
    source = written(tmp_path / "in", [line(str(i)) for i in range(50)])
    stopping = asyncio.Event()

    async def answer(asked: Line) -> Response:
        if asked["custom_id"] == "9":
            stopping.set()
        await asyncio.sleep(60 if asked["custom_id"] == "8" else 0)  # one that will not end in time
        return ok(asked)

    async with asyncio.timeout(5):
        totals = await run_batch(
            source, tmp_path / "out", answer, concurrency=2, stopping=stopping, grace_s=0.1
        )
    assert not totals.is_complete
    assert totals.num_completed == 9
    totals = await run_batch(source, tmp_path / "out", echo, concurrency=2)
    assert (totals.is_complete, totals.num_resumed) == (True, 9)


async def test_order_is_kept_when_asked_for(tmp_path: Path) -> None:
    source = written(tmp_path / "in", [line(str(i)) for i in range(40)])

    async def answer(asked: Line) -> Response:
        await asyncio.sleep(0.001 * (40 - int(asked["custom_id"])))
        return failure(400) if asked["custom_id"] in ("3", "30") else ok(asked)

    await run_batch(source, tmp_path / "out", answer, concurrency=40, is_ordered=True)
    output = [int(r["custom_id"]) for r in results(tmp_path / "out" / "output.jsonl")]
    errors = [int(r["custom_id"]) for r in results(tmp_path / "out" / "errors.jsonl")]
    assert output == sorted(output)
    assert errors == [3, 30]
    assert sorted(output + errors) == list(range(40))


async def test_a_line_without_a_seed_has_the_same_in_every_run(tmp_path: Path) -> None:
    seeds: list[Any] = []

    async def answer(asked: Line) -> Response:
        seeds.append(asked["body"].get("seed"))
        return ok(asked)

    given = line("b", body={"messages": [{"content": "x"}], "seed": 5})
    source = written(tmp_path / "in", [line("a"), given])
    for run in ("1", "2"):
        await run_batch(source, tmp_path / run, answer, concurrency=1)
    assert seeds[:2] == seeds[2:]
    assert seeds[1] == 5
    assert isinstance(seeds[0], int)


async def test_files_that_cannot_be_used_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="check the input"):
        await run_batch(tmp_path / "absent", tmp_path / "out", echo, concurrency=1)
    with pytest.raises(ConfigError, match="no lines"):
        await run_batch(written(tmp_path / "empty", [b"\n"]), tmp_path / "out", echo, concurrency=1)
    source = written(tmp_path / "in", [line("a")])
    await run_batch(source, tmp_path / "out", echo, concurrency=1)
    written(source, [line("b")])
    with pytest.raises(ConfigError, match="another input"):
        await run_batch(source, tmp_path / "out", echo, concurrency=1)
    held = Segments(tmp_path / "held", "x")
    with pytest.raises(ConfigError, match="another batch is writing"):
        Segments(tmp_path / "held", "x")
    held.close()


def test_segments_survive_what_a_crash_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def result(custom_id: int) -> dict[str, Any]:
        return {"id": "x", "custom_id": str(custom_id), "response": {}, "error": None}

    monkeypatch.setattr(segments, "MAX_SEGMENTS", 4)
    kept = Segments(tmp_path, "digest")
    for number in range(4):
        kept.append([result(number)])
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        kept.append([result(4)])  # joined, and killed before the old ones were removed
    monkeypatch.setattr(Path, "unlink", unlink)
    kept.close()
    (tmp_path / "segments" / "00000099.jsonl.tmp").write_text('{"custom_id": "to')
    kept = Segments(tmp_path, "digest")
    assert sorted(done.custom_id for done in kept.done()) == ["0", "1", "2", "3", "4"]
    kept.append([result(5)])
    assert len(list((tmp_path / "segments").iterdir())) == 1
    assert sorted(done.custom_id for done in kept.done()) == ["0", "1", "2", "3", "4", "5"]
    kept.close()


async def test_a_disk_that_is_full_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = written(tmp_path / "in", [line(str(i)) for i in range(1000)])

    def full(_: Any, __: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Segments, "append", full)

    async def answer(asked: Line) -> Response:
        await asyncio.sleep(0.01)
        return ok(asked)

    with pytest.raises(job.EngineError, match="No space left"):
        await run_batch(source, tmp_path / "out", answer, concurrency=1)
