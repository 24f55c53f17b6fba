"""The benchmark: its arithmetic on known numbers, its client and servers on real sockets."""

import os
import sys
import time
import zipfile
from pathlib import Path

import msgspec
import psutil
import pytest
from rich.console import Console
from scripted_server import COUNTERS, ScriptedServer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paceline.cluster.errors import UserError
from paceline.deploy.api.text import Tokenizer as ChatTokenizer
from paceline.deploy.bench import counters, peers
from paceline.deploy.bench.client import BenchError, Stream, Timing, read_stream
from paceline.deploy.bench.counters import StepCounters, parse_step_counters
from paceline.deploy.bench.load import Load
from paceline.deploy.bench.measure import Measurement, summarise
from paceline.deploy.bench.peers import Peer, install_peers, run_rounds
from paceline.deploy.bench.prompts import make_chat_prompts, make_prompts
from paceline.deploy.bench.report import BEGIN, END, Machine, Report, Round, markdown, rows_of, write_into
from paceline.deploy.bench.servers import running_server
from paceline.deploy.bench.setting import (
    Setting,
    Workload,
    measure_server,
    num_prompts_for,
    num_requests_at,
)
from paceline.deploy.bench.vllm import needed_requirements
from paceline.deploy.ingress import free_port


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    """A tokenizer of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def setting_of(concurrencies: tuple[int, ...], num_new_tokens: int = 6) -> Setting:
    return Setting(
        model_path="m",
        dtype="float32",
        workload=Workload(prompt_len=2, num_new_tokens=num_new_tokens),
        concurrencies=concurrencies,
        prompts=[[i, i + 1] for i in range(num_prompts_for(concurrencies))],
    )


def measurement(tokens_per_s: float, counters: StepCounters | None = None) -> Measurement:
    return Measurement(
        load=Load(concurrency=1),
        num_requests=4,
        wall_s=1.0,
        tokens_per_s=tokens_per_s,
        ttft_p50_s=0.1,
        tpot_p50_s=0.02,
        gap_p99_s=0.03,
        counters=counters,
    )


def report_of(rounds: list[Round], skipped: dict[str, str] | None = None) -> Report:
    return Report(
        date="2026-01-01",
        model="m",
        dtype="bfloat16",
        versions={"paceline": "1"},
        workload=Workload(),
        machine=Machine(cpu="a processor", num_cores=2, memory_gib=24.0),
        rounds=rounds,
        skipped=skipped or {},
    )


def test_prompts_are_as_long_as_asked_all_different_and_the_same_every_time(tokenizer_file: Path) -> None:
    prompts = make_prompts(tokenizer_file, 50, 128)
    assert {len(prompt) for prompt in prompts} == {128}
    assert len({tuple(prompt) for prompt in prompts}) == 50
    assert prompts == make_prompts(tokenizer_file, 50, 128)


def test_more_prompts_than_there_is_text_are_refused(tokenizer_file: Path) -> None:
    with pytest.raises(UserError, match="lower the number of requests"):
        make_prompts(tokenizer_file, 1000, 4096)


def test_chat_prompts_are_turns_of_one_length(default_model: Path) -> None:
    tokenizer = ChatTokenizer.load(default_model)
    end = tokenizer.render_chat([{"role": "user", "content": "x"}])[-4:]
    prompts = make_chat_prompts(default_model, 20, 128)
    assert {len(prompt) for prompt in prompts} == {128}
    assert len(set(map(tuple, prompts))) == 20
    assert all("Explain this in simple words:" in tokenizer.decode(prompt) for prompt in prompts)
    assert all(prompt[-4:] == end for prompt in prompts)
    with pytest.raises(UserError, match="--prompt-len"):
        make_chat_prompts(default_model, 1, 12)


def test_a_stream_is_read_into_the_times_of_its_events() -> None:
    stream = Stream(sent_at=10.0)
    for at, payload in [
        (10.5, b'{"choices":[{"text":"a"}]}'),
        (10.7, b'{"choices":[{"text":"b"}],"usage":null}'),
        (10.7, b'{"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":2}}'),
        (10.7, b"[DONE]"),
    ]:
        stream.arrivals.append((at, payload))
    timing = read_stream(stream, 2)
    assert timing.num_tokens == 2
    assert timing.times_s == pytest.approx([0.5, 0.7])


@pytest.mark.parametrize(
    ("payloads", "complaint"),
    [
        ([b'{"choices":[{}],"usage":{"completion_tokens":2}}'], "without"),
        ([b'{"error":{"message":"lost"}}'], "lost"),
        ([b'{"choices":[{}],"usage":{"completion_tokens":1}}', b"[DONE]"], "1 tokens"),
        ([b"[DONE]"], "0 tokens"),
    ],
)
def test_a_torn_failed_or_short_stream_is_never_counted(payloads: list[bytes], complaint: str) -> None:
    stream = Stream(sent_at=0.0, arrivals=[(1.0, payload) for payload in payloads])
    with pytest.raises(BenchError, match=complaint):
        read_stream(stream, 2)


def test_a_loop_is_summed_up() -> None:
    timings = [
        Timing(num_tokens=3, times_s=[0.1, 0.2, 0.3]),
        Timing(num_tokens=3, times_s=[0.2, 0.5, 0.8]),
        Timing(num_tokens=3, times_s=[0.3, 0.5, 0.7]),
    ]
    result = summarise(timings, Load(concurrency=2), wall_s=1.5)
    assert result.tokens_per_s == pytest.approx(6.0)
    assert result.ttft_p50_s == pytest.approx(0.2)
    assert result.tpot_p50_s == pytest.approx(0.2)
    assert result.gap_p99_s == pytest.approx(0.3)
    assert (result.concurrency, result.num_requests) == (2, 3)


def test_tokens_that_share_an_event_count_in_the_time_per_token() -> None:
    result = summarise([Timing(num_tokens=5, times_s=[1.0, 1.4])], Load(concurrency=1), wall_s=2.0)
    assert result.tpot_p50_s == pytest.approx(0.1)


def test_the_step_counters_of_metrics_give_the_overhead_of_a_step() -> None:
    found = parse_step_counters(COUNTERS)
    assert found is not None
    assert found == StepCounters(num_steps=200, plan_s=0.1, wait_s=8.0, compute_s=7.9)
    assert found.step_s == pytest.approx(8.1 / 200)
    assert found.overhead_s == pytest.approx(0.2 / 200)
    later = StepCounters(num_steps=300, plan_s=0.2, wait_s=9.0, compute_s=8.8)
    assert later.since(found).overhead_s == pytest.approx(0.2 / 100)


def test_another_server_has_no_step_counters() -> None:
    assert parse_step_counters("# TYPE up gauge\nup 1.0\n") is None


async def test_the_client_keeps_the_asked_number_of_streams_in_flight_and_repeats_no_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(counters, "HEARTBEAT_S", 0.0)
    server = ScriptedServer()
    setting = setting_of((1, 3))
    async with server.listening() as url:
        results = await measure_server(url, setting)
    assert [r.concurrency for r in results] == [1, 3]
    assert [r.num_requests for r in results] == [num_requests_at(1), num_requests_at(3)]
    assert server.most_running == 3
    assert server.prompts == setting.prompts
    assert all(body["temperature"] == 0 and body["ignore_eos"] for body in server.bodies)
    assert [r.counters.num_steps for r in results if r.counters] == [num_requests_at(1), num_requests_at(3)]


async def test_a_refused_request_fails_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "HEARTBEAT_S", 0.0)
    async with ScriptedServer(fails_at=5).listening() as url:
        with pytest.raises(BenchError, match=r"503.*no room"):
            await measure_server(url, setting_of((2,)))


async def test_a_server_that_is_gone_fails_the_measurement() -> None:
    with pytest.raises(BenchError, match="ClientConnectorError"):
        await measure_server(f"http://127.0.0.1:{free_port()}", setting_of((1,)))


HEALTHY = """
import http.server, signal, subprocess, sys
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", stubborn])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
signal.signal(15, lambda *_: sys.exit(0))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_ended_with_everything_it_started(tmp_path: Path) -> None:
    port, log_file = free_port(), tmp_path / "log"
    with running_server([sys.executable, "-c", HEALTHY, str(port)], {}, port, log_file) as url:
        assert url.endswith(f":{port}")
        child = psutil.Process(int(log_file.read_text().split()[1]))
        assert child.is_running()
    deadline = time.monotonic() + 10
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "a grandchild outlived its server"
        os.sched_yield()


