"""The shape of the house: rooms, floors, and the package table are facts that a test holds."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {"cluster": 0, "scheduler": 1, "kernels": 1, "workers": 2, "drafter": 2, "deploy": 3}
TOP_LEVEL = {"cluster", "workers", "drafter", "scheduler", "kernels", "deploy", "tests", "helm", "docs"}
SHELLS = {"scheduler/actor.py"}  # the only scheduler file that may know Ray
OUTSIDE_THE_SCHEDULER = {"torch", "ray", "zmq", "socket", "asyncio"}


def sources() -> list[Path]:
    return sorted(path for room in FLOORS for path in (ROOT / room).rglob("*.py"))


def imports_of(path: Path) -> list[tuple[int, str]]:
    """(dots, dotted name) of every import in a file, at any depth."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            found += [(node.level, f"{base}.{alias.name}".strip(".")) for alias in node.names]
    return found


def floor_faults(path: Path, text_imports: list[tuple[int, str]]) -> list[str]:
    """Imports that climb a floor, cross to a neighbour, or name the package absolutely."""
    inside = path.relative_to(ROOT).parts
    room, depth = inside[0], len(inside)
    faults = []
    for dots, name in text_imports:
        target = name.split(".")[0]
        if dots == 0:
            if target == "paceline":
                faults.append(f"{path}: import {name}: use a relative import inside the rooms")
        elif dots == depth:
            if target not in FLOORS:
                faults.append(f"{path}: {name} is no room")
            elif target != room and FLOORS[target] >= FLOORS[room]:
                faults.append(
                    f"{path}: {room} (floor {FLOORS[room]}) imports {target} (floor {FLOORS[target]})"
                )
        elif dots > depth:
            faults.append(f"{path}: {'.' * dots}{name} leaves the package")
    return faults


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down_the_floors(path: Path) -> None:
    assert floor_faults(path, imports_of(path)) == []


def test_the_floor_check_sees_a_planted_fault() -> None:
    path = ROOT / "cluster" / "channel.py"

    assert floor_faults(path, [(2, "workers.runner.Runner")])
    assert floor_faults(path, [(0, "paceline.cluster.errors")])
    assert floor_faults(path, [(3, "elsewhere")])
    assert not floor_faults(ROOT / "deploy" / "cli.py", [(2, "cluster.config.Config")])


def test_the_scheduler_knows_no_tensor_no_ray_and_no_socket() -> None:
    for path in sorted((ROOT / "scheduler").rglob("*.py")):
        if str(path.relative_to(ROOT)) in SHELLS:
            continue
        names = {name.split(".")[0] for dots, name in imports_of(path) if dots == 0}

        assert not names & OUTSIDE_THE_SCHEDULER, path


def test_rooms_have_no_init_file() -> None:
    assert [room for room in FLOORS if (ROOT / room / "__init__.py").exists()] == []


def test_the_root_module_is_a_docstring() -> None:
    body = ast.parse((ROOT / "__init__.py").read_text()).body

    assert [type(node) for node in body] == [ast.Expr]
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"]


def test_the_package_table_names_every_folder_with_code() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {".".join(("paceline", *path.parent.relative_to(ROOT).parts)) for path in sources()}

    assert set(table) == folders | {"paceline"}


def test_the_top_level_is_the_agreed_one() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    folders -= {"build", "paceline.egg-info", "__pycache__"}

    assert folders <= TOP_LEVEL
