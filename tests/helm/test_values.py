"""Values are refused by place and reason, described, and in the README as they are."""

import json
import re
from typing import Any

import pytest
import yaml
from chart import CHART, ROOT, VALUES_FILES, chart, render, texts, values_of
from helm_python.errors import HelmError

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replica": 2}, r"additional properties 'replica' not allowed"),
        ({"engine": {"maxNumSeq": 2}}, r"at '/engine'.*additional properties 'maxNumSeq' not allowed"),
        ({"engine": {"device": "gpu"}}, r"at '/engine/device'.*value must be one of"),
        (
            {"engine": {"tensorParallelSize": "8"}},
            r"at '/engine/tensorParallelSize'.*got string, want integer",
        ),
        ({"engine": {"gpuMemoryUtilization": 1.5}}, r"at '/engine/gpuMemoryUtilization'.*maximum"),
        ({"server": {"port": 0}}, r"at '/server/port'.*minimum"),
        ({"image": {"digest": "latest"}}, r"at '/image/digest'.*does not match pattern"),
        ({"worker": {"shmSize": "lots"}}, r"at '/worker/shmSize'.*does not match pattern"),
        ({"grpc": {"servicerFunctions": []}}, r"at '/grpc/servicerFunctions'.*minItems"),
        ({"workerGroups": []}, r"at '/workerGroups'.*minItems"),
        ({"workerGroups": [{"name": "a"}]}, r"at '/workerGroups/0'.*missing property 'replicas'"),
        (
            {"workerGroups": [{"name": "a", "replicas": 1, "gpus": 8}]},
            r"at '/workerGroups/0'.*'gpus' not allowed",
        ),
        ({"env": {"A": "b"}}, r"at '/env'.*got object, want array"),
    ],
)
@pytest.mark.parametrize("is_render", [True, False])
def test_a_wrong_value_is_refused_by_place(values: dict[str, Any], message: str, is_render: bool) -> None:
    with pytest.raises(HelmError, match=re.compile(message, re.DOTALL)):
        chart().render(values, name="demo") if is_render else chart().validate_schema(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ingress": {"enabled": True}}, "auth.enabled is false: give API keys"),
        ({"service": {"type": "NodePort"}}, "auth.enabled is false: give API keys"),
        ({"auth": {"enabled": True}}, "needs auth.existingSecret"),
        (
            {"upgrade": {"type": "NewClusterWithIncrementalUpgrade"}},
            "needs upgrade.incremental.gatewayClassName",
        ),
        ({"gcsFaultTolerance": {"enabled": True}}, "needs gcsFaultTolerance.redis.address"),
        ({"grpc": {"enabled": True}, "haproxy": {"enabled": False}}, "needs haproxy.enabled"),
        ({"httpRoute": {"enabled": True}, "auth": {"allowAnonymous": True}}, "needs httpRoute.parentRefs"),
        ({"batch": {"jobs": [{"name": "a", "input": "b", "output": "c"}]}}, "needs batch.existingClaim"),
        (
            {"batch": {"existingClaim": "a", "jobs": [{"name": "a", "input": "it's", "output": "c"}]}},
            "needs quotes, which do not reach the job",
        ),
        ({"autoscaling": {"enabled": True, "minReplicas": 9}}, "is above autoscaling.maxReplicas"),
        ({"fullnameOverride": "7b"}, "set fullnameOverride"),
    ],
)
def test_a_contradiction_is_refused_with_its_remedy(values: dict[str, Any], message: str) -> None:
    with pytest.raises(HelmError, match=message):
        render(values)


def test_the_schema_is_part_of_the_package() -> None:
    assert chart().schema == SCHEMA


def closed_objects(schema: dict[str, Any], path: str = "") -> list[str]:
    """Places that describe keys and yet let others pass, or say nothing of what a value means."""
    found = []
    if "properties" in schema and schema.get("additionalProperties") is not False:
        found.append(f"{path}: open")
    if path and "description" not in schema:
        found.append(f"{path}: not described")
    for name, kind in schema.get("properties", {}).items():
        found += closed_objects(kind, f"{path}/{name}")
    if "properties" in schema.get("items", {}):
        found += closed_objects(schema["items"], f"{path}/items")
    return found


def test_the_schema_is_strict_and_described_throughout() -> None:
    assert closed_objects(SCHEMA) == []


def missing_defaults(schema: dict[str, Any], values: dict[str, Any], path: str = "") -> list[str]:
    found = []
    for name, kind in schema["properties"].items():
        if name not in values:
            found.append(f"{path}{name}")
        elif "properties" in kind:
            found += missing_defaults(kind, values[name], f"{path}{name}.")
    return found


def test_every_value_of_the_schema_has_its_default_in_sight() -> None:
    assert missing_defaults(SCHEMA, yaml.safe_load((CHART / "values.yaml").read_text())) == ["global"]


def test_the_table_of_the_readme_is_current() -> None:
    scope: dict[str, Any] = {"__name__": "readme", "__file__": str(ROOT / "helm" / "readme.py")}
    exec(compile((ROOT / "helm" / "readme.py").read_text(), "readme.py", "exec"), scope)
    text = (CHART / "README.md").read_text()

    assert scope["with_table"](text) == text, "run python helm/readme.py"


@pytest.mark.parametrize("case", [f"{name}.yaml" for name in VALUES_FILES])
def test_the_notes_hold_a_line_to_paste(case: str) -> None:
    values = values_of(case)
    notes = texts(values)["NOTES.txt"]

    assert "curl http://127.0.0.1:8000/v1/chat/completions" in notes
    assert ("Authorization: Bearer" in notes) == bool(values.get("auth", {}).get("enabled"))


def test_the_dashboard_in_the_chart_is_that_of_the_package() -> None:
    source = ROOT / "deploy" / "dashboards" / "paceline.json"
    dashboard = json.loads((CHART / "dashboards" / "paceline.json").read_text())

    assert dashboard["title"]
    if source.is_file():
        assert dashboard == json.loads(source.read_text()), f"copy {source} into the chart"