def test_a_server_that_does_not_come_up_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('one'); sys.exit('no such model')"]
    with (
        pytest.raises(BenchError, match=r"code 1.*one.*no such model"),
        running_server(command, {}, free_port(), tmp_path / "log"),
    ):
        pass


def test_only_requirements_that_apply_here_are_installed(tmp_path: Path) -> None:
    wheel = tmp_path / "peer-1.0-py3-none-any.whl"
    metadata = """Name: peer
Requires-Dist: numpy>=2
Requires-Dist: torchvision; platform_machine != "riscv64"
Requires-Dist: torch==2.13.0+cpu; python_version >= "3"
Requires-Dist: torch==2.13.0; python_version < "3"
Requires-Dist: pandas; extra == "tables"
"""
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("peer-1.0.dist-info/METADATA", metadata)
    assert needed_requirements(wheel) == ["numpy>=2", "torch==2.13.0+cpu"]


def test_rounds_take_turns_and_a_peer_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Peer] = []

    def measure(peer: Peer, result: list[Measurement] | Exception) -> None:
        def run(setting: Setting, log_file: Path) -> list[Measurement]:
            del setting, log_file
            order.append(peer)
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setitem(peers.MEASURES, peer, run)

    measure(Peer.PACELINE, [measurement(50.0)])
    measure(Peer.TRANSFORMERS, [measurement(25.0)])
    measure(Peer.VLLM, BenchError("it exited"))
    monkeypatch.setattr(peers, "measure_copy_gb_per_s", lambda: 30.0)
    monkeypatch.setattr(peers, "measure_idle_percent", lambda: 99.0)
    everyone = [Peer.PACELINE, Peer.VLLM, Peer.TRANSFORMERS]
    rounds, skipped = run_rounds(setting_of((1,)), everyone, 3, Console(quiet=True))
    first, second, third = order[:3], order[3:5], order[5:]
    assert first == [Peer.PACELINE, Peer.VLLM, Peer.TRANSFORMERS]
    assert second == [Peer.TRANSFORMERS, Peer.PACELINE]
    assert third == [Peer.TRANSFORMERS, Peer.PACELINE]
    assert skipped == {"vllm": "it exited"}
    assert all(r.measured.keys() == {"paceline", "transformers"} == r.idle_percent.keys() for r in rounds)


