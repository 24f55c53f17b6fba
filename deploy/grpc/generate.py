"""Makes the Python of `paceline.proto`: messages, their types, stub and servicer. Run by `make stubs`.

What it writes is kept in the repository, so that nobody who installs the package needs a compiler.
"""

import sys
import tempfile
from importlib.resources import files
from pathlib import Path

PROTO = Path(__file__).with_name("paceline.proto")
# The name under which descriptors are registered; the pool of a process has one place for each.
_REGISTERED = "paceline/deploy/grpc"


def generate(folder: Path) -> None:
    """Write `paceline_pb2.py`, `paceline_pb2.pyi` and `paceline_pb2_grpc.py` into `folder`."""
    from grpc_tools import protoc  # for development only

    with tempfile.TemporaryDirectory() as scratch:
        status = protoc.main(
            [
                "protoc",
                f"--proto_path={_REGISTERED}={PROTO.parent}",
                f"--proto_path={files('grpc_tools') / '_proto'}",
                *(f"--{kind}_out={scratch}" for kind in ("python", "pyi", "grpc_python")),
                f"{_REGISTERED}/{PROTO.name}",
            ]
        )
        if status != 0:
            raise SystemExit(f"protoc failed with status {status}; its complaint is above")
        for made in sorted((Path(scratch) / _REGISTERED).iterdir()):
            text = made.read_text().replace("from paceline.deploy.grpc import", "from . import")
            (folder / made.name).write_text(text)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTO.parent)
