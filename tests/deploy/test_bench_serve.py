"""`paceline bench serve`: loads, turns of two servers, objectives, and what is written of them."""

import asyncio
import json
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console
from scripted_server import ScriptedServer

from paceline.cluster.errors import UserError
from paceline.deploy.bench import counters
from paceline.deploy.bench.client import Asked, Query, Stream, Timing, connected, read_stream
from paceline.deploy.bench.load import Load, closed_loop, open_loop
from paceline.deploy.bench.measure import Objective, quantile, summarise
from paceline.deploy.bench.plot import draw_serve
from paceline.deploy.bench.prompts import make_queries, read_queries
from paceline.deploy.bench.serve import ServeRun, measure, table_of
from paceline.deploy.cli import main

ASKED = Asked(max_tokens=3)
QUERIES = [Query(prompt=[index, index + 1]) for index in range(40)]


@pytest.fixture(autouse=True)
def no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "HEARTBEAT_S", 0.0)


async def test_a_closed_loop_keeps_its_number_in_flight_and_an_open_one_does_not_wait() -> None:
    """The server takes 60 ms for an answer; at 200 requests per second many are in flight."""
    server = ScriptedServer(pause_s=0.02)
    async with server.listening() as url, connected(url) as client:
        streams, _ = await closed_loop(client, QUERIES[:9], ASKED, 3)
        assert (len(streams), server.most_running) == (9, 3)
        streams, _ = await open_loop(client, QUERIES[:20], ASKED, rate=200.0, seed=1)
        assert len(streams) == 20
        assert server.most_running > 5


async def test_an_open_loop_sends_at_the_same_moments_again() -> None:
    """And times a request from when it was due, not from when the client got round to it."""
    moments: list[list[float]] = []
    for _ in range(2):
        async with ScriptedServer().listening() as url, connected(url) as client:
            streams, _ = await open_loop(client, QUERIES[:8], ASKED, rate=100.0, seed=7)
            due = sorted(stream.sent_at for stream in streams)
            moments.append([at - due[0] for at in due])
    assert moments[0] == pytest.approx(moments[1])
    assert len({round(later - earlier, 6) for earlier, later in pairwise(moments[0])}) > 4


async def test_two_servers_take_turns_on_the_same_prompts_in_both_orders() -> None:
    first, second = ScriptedServer(), ScriptedServer(pause_s=0.01)
    async with first.listening() as a, second.listening() as b:
        run = ServeRun(
            urls=[a, b],
            loads=[Load(concurrency=2), Load(rate=100.0)],
            num_requests=4,
            num_rounds=2,
            num_warm_up=2,
            asked=ASKED,
            objective=Objective(e2e_s=0.025),
        )
        report = await measure(run, QUERIES, Console(quiet=True))
    assert sorted(first.prompts) == sorted(second.prompts)
    assert len(first.prompts) == 2 + 2 * 2 * 4
    assert len({tuple(prompt) for prompt in first.prompts}) == len(first.prompts), "no prompt comes twice"
    rows = report.rows()
    assert [(row.load, row.url) for row in rows] == [
        ("2 streams", a), ("2 streams", b), ("100/s", a), ("100/s", b)
    ]  # fmt: skip
    assert rows[0].over_first is None
    assert rows[1].over_first is not None
    assert rows[1].over_first < 0.9
    assert [row.tokens_per_block for row in rows] == [4.0] * 4
    assert rows[1].goodput_per_s == 0 < rows[0].goodput_per_s
    table = table_of(report)
    assert table.row_count == 4
    assert "good/s" in [column.header for column in table.columns]


async def test_both_kinds_of_load_are_drawn_apart(tmp_path: Path) -> None:
    async with ScriptedServer().listening() as url:
        loads = [Load(concurrency=1), Load(concurrency=2), Load(rate=50.0)]
        run = ServeRun(urls=[url], loads=loads, num_requests=2, num_warm_up=0, asked=ASKED)
        report = await measure(run, QUERIES, Console(quiet=True))
    draw_serve(report, tmp_path / "x.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x-concurrency.png", "x-rate.png"]


