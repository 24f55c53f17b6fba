"""For every values file and toggle, what the chart renders is taken by Kubernetes, KubeRay, Serve and us."""

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from chart import (
    API_KEY,
    CASES,
    CHART,
    GOLDEN,
    HF_TOKEN,
    TOGGLES,
    UPDATE_GOLDEN,
    VALUES_FILES,
    containers,
    of_kind,
    pod_templates,
    render,
    serve_config,
    texts,
    values_of,
)
from helm_python.chart import lint
from kuberay import faults

from paceline.cluster.errors import ConfigError
from paceline.deploy.ingress import GRPC_MESSAGE_BYTES, SERVE_ENVIRONMENT
from paceline.deploy.serve_config import check_serve_config

OLDEST, NEWEST = "1.28", "1.37"  # the first is what Chart.yaml takes
BUILT_IN = {
    "ConfigMap",
    "Ingress",
    "NetworkPolicy",
    "PersistentVolumeClaim",
    "Pod",
    "PodDisruptionBudget",
    "Secret",
    "ServiceAccount",
}
CUSTOM = {"RayService", "RayJob", "HTTPRoute", "PodMonitor", "ServiceMonitor", "PrometheusRule"}


@pytest.fixture(scope="module", autouse=True)
def read_each_schema_once() -> Iterator[None]:
    read = kubernetes_validate.utils.schema_contents
    kubernetes_validate.utils.schema_contents = cache(read)
    yield
    kubernetes_validate.utils.schema_contents = read


@pytest.mark.parametrize("case", CASES)
def test_helm_lints_it(case: str) -> None:
    found = lint(CHART, values_of(case), strict=True)

    assert [message for message in found["messages"] if message["severity"] > 1] == []
    assert found["errors"] == []


@pytest.mark.parametrize("case", CASES)
def test_kubernetes_takes_it(case: str) -> None:
    objects = render(values_of(case))
    pods = [{"apiVersion": "v1", "kind": "Pod", **pod} for pod in pod_templates(objects)]
    for pod in pods:
        pod["metadata"] = {"name": "pod", **pod["metadata"]}

    assert {found["kind"] for found in objects} <= BUILT_IN | CUSTOM
    assert pods
    for found in [*pods, *(found for found in objects if found["kind"] in BUILT_IN)]:
        for version in (OLDEST, NEWEST) if case.endswith(".yaml") else (NEWEST,):
            kubernetes_validate.validate(found, version, strict=True)


@pytest.mark.parametrize("case", CASES)
def test_kuberay_takes_it(case: str) -> None:
    objects = render(values_of(case))
    (service,) = of_kind(objects, "RayService")

    assert faults(service) == []
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", service["metadata"]["name"])
    for job in of_kind(objects, "RayJob"):
        assert faults(job) == []


@pytest.mark.parametrize("case", CASES)
def test_serve_and_paceline_take_its_configuration(case: str) -> None:
    (config,) = check_serve_config(serve_config(render(values_of(case))))

    assert config.server.drain_s > 0


def test_planted_faults_are_seen() -> None:
    objects = render({})
    (service,), document = of_kind(objects, "RayService"), serve_config(objects)
    worker = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    worker["maxReplica"] = worker.pop("maxReplicas")
    service["spec"]["serveConfigv2"] = service["spec"].pop("serveConfigV2")
    container = worker["template"]["spec"]["containers"][0]
    container["ports"][0]["containerPort"] = "8080"
    document["applications"][0]["args"]["max_num_seq"] = 8

    text = "\n".join(faults(service))
    assert "'serveConfigv2' was unexpected" in text
    assert "workerGroupSpecs[0]: Additional properties are not allowed ('maxReplica'" in text
    assert "containerPort: '8080' is not of type 'integer'" in text
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        check_serve_config(document)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": worker["template"]["spec"]}
    with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError)):
        kubernetes_validate.validate(pod, NEWEST, strict=True)


@pytest.mark.parametrize("case", CASES)
def test_every_container_is_confined(case: str) -> None:
    for pod in pod_templates(render(values_of(case))):
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["spec"]["serviceAccountName"]
        for container in containers(pod):
            if container["name"] in ("warm", "logs"):  # the user's own
                continue
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["resources"]["limits"]["memory"]
            assert "/tmp" in {mount["mountPath"] for mount in container.get("volumeMounts", [])} or (
                container["name"] == "chat"
            )


@pytest.mark.parametrize("case", CASES)
def test_no_pod_gets_variables_that_paceline_would_take_for_options(case: str) -> None:
    for pod in pod_templates(render(values_of(case))):
        assert pod["spec"]["enableServiceLinks"] is False
        names = {variable["name"] for container in containers(pod) for variable in container.get("env", [])}

        assert {name for name in names if name.startswith("PACELINE_")} <= {"PACELINE_CACHE"}


@pytest.mark.parametrize("case", CASES)
def test_the_token_of_the_service_account_is_where_the_autoscaler_needs_it(case: str) -> None:
    objects = render(values_of(case))
    is_needed = bool(values_of(case).get("nodeAutoscaling", {}).get("enabled"))
    mounted = [pod for pod in pod_templates(objects) if pod["spec"]["automountServiceAccountToken"]]

    assert {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in mounted} == (
        {"head"} if is_needed else set()
    )


def test_secrets_are_in_secrets_and_nowhere_in_plain_text() -> None:
    values = TOGGLES["created secrets"]
    objects = render(values)
    secrets = of_kind(objects, "Secret")

    assert len(secrets) == 2
    assert all("stringData" not in secret for secret in secrets)
    rendered = "\n".join(texts(values).values())
    assert API_KEY not in rendered
    assert HF_TOKEN not in rendered
    others = json.dumps([found for found in objects if found["kind"] != "Secret"])
    assert not any(text in others for secret in secrets for text in secret["data"].values())


