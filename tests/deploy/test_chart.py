"""The Helm chart: its examples are valid, and values that contradict each other are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from support.chart import CHART, EXAMPLES, Rendered, needs_chart_tools, render, rendered_examples
from support.paths import ROOT

pytestmark = [needs_chart_tools, pytest.mark.slow]

EDGE = {"name": "main", "pool": "main"}
OPEN = {"auth": "none"}
POOL = {"name": "main"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown name": ({"edgeDefault": {}}, r"additional properties 'edgeDefault' not allowed"),
    "unknown field": ({"pools": [{**POOL, "slot": 4}]}, r"/pools/0': .*'slot' not allowed"),
    "wrong type": ({"pools": [{**POOL, "slots": "4"}]}, r"/pools/0/slots': got string"),
    "two GPUs": ({"pools": [{**POOL, "gpus": 2}]}, r"/pools/0/gpus': maximum: got 2, want 1"),
    "no pool": ({"pools": []}, r"/pools': minItems"),
    "name of a pool": ({"pools": [{"name": "A_b"}]}, r"/pools/0/name': 'A_b' does not match"),
    "path of a model": (
        {"pools": [{**POOL, "checkpoint": "models"}]},
        r"/pools/0/checkpoint': 'models' does not match",
    ),
    "flag": ({"scheduler": {"extraArgs": ["ticket-limit=1"]}}, r"/scheduler/extraArgs/0'"),
    "level of a log": ({"logging": {"level": "LOUD"}}, r"/logging/level': value must be one of"),
    "issuer over http": (
        {"edges": [{**EDGE, "jwt": {"jwks": "http://a", "issuer": "i", "audience": "a"}}]},
        r"/edges/0/jwt/jwks'",
    ),
    "issuer without its name": (
        {"edges": [{**EDGE, "jwt": {"jwks": "https://a"}}]},
        r"/edges/0/jwt': properties 'issuer', 'audience' required, if 'jwks' exists",
    ),
    "keys of nobody": ({}, r"edges\[0\]\.apiKeysSecret is empty"),
    "keys for everybody": (
        {"edgeDefaults": {**OPEN, "apiKeysSecret": "a"}},
        r"edges\[0\]\.auth is none",
    ),
    "tokens of one replica": (
        {"edgeDefaults": {"apiKeysSecret": "a"}},
        r"edges\[0\]\.tokenKeySecret is empty: 2 replicas",
    ),
    "edge of no pool": (
        {"edgeDefaults": OPEN, "edges": [{"name": "main", "pool": "other"}]},
        r"edges\[0\]\.pool is other, must be the name of a pool: main",
    ),
    "pool twice": (
        {"edgeDefaults": OPEN, "pools": [POOL, POOL]},
        r"pools\[1\]\.name: there are two pools with the name main",
    ),
    "edge twice": (
        {"edgeDefaults": OPEN, "edges": [EDGE, EDGE]},
        r"edges\[1\]\.name: there are two edges with the name main",
    ),
    "model of no volume": (
        {"edgeDefaults": OPEN, "pools": [{**POOL, "checkpoint": "/models/a"}]},
        r"pools\[0\]\.modelVolume is empty",
    ),
    "several schedulers with memory": (
        {"edgeDefaults": OPEN, "scheduler": {"replicas": 3}},
        r"scheduler\.replicas is 3",
    ),
    "etcd nowhere": (
        {"edgeDefaults": OPEN, "scheduler": {"store": "etcd"}},
        r"scheduler\.etcd\.endpoints is empty",
    ),
    "etcd without TLS": (
        {"edgeDefaults": OPEN, "scheduler": {"store": "etcd", "etcd": {"endpoints": ["e:2379"]}}},
        r"scheduler\.etcd\.tlsSecret is empty",
    ),
    "certificates of nobody": (
        {"edgeDefaults": OPEN, "fabric": {"certificates": {"source": "secrets"}}},
        r"fabric\.certificates\.secrets\.edge is empty",
    ),
    "scaling without Prometheus": (
        {"edgeDefaults": OPEN, "pools": [{**POOL, "autoscaling": {"enabled": True}}]},
        r"keda\.prometheusUrl is empty: pools\[0\]\.autoscaling\.enabled is true",
    ),
    "scaling downwards": (
        {"edgeDefaults": OPEN, "pools": [{**POOL, "autoscaling": {"min": 5, "max": 2}}]},
        r"pools\[0\]\.autoscaling\.min is 5",
    ),
    "no rollout": (
        {"edgeDefaults": OPEN, "pools": [{**POOL, "update": {"maxUnavailable": 0}}]},
        r"pools\[0\]\.update: maxSurge and maxUnavailable must not both be 0",
    ),
    "ingress without hosts": (
        {"edgeDefaults": {**OPEN, "ingress": {"enabled": True}}},
        r"edges\[0\]\.hosts is empty",
    ),
    "flag of the chart": (
        {"edgeDefaults": {**OPEN, "extraArgs": ["--listen=0.0.0.0:1"]}},
        r"edges\[0\]\.extraArgs: the chart sets --listen from another value",
    ),
    "secret in an argument": (
        {"edgeDefaults": {**OPEN, "extraArgs": ["--admin-token=hidden"]}},
        r"edges\[0\]\.extraArgs: --admin-token is refused",
    ),
}


@pytest.fixture(scope="module")
def refused() -> Mapping[str, Rendered]:
    return render({name: values for name, (values, _) in REFUSED.items()})


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_passes_lint_and_the_schemas_of_three_versions_of_kubernetes(name: str) -> None:
    rendered = rendered_examples()[name]
    assert not rendered.error
    assert not rendered.problems
    assert {"Deployment", "NetworkPolicy", "PodDisruptionBudget", "Service"} <= {
        document["kind"] for document in rendered.documents
    }


@pytest.mark.parametrize("name", REFUSED)
def test_broken_values_are_refused_by_their_name(
    name: str, refused: Mapping[str, Rendered]
) -> None:
    assert re.search(REFUSED[name][1], refused[name].error), refused[name].error


def test_refused_argument_does_not_appear_in_the_message(refused: Mapping[str, Rendered]) -> None:
    assert "hidden" not in refused["secret in an argument"].error


def test_every_value_is_documented_and_has_a_schema() -> None:
    """The schema refuses unknown names everywhere, so a value without a schema cannot be set."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert not render({"none": {**values, "edgeDefaults": OPEN}})["none"].error
    texts = (CHART / "values.yaml").read_text()
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    names = {name for name, _ in properties(schema)} - {"global"}
    assert not [name for name in names if not re.search(rf"\b{name}:", texts)]
    assert not [name for name, found in properties(schema) if is_open(found)]