def test_a_chats_first_event_that_names_the_role_is_no_token() -> None:
    stream = Stream(sent_at=0.0)
    for at, payload in [
        (0.1, b'{"choices":[{"delta":{"role":"assistant","content":""}}]}'),
        (0.3, b'{"choices":[{"delta":{"content":"a"}}]}'),
        (0.4, b'{"choices":[{"delta":{},"finish_reason":"stop"}]}'),
        (0.4, b'{"choices":[],"usage":{"completion_tokens":1,"prompt_tokens":9}}'),
        (0.4, b"[DONE]"),
    ]:
        stream.arrivals.append((at, payload))
    assert read_stream(stream, None) == Timing(num_tokens=1, times_s=[0.3], prompt_len=9)


def test_an_objective_is_met_as_a_whole_or_not_at_all() -> None:
    timings = [
        Timing(num_tokens=3, times_s=[0.1, 0.2, 0.3]),
        Timing(num_tokens=3, times_s=[0.4, 0.5, 0.6]),
        Timing(num_tokens=3, times_s=[0.1, 0.2, 0.9]),
    ]
    objective = Objective(ttft_s=0.2, itl_s=0.15, e2e_s=0.5)
    assert [objective.is_met(timing) for timing in timings] == [True, False, False]
    assert Objective(itl_s=0.05).is_met(timings[0]) is False
    assert summarise(timings, Load(concurrency=1), 2.0, objective=Objective(e2e_s=0.7)).goodput_per_s == 1.0


def test_a_quantile_is_one_of_the_values() -> None:
    assert quantile([], 0.5) == 0
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([float(i) for i in range(101)], 0.99) == 99.0


def test_prompts_come_from_a_file_and_a_wrong_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "max_tokens": 2}\n\n{"messages": [{"role": "user", "content": "b"}]}\n')
    first, second = read_queries(file)
    assert (first.prompt, ASKED.tokens_of(first), ASKED.tokens_of(second)) == ("a", 2, 3)
    file.write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    with pytest.raises(UserError, match="line 2"):
        read_queries(file)
    with pytest.raises(UserError, match="--prompts"):
        read_queries(tmp_path / "none")


def test_synthetic_prompts_share_what_they_should(default_model: Path) -> None:
    tokenizer_file = default_model / "tokenizer.json"
    queries = make_queries(tokenizer_file, 6, 32, shared_len=20, num_shared=2)
    prompts = [query.prompt for query in queries]
    assert all(isinstance(prompt, list) and len(prompt) == 32 for prompt in prompts)
    heads = [tuple(prompt[:20]) for prompt in prompts if isinstance(prompt, list)]
    assert heads[::2] == [heads[0]] * 3
    assert heads[1::2] == [heads[1]] * 3
    assert heads[0] != heads[1]
    assert len({tuple(prompt) for prompt in prompts if isinstance(prompt, list)}) == 6
    with pytest.raises(UserError, match="leaves nothing"):
        make_queries(tokenizer_file, 2, 8, shared_len=8)


async def test_the_command_measures_chats_and_writes_json(tmp_path: Path) -> None:
    prompts, figures = tmp_path / "prompts.jsonl", tmp_path / "figures.json"
    prompts.write_text('{"messages": [{"role": "user", "content": "b"}]}\n')
    server = ScriptedServer()
    async with server.listening() as url:
        options = ["--concurrency", "2", "--num-requests", "3", "--warm-up", "1", "--max-tokens", "4"]
        command = ["bench", "serve", "--url", url, "--prompts", str(prompts), "--json-file", str(figures)]
        assert await asyncio.to_thread(main, [*command, *options, "--stop-at-eos"]) == 0
    assert len(server.bodies) == 4
    assert all(body["messages"] and not body["ignore_eos"] for body in server.bodies)
    (measured,) = json.loads(figures.read_text())["measured"][url]
    assert measured[0]["num_requests"] == 3


async def test_a_server_that_is_not_there_ends_the_command_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    command = ["bench", "serve", "--url", "http://127.0.0.1:9", "--prompts", str(prompts)]
    assert await asyncio.to_thread(main, command) == 1
    assert capsys.readouterr().err.startswith("paceline: http://127.0.0.1:9: ClientConnectorError")
