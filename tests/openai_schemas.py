"""OpenAI's own schemas, where OPENAI_SCHEMAS names a file of them, and answers held against them."""

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest


def load() -> dict[str, Any]:
    """As JSON Schema, to which `nullable` and `discriminator` mean nothing; skips where there are none."""
    file = os.environ.get("OPENAI_SCHEMAS")
    if not file:
        pytest.skip("OPENAI_SCHEMAS does not name a file of OpenAI's schemas")
    return _json_schema(json.loads(Path(file).read_text()))


def valid(schemas: dict[str, Any], name: str, reply: Any) -> None:
    """AssertionError unless `reply` is what the schema of this name says."""
    schema = {"$ref": f"#/components/schemas/{name}", **schemas}
    jsonschema.Draft202012Validator(schema).validate(reply)


def _json_schema(node: Any) -> Any:
    if isinstance(node, list):
        return [_json_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {key: value for key, value in node.items() if key not in ("nullable", "discriminator")}
    converted = {key: _json_schema(value) for key, value in kept.items()}
    return {"anyOf": [converted, {"type": "null"}]} if node.get("nullable") is True else converted