def test_without_peers_there_is_nothing_to_measure() -> None:
    with pytest.raises(UserError, match="no peer is left"):
        run_rounds(setting_of((1,)), [], 1, Console(quiet=True))


def test_a_peer_that_cannot_be_installed_is_left_out_with_pips_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    absent = install_peers(list(Peer), Console(quiet=True))
    assert absent.keys() == {"vllm", "vllm-dflash", "llama.cpp", "llama.cpp-dflash"}
    assert all("No matching distribution" in reason for reason in absent.values())


def test_a_row_holds_medians_and_the_median_of_the_ratios_within_rounds() -> None:
    rounds = [
        Round(
            copy_gb_per_s=30.0,
            idle_percent={"paceline": 99.0, "vllm": 98.0},
            measured={"paceline": [measurement(ours)], "vllm": [measurement(theirs)]},
        )
        for ours, theirs in [(60.0, 30.0), (20.0, 20.0), (45.0, 30.0)]
    ]
    ours, theirs = rows_of(report_of(rounds))
    assert (ours.peer, ours.tokens_per_s, ours.ours_over_it) == ("paceline", 45.0, None)
    assert (ours.slowest_tokens_per_s, ours.fastest_tokens_per_s) == (20.0, 60.0)
    assert (theirs.peer, theirs.tokens_per_s, theirs.ours_over_it) == ("vllm", 30.0, 1.5)


def test_the_page_gets_the_tables_between_its_markers_and_keeps_the_rest(tmp_path: Path) -> None:
    steps = StepCounters(num_steps=100, plan_s=0.02, wait_s=2.0, compute_s=1.98)
    measured = {"paceline": [measurement(50.0, counters=steps)]}
    report = report_of(
        [Round(copy_gb_per_s=31.0, idle_percent={"paceline": 97.0}, measured=measured)], {"vllm": "no wheel"}
    )
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_into(page, markdown(report))
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    assert "| 1 | paceline | 50.0 | 50.0-50.0 | 100 | 20.0 | 30.0 |  |" in text
    assert "| 1 | paceline | 20200 | 400 | 2.0 % |" in text
    assert "vllm: not measured; no wheel" in text
    write_into(page, "new\n")
    assert page.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"


def test_a_page_without_markers_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("mine\n")
    with pytest.raises(UserError, match="lacks the lines"):
        write_into(page, "new\n")
    assert page.read_text() == "mine\n"


def test_a_report_survives_its_json() -> None:
    report = report_of([Round(copy_gb_per_s=1.0, idle_percent={}, measured={"vllm": [measurement(1.0)]})])
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
