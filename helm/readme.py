"""Write the values table of the chart's README from values.yaml and values.schema.json.

`python helm/readme.py` rewrites the part between the two marks; a test holds it to be current.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent / "paceline"
BEGIN, END = "<!-- values: begin -->", "<!-- values: end -->"
ABSENT = object()


def rows(schema: dict[str, Any], values: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """(path, default, description) of every value, its parents before it."""
    for name, kind in schema.get("properties", {}).items():
        at = f"{path}.{name}".lstrip(".")
        value = values.get(name, ABSENT) if isinstance(values, dict) else ABSENT
        item = kind.get("items", {})
        is_open = "properties" in kind or "properties" in item
        if name == "workerGroups":  # a group's values are those of `worker` once more
            item = {"properties": {key: item["properties"][key] for key in _own_keys(schema, item)}}
        yield at, "" if "properties" in kind or value is ABSENT else _shown(value), kind["description"]
        if is_open:
            yield from rows(kind if "properties" in kind else item, value, at + ("[]" if item else ""))


def _own_keys(schema: dict[str, Any], item: dict[str, Any]) -> list[str]:
    shared = schema["properties"]["worker"]["properties"]
    return [key for key in item["properties"] if key not in shared]


def _shown(value: Any) -> str:
    return f"`{json.dumps(value)}`"


def table() -> str:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    lines = ["| value | default | meaning |", "|---|---|---|"]
    lines += [f"| `{path}` | {default} | {text} |" for path, default, text in rows(schema, values)]
    return "\n".join(lines)


def with_table(text: str) -> str:
    """`text` with what is between the marks replaced."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    readme = CHART / "README.md"
    readme.write_text(with_table(readme.read_text()))
