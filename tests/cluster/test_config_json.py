"""Typed reads of a config.json: what is accepted, and what is said of the rest."""

from pathlib import Path

import pytest

from paceline.cluster.config_json import ConfigJson
from paceline.cluster.errors import ModelError

CONFIG = ConfigJson(
    Path("m/config.json"), {"size": 64, "half": 0.5, "none": None, "yes": True, "zero": 0, "name": "x"}
)


def test_a_null_counts_as_absent() -> None:
    assert CONFIG.integer("none", 3) == 3
    assert CONFIG.get("none", "default") == "default"
    assert CONFIG.flag("none", True)
    assert CONFIG.optional_number("none") is None
    assert CONFIG.object("none").values == {}


def test_values_of_the_right_kind_are_read() -> None:
    assert CONFIG.integer("size") == 64
    assert CONFIG.optional_number("half") == 0.5
    assert CONFIG.integer("zero", is_zero_fine=True) == 0
    assert CONFIG.flag("yes")
    assert ConfigJson(CONFIG.path, {"part": {"size": 2}}).object("part").integer("size") == 2


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("integer", "absent", "m/config.json: absent is missing; use the file as its author published it"),
        ("integer", "none", "none is missing"),
        ("integer", "half", "half is 0.5; it must be a whole number"),
        ("integer", "zero", "zero is 0; it must be a number above 0"),
        ("number", "name", "name is 'x'; it must be a number"),
        ("number", "yes", "yes is True; it must be a number"),
        ("flag", "zero", "zero is 0; it must be true or false"),
        ("object", "size", "size is 64; it must be an object"),
    ],
)
def test_other_values_are_named(kind: str, name: str, message: str) -> None:
    read = {"integer": CONFIG.integer, "number": CONFIG.number, "flag": CONFIG.flag, "object": CONFIG.object}
    with pytest.raises(ModelError, match=message):
        read[kind](name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist; give a directory"),
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[1]", "is not a JSON object"),
        (b'{"size": Infinity}', "size is inf"),
        (b'{"size": NaN}', "size is nan"),
    ],
)
def test_files_that_hold_no_config_are_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        ConfigJson.read(file).integer("size")
