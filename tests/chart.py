"""The chart as tests see it: rendered in memory, for the values files and for a matrix of toggles."""

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from helm_python.chart import Chart

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "helm" / "paceline"
GOLDEN = Path(__file__).parent / "helm" / "golden"
UPDATE_GOLDEN = "UPDATE_GOLDEN" in os.environ
Object = dict[str, Any]

VALUES_FILES = sorted(path.stem for path in (CHART / "values").glob("*.yaml"))
API_KEY, HF_TOKEN = "sk-paceline-0123456789", "hf_abcdefghij"
KEYS: Object = {"auth": {"enabled": True, "keys": [API_KEY]}}

TOGGLES: dict[str, Object] = {
    "defaults": {},
    "names": {"fullnameOverride": "chat", "commonLabels": {"team": "a"}, "commonAnnotations": {"note": "b"}},
    "image": {
        "image": {"repository": "registry.local/paceline", "digest": "sha256:" + "0" * 64},
        "imagePullSecrets": [{"name": "registry"}],
    },
    "engine": {
        "model": {"name": "org/model", "revision": "main", "servedName": "m", "maxModelLen": 4096},
        "drafter": {"name": "org/drafter", "numDraftTokens": 7, "draftBudget": False, "contextCap": 0},
        "engine": {"tensorParallelSize": 2, "prefixCache": False, "kvCacheGiB": 1.5, "maxNumSeqs": 64},
        "worker": {"numGpus": 2},
        "server": {"logFormat": "json", "playground": False},
        "tracing": {"otlpEndpoint": "http://collector:4318", "sampleRatio": 0.1},
        "extraArgs": {"max_stream_backlog": 8192, "check_invariants": True},
    },
    "created secrets": KEYS | {"hfToken": {"value": HF_TOKEN}},
    "existing secrets": {
        "auth": {"enabled": True, "existingSecret": "keys"},
        "hfToken": {"existingSecret": "hf"},
        "rayAuth": {"existingSecret": "ray"},
    },
    "autoscaling": {
        "autoscaling": {"enabled": True, "initialReplicas": 2},
        "nodeAutoscaling": {"enabled": True},
        "workerGroups": [{"name": "gpu", "replicas": 1, "minReplicas": 0, "maxReplicas": 8}],
        "maxReplicasPerNode": 1,
        "rollout": "2",
    },
    "two groups": {
        "worker": {
            "nodeSelector": {"pool": "gpu"},
            "priorityClassName": "high",
            "runtimeClassName": "nvidia",
        },
        "workerGroups": [
            {"name": "h100", "replicas": 2, "numGpus": 8, "shmSize": "16Gi"},
            {
                "name": "spare",
                "replicas": 0,
                "numGpus": 0,
                "nodeSelector": {},
                "tolerations": [{"key": "spot"}],
            },
        ],
    },
    "ingress": KEYS
    | {
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "hosts": ["llm.example.org"],
            "tls": [{"hosts": ["llm.example.org"], "secretName": "llm-tls"}],
        }
    },
    "anonymous ingress": {"auth": {"allowAnonymous": True}, "ingress": {"enabled": True}},
    "http route": KEYS
    | {"httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}], "requestTimeout": "3600s"}},
    "load balancer": KEYS
    | {"service": {"type": "LoadBalancer", "loadBalancerSourceRanges": ["10.0.0.0/8"], "labels": {"a": "b"}}},
    "incremental upgrade": {
        "upgrade": {
            "type": "NewClusterWithIncrementalUpgrade",
            "incremental": {"gatewayClassName": "istio"},
            "clusterDeletionDelaySeconds": 0,
        }
    },
    "redis": {
        "gcsFaultTolerance": {
            "enabled": True,
            "externalStorageNamespace": "ray",
            "redis": {"address": "redis:6380", "existingSecret": "redis", "usernameKey": "user"},
        }
    },
    "rocksdb": {"gcsFaultTolerance": {"enabled": True, "backend": "rocksdb"}},
    "rocksdb claim": {
        "gcsFaultTolerance": {"enabled": True, "backend": "rocksdb", "storage": {"claimName": "gcs"}}
    },
    "cache claim": {"cache": {"persistence": {"enabled": True, "storageClassName": "fast"}}},
    "existing cache": {"cache": {"persistence": {"enabled": True, "existingClaim": "models"}}},
    "bounded cache": {"cache": {"sizeLimit": "50Gi"}},
    "open network": {"networkPolicy": {"enabled": False}},
    "closed network": {
        "networkPolicy": {
            "clients": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}],
            "metricsClients": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
            "egress": {"internet": False, "extra": [{"ports": [{"port": 3128}]}]},
        }
    },
    "monitoring": {
        "monitoring": {
            "numReplicaPorts": 2,
            "keySecret": "metrics",
            "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "serviceMonitor": {"enabled": True},
            "prometheusRule": {"enabled": True},
            "dashboard": {"enabled": True, "annotations": {"folder": "LLM"}},
        }
    },
    "plain proxy": {"haproxy": {"enabled": False}, "monitoring": {"podMonitor": {"enabled": True}}},
    "grpc": {"grpc": {"enabled": True, "port": 9001}},
    "extras": {
        "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
        "envFrom": [{"configMapRef": {"name": "proxy"}}],
        "extraVolumes": [{"name": "models", "hostPath": {"path": "/models"}}],
        "extraVolumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
        "initContainers": [{"name": "warm", "image": "x", "securityContext": {"runAsNonRoot": True}}],
        "sidecars": [{"name": "logs", "image": "{{ .Release.Name }}-logs"}],
        "podLabels": {"a": "b"},
        "podAnnotations": {"c": "d"},
        "head": {"livenessProbe": {"exec": {"command": ["true"]}}, "rayStartParams": {"num-cpus": "1"}},
        "extraObjects": [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-more"}}
        ],
    },
    "batch": KEYS
    | {
        "batch": {
            "existingClaim": "batch",
            "numWorkers": 4,
            "activeDeadlineSeconds": 86400,
            "jobs": [
                {
                    "name": "nightly",
                    "input": "/batch/in.jsonl",
                    "output": "/batch/out.jsonl",
                    "args": ["--ordered"],
                },
                {"name": "second", "input": "/batch/b.jsonl", "output": "/batch/b-out.jsonl"},
            ],
        }
    },
    "bare": {
        "serviceAccount": {"create": False},
        "podDisruptionBudget": {"enabled": False},
        "tests": {"enabled": False},
        "networkPolicy": {"enabled": False},
    },
}
CASES = [*(f"{name}.yaml" for name in VALUES_FILES), *TOGGLES]