def test_existing_secrets_are_named_and_none_is_made() -> None:
    objects = render(TOGGLES["existing secrets"])

    assert of_kind(objects, "Secret") == []
    (service,) = of_kind(objects, "RayService")
    assert service["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token", "secretName": "ray"}
    for pod in pod_templates([service]):
        (token,) = [v for v in pod["spec"]["containers"][0]["env"] if v["name"] == "HF_TOKEN"]
        assert token["valueFrom"]["secretKeyRef"] == {"name": "hf", "key": "token"}


@pytest.mark.parametrize("name", VALUES_FILES)
def test_the_values_files_render_as_before(name: str) -> None:
    """A change is looked at as a difference of the file; UPDATE_GOLDEN=1 writes it."""
    rendered = yaml.safe_dump_all(render(values_of(f"{name}.yaml")), sort_keys=True, width=110)
    golden = GOLDEN / f"{name}.yaml"
    if UPDATE_GOLDEN:
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(rendered)

    assert rendered == golden.read_text()


def env_of(pod: dict[str, Any]) -> dict[str, str]:
    return {v["name"]: v.get("value", "") for v in pod["spec"]["containers"][0]["env"]}


def test_serve_treats_replicas_as_under_paceline_serve() -> None:
    for pod in pod_templates(of_kind(render({}), "RayService")):
        assert env_of(pod).items() >= SERVE_ENVIRONMENT.items()
        assert int(env_of(pod)["RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"]) == GRPC_MESSAGE_BYTES


@pytest.mark.parametrize("drain_s", [1, 120, 3600])
def test_each_grace_is_longer_than_what_it_waits_for(drain_s: int) -> None:
    objects = render({"server": {"drainSeconds": drain_s}})
    (service,) = of_kind(objects, "RayService")
    (config,) = check_serve_config(serve_config(objects))
    for pod in pod_templates([service]):
        node_drain_s = float(env_of(pod)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])

        assert config.server.drain_s + 40 <= node_drain_s < pod["spec"]["terminationGracePeriodSeconds"]
    assert config.server.drain_s < service["spec"]["rayClusterDeletionDelaySeconds"]


def test_a_rollout_replaces_replicas_and_keeps_the_pods() -> None:
    before, after = ([found] for found in map(one_service, ({}, {"rollout": "keys of May"})))

    assert before[0]["spec"]["rayClusterConfig"] == after[0]["spec"]["rayClusterConfig"]
    assert serve_config(before) != serve_config(after)


def one_service(values: dict[str, Any]) -> dict[str, Any]:
    (service,) = of_kind(render(values), "RayService")
    return service


def test_an_upgrade_of_the_chart_alone_keeps_the_cluster() -> None:
    """KubeRay starts a second cluster for any change of the pods, so they name no version of the chart."""
    (service,) = of_kind(render({}), "RayService")

    assert "helm.sh/chart" in service["metadata"]["labels"]
    assert "helm.sh/chart" not in json.dumps(service["spec"]["rayClusterConfig"])


def test_a_worker_group_may_name_a_shared_value_again() -> None:
    (service,) = of_kind(render(TOGGLES["two groups"]), "RayService")
    h100, spare = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]

    assert h100["template"]["spec"]["nodeSelector"] == {"pool": "gpu"}
    assert h100["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert "nodeSelector" not in spare["template"]["spec"]
    assert "nvidia.com/gpu" not in spare["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert spare["template"]["spec"]["tolerations"] == [{"key": "spot"}]


def test_the_network_is_closed_but_for_what_is_needed() -> None:
    (policy,) = of_kind(render(TOGGLES["closed network"]), "NetworkPolicy")
    inside, clients, metrics, operator = policy["spec"]["ingress"]

    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert "ports" not in inside
    assert inside["from"] == [{"podSelector": policy["spec"]["podSelector"]}]
    assert clients["ports"] == [{"port": 8000}]
    assert {rule["port"] for rule in metrics["ports"]} == {8000, 8080, 30000}
    assert {rule["port"] for rule in operator["ports"]} == {8000, 8265}
    assert {"port": 443} not in [p for rule in policy["spec"]["egress"] for p in rule.get("ports", [])]


def test_a_scrape_of_a_pod_names_ports_that_the_pod_has() -> None:
    objects = render(TOGGLES["monitoring"])
    (monitor,) = of_kind(objects, "PodMonitor")
    wanted = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    _, worker, *_ = pod_templates(of_kind(objects, "RayService"))

    assert wanted == {"metrics", "replica-0", "replica-1"}
    assert wanted <= {port["name"] for port in worker["spec"]["containers"][0]["ports"]}


def test_a_batch_is_one_job_each_with_a_cluster_of_its_own() -> None:
    first, second = of_kind(render(TOGGLES["batch"]), "RayJob")

    assert first["metadata"]["name"] == "demo-paceline-batch-nightly"
    assert second["metadata"]["name"] == "demo-paceline-batch-second"
    assert first["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 4
    head, worker = (pod["spec"] for pod in list(pod_templates([first]))[1:])
    assert "batch" in {volume["name"] for volume in head["volumes"]}
    assert "batch" not in {volume["name"] for volume in worker["volumes"]}
    assert {"name": "batch", "mountPath": "/batch"} in head["containers"][0]["volumeMounts"]
    words = first["spec"]["entrypoint"].split()
    assert words[:5] == ["python", "-m", "paceline.deploy.batch", "/batch/in.jsonl", "/batch/out.jsonl"]
    assert words[words.index("--replicas") + 1] == "4"
    assert words[-1] == "--ordered"
    assert not any("api-key" in word for word in words)
