"""KubeRay's RayService and RayJob as JSON Schema, stricter than the API server: unknown keys are refused.

`tests/data/kuberay.json` holds the specs of version v1, without descriptions and with equal parts shared.
`python tests/kuberay.py FOLDER` makes it from a folder with KubeRay's CustomResourceDefinitions.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import yaml

FILE = Path(__file__).parent / "data" / "kuberay.json"
ORIGIN = (
    "From KubeRay's CustomResourceDefinitions, https://github.com/ray-project/kuberay, Apache License 2.0."
    " Changed: version v1 alone, no descriptions, equal parts shared."
)
Schema = dict[str, Any]


def faults(document: dict[str, Any]) -> list[str]:
    """What KubeRay's schema, with its defaults applied, and ours for unknown keys have against a document."""
    schema = json.loads(FILE.read_text())
    root: Schema = {"$ref": f"#/kinds/{document['kind']}", **schema}
    spec = _defaulted(document["spec"], root, root)
    validator = jsonschema.Draft202012Validator(_closed(root))
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(spec)]


def _defaulted(value: Any, schema: Schema, root: Schema) -> Any:
    """What the API server makes of a value before it validates: absent keys get their defaults."""
    while "$ref" in schema:
        schema = _at(root, schema["$ref"])
    if isinstance(value, dict):
        properties: dict[str, Schema] = schema.get("properties", {})
        defaults = {name: _default(kind, root) for name, kind in properties.items()}
        known = {name: default for name, default in defaults.items() if default is not None} | value
        inner = schema.get("additionalProperties")
        return {
            name: _defaulted(item, properties.get(name) or (inner if isinstance(inner, dict) else {}), root)
            for name, item in known.items()
        }
    if isinstance(value, list):
        return [_defaulted(item, schema.get("items", {}), root) for item in value]
    return value


def _default(schema: Schema, root: Schema) -> Any:
    return (_at(root, schema["$ref"]) if "$ref" in schema else schema).get("default")


def _at(root: Schema, reference: str) -> Schema:
    found: Any = root
    for step in reference.removeprefix("#/").split("/"):
        found = found[step]
    return found


def _closed(schema: Any) -> Any:
    """Kubernetes' dialect in JSON Schema's words, with no key beyond those that are listed."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(item) for name, item in schema.items()}
    if schema.get("x-kubernetes-int-or-string") is True:
        closed.pop("anyOf", None)
        closed["type"] = ["integer", "string"]
        closed.pop("pattern", None)
    is_object = isinstance(schema.get("type"), str) and "properties" in schema
    if is_object and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    return closed


def _vendored(folder: Path) -> Schema:
    kinds: Schema = {}
    for file in sorted(folder.glob("*.yaml")):
        definition = yaml.safe_load(file.read_text())["spec"]
        if definition["names"]["kind"] in ("RayService", "RayJob"):
            (version,) = (version for version in definition["versions"] if version["name"] == "v1")
            spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
            kinds[definition["names"]["kind"]] = _bare(spec)
    counts: Counter[str] = Counter()
    _count(kinds, counts)
    names = {text: f"s{i}" for i, text in enumerate(t for t, n in counts.items() if n > 1 and len(t) > 60)}
    shared = {name: _shared(json.loads(text), names, is_definition=True) for text, name in names.items()}
    return {"$comment": ORIGIN, "kinds": _shared(kinds, names), "$defs": shared}


def _bare(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_bare(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    dropped = {"description", "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-map-type"}
    return {
        key: {name: _bare(inner) for name, inner in item.items()} if key == "properties" else _bare(item)
        for key, item in schema.items()
        if key not in dropped
    }


def _text(schema: Any) -> str:
    return json.dumps(schema, sort_keys=True, separators=(",", ":"))


def _count(schema: Any, counts: Counter[str]) -> None:
    for item in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _count(item, counts)
    if isinstance(schema, dict) and isinstance(schema.get("type"), str):
        counts[_text(schema)] += 1


def _shared(schema: Any, names: dict[str, str], *, is_definition: bool = False) -> Any:
    if isinstance(schema, list):
        return [_shared(item, names) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if not is_definition and _text(schema) in names:
        return {"$ref": f"#/$defs/{names[_text(schema)]}"}
    return {name: _shared(item, names) for name, item in schema.items()}


if __name__ == "__main__":
    FILE.write_text(_text(_vendored(Path(sys.argv[1]))) + "\n")