@cache
def chart() -> Chart:
    return Chart.load(CHART)


def values_of(case: str) -> Object:
    if case.endswith(".yaml"):
        return yaml.safe_load((CHART / "values" / case).read_text())
    return TOGGLES[case]


def texts(values: Object) -> dict[str, str]:
    """Rendered files by their name under templates/."""
    return _texts(json.dumps(values))


@cache
def _texts(values: str) -> dict[str, str]:
    rendered = chart().render(json.loads(values), name="demo", namespace="llm")
    return {name.removeprefix("paceline/templates/"): text for name, text in rendered.items()}


def render(values: Object) -> list[Object]:
    """The objects, in the order of their files."""
    files = sorted((name, text) for name, text in texts(values).items() if name.endswith(".yaml"))
    return [found for _, text in files for found in yaml.safe_load_all(text) if found]


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [found for found in objects if found["kind"] == kind]


def pod_templates(objects: list[Object]) -> Iterator[Object]:
    """Everything with a pod's `metadata` and `spec`, wherever it is."""
    for found in objects:
        spec = found.get("spec", {})
        if found["kind"] == "Pod":
            yield found
        if "submitterPodTemplate" in spec:
            yield spec["submitterPodTemplate"]
        if cluster := spec.get("rayClusterConfig") or spec.get("rayClusterSpec"):
            yield from (
                group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
            )


def containers(pod: Object) -> list[Object]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def serve_config(objects: list[Object]) -> Object:
    (service,) = of_kind(objects, "RayService")
    return yaml.safe_load(service["spec"]["serveConfigV2"])
