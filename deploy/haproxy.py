"""What we add to the HAProxy that Ray Serve puts before the replicas: TLS, header rules, words for errors.

Serve writes HAProxy's configuration itself, anew at every change of the replicas, and offers nothing of this.
It starts HAProxy by a path of ours, so a script stands there that edits the configuration on its way.
"""

import json
import shlex
import ssl
from pathlib import Path

from ..cluster.config import ServerConfig
from ..cluster.errors import ConfigError, RequestError
from .api.replies import error_object

# Serve's words, which the edits hold on to.
FRONTENDS = {"http_frontend": "http/1.1", "grpc_frontend": "h2"}  # and what each speaks under TLS

# A request id is echoed in headers and written to logs: Serve makes one where the client's is none we want.
# The other header would switch off that a client's leaving cancels its request.
_REQUEST_RULES = (
    "http-request del-header x-request-id unless { req.fhdr_cnt(x-request-id) 1 }"
    " { req.fhdr(x-request-id) -m reg ^[A-Za-z0-9._:/=+-]{1,128}$ }",
    "http-request del-header x-request-disconnect-disabled",
)

# HAProxy's own answers: Serve would make a bare 500 of each. (What is no HTTP it refuses with a page of HTML,
# which nothing can change.)
_NO_REPLICA = [
    RequestError(
        "no replica of this server can answer now",
        status=status,
        code="engine_unavailable",
        error_type="server_error",
        retry_after_s=5,
    )
    for status in (502, 503, 504)
]


def write_haproxy(binary: str, scratch: Path, server: ServerConfig) -> Path:
    """The script to start instead of HAProxy; it and what it reads are in `scratch`, for this user only."""
    pem = None if server.tls_cert is None else _write_pem(server, scratch)
    edits = scratch / "haproxy.sed"
    parts = [_edit_errors(), *(_edit(name, protocol, pem) for name, protocol in FRONTENDS.items())]
    edits.write_text("\n".join(parts))
    script = scratch / "haproxy"
    # While it splices a request whose body came in a packet of its own, HAProxy 2.8 does not see that the
    # client left: the engine would go on for nobody. Serve's configuration asks for splicing; -dS forbids it.
    script.write_text(
        "#!/bin/sh\n"
        "# haproxy -db -f CONFIGURATION ..., as Serve starts it\n"
        f'sed -f {shlex.quote(str(edits))} "$3" > "$3.edited" || exit 1\n'
        'edited="$3.edited"; shift 3\n'
        f'exec {shlex.quote(binary)} -dS -db -f "$edited" "$@"\n'
    )
    script.chmod(0o700)
    return script


def check_tls(server: ServerConfig) -> None:
    """Raise ConfigError for a certificate and a key that cannot be used, or do not belong together."""
    if server.tls_cert is None or server.tls_key is None:
        return
    for name, path in (("tls_cert", server.tls_cert), ("tls_key", server.tls_key)):
        if not Path(path).expanduser().is_file():
            raise ConfigError(f"{name} {path} does not exist")
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        cert, key = (Path(path).expanduser() for path in (server.tls_cert, server.tls_key))
        context.load_cert_chain(cert, key, password=_no_passphrase)
    except (OSError, ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"tls_cert {server.tls_cert} and tls_key {server.tls_key} cannot be used: {error}"
        ) from None


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase, and nobody would be there to type it; give it without one")


def _write_pem(server: ServerConfig, scratch: Path) -> Path:
    """Chain and key in one file, as HAProxy reads them."""
    assert server.tls_cert is not None
    assert server.tls_key is not None
    path = scratch / "server.pem"
    path.touch(0o600)
    parts = [Path(part).expanduser().read_text() for part in (server.tls_cert, server.tls_key)]
    path.write_text("\n".join(parts))
    return path


def _edit_errors() -> str:
    """A sed script: our answers in the place of Serve's."""
    return "/^    errorfile /d\n/^defaults$/a\\\n" + "\\\n".join(map(_answer, _NO_REPLICA))


def _answer(error: RequestError) -> str:
    """The line of HAProxy's configuration that words an error as the application does."""
    return (
        f"    http-error status {error.status} content-type application/json"
        f" string '{json.dumps(error_object(error))}' hdr Retry-After {error.retry_after_s}"
    )


def _edit(frontend: str, protocol: str, pem: Path | None) -> str:
    """A sed script: behind the first `bind` of this frontend TLS, and below it the rules."""
    tls = "" if pem is None else f" ssl crt {pem} ssl-min-ver TLSv1.2 alpn {protocol}"
    rules = "\\\n".join(f"    {rule}" for rule in _REQUEST_RULES)
    return f"/^frontend {frontend}$/,/^    bind /{{\n/^    bind /{{\ns|$|{tls}|\na\\\n{rules}\n}}\n}}"