def properties(schema: Any) -> list[tuple[str, Any]]:
    """Return all properties of a schema, also nested ones."""
    if not isinstance(schema, dict):
        return []
    here = list(schema.get("properties", {}).items())
    inner = [*here, *schema.get("definitions", {}).items()]
    return here + [found for _, value in inner for found in properties(value)]


def is_open(schema: Mapping[str, Any]) -> bool:
    return "properties" in schema and schema.get("additionalProperties") is not False


def test_chart_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version
    assert (chart["version"], chart["appVersion"]) == (version[1], version[1])


def test_rules_of_the_chart_are_those_of_the_repository() -> None:
    (rule,) = rendered_examples()["three-pools"].of_kind("PrometheusRule").values()
    rules = (ROOT / "deploy/rules.yml").read_text()
    linked = rules.replace("../docs/", "https://docs.example.com/duplane/")
    assert rule["spec"] == yaml.safe_load(linked) != yaml.safe_load(rules)
    (monitor,) = rendered_examples()["three-pools"].of_kind("PodMonitor").values()
    # The alerts find the processes by a job whose name begins with duplane.
    label = monitor["spec"]["jobLabel"]
    for name, deployment in rendered_examples()["three-pools"].of_kind("Deployment").items():
        assert deployment["spec"]["template"]["metadata"]["labels"][label] == "duplane", name


def test_fields_of_a_pool_replace_those_of_the_defaults() -> None:
    volume = {"nfs": {"server": "files", "path": "/models"}}
    values = {
        "edgeDefaults": OPEN,
        "poolDefaults": {
            "modelVolume": {"persistentVolumeClaim": {"claimName": "models"}},
            "labels": {"zone": "a"},
            "slots": 8,
            "update": {"maxSurge": 2},
        },
        "pools": [
            POOL,
            {"name": "own", "modelVolume": volume, "labels": {"tier": "b"}, "slots": 1},
            {"name": "none", "modelVolume": {}, "labels": {}, "update": {"maxUnavailable": 3}},
        ],
    }
    rendered = render({"pools": values})["pools"]
    models = {
        name: [volume for volume in pod["volumes"] if volume["name"] == "models"]
        for name, pod in rendered.pods()
        if "worker" in name
    }
    claim = {"persistentVolumeClaim": {"claimName": "models"}}
    assert models == {
        "duplane-worker-main": [{"name": "models", **claim}],
        "duplane-worker-own": [{"name": "models", **volume}],
        "duplane-worker-none": [],
    }
    assert {"--label=zone=a", "--slots=8"} <= set(rendered.arguments("duplane-worker-main"))
    assert {"--label=tier=b", "--slots=1"} <= set(rendered.arguments("duplane-worker-own"))
    none = rendered.of_kind("Deployment")["duplane-worker-none"]["spec"]
    assert none["strategy"]["rollingUpdate"] == {"maxSurge": 2, "maxUnavailable": 3}
    assert not [one for one in rendered.arguments("duplane-worker-none") if "--label" in one]


def test_workers_follow_the_recorded_demand_of_their_pool() -> None:
    rendered = rendered_examples()["three-pools"]
    scaled = rendered.of_kind("ScaledObject")
    assert set(scaled) == {"duplane-worker-standard", "duplane-worker-large"}
    spec = scaled["duplane-worker-large"]["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (1, 4)
    (trigger,) = spec["triggers"]
    assert trigger["metadata"]["query"] == 'sum(duplane:demanded_slots{pool="large"})'
    assert float(trigger["metadata"]["threshold"]) == pytest.approx(32 * 0.7)
    rules = yaml.safe_load((ROOT / "deploy/rules.yml").read_text())["groups"]
    assert "duplane:demanded_slots" in {rule.get("record") for rule in rules[0]["rules"]}
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleDown"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 600}]
    # KEDA sets the number of replicas, so an upgrade of the release must not.
    for name, deployment in rendered.of_kind("Deployment").items():
        assert ("replicas" in deployment["spec"]) == (name not in scaled), name
    assert "--pools=standard,large,trial" in rendered.arguments("duplane-scheduler")


def test_examples_without_the_operators_of_others_have_none_of_their_kinds() -> None:
    groups = {
        name: {document["apiVersion"].partition("/")[0] for document in rendered.documents}
        for name, rendered in rendered_examples().items()
    }
    assert not groups["certificate-secrets"] & {"cert-manager.io", "keda.sh"}
    assert not groups["first-try"] & {"keda.sh", "monitoring.coreos.com"}
    assert groups["three-pools"] >= {"cert-manager.io", "keda.sh", "monitoring.coreos.com"}
