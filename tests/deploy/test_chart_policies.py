"""What the pods of the Helm chart may do, who may reach them, and how long they may take to end."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from support.chart import EXAMPLES, Rendered, needs_chart_tools, rendered_examples

pytestmark = [needs_chart_tools, pytest.mark.slow]

HEALTH_PORT, METRICS_PORT = 8080, 9100
# Of each role: who may connect to the port of the fabric.
REACHED_BY = {"edge": set[str](), "scheduler": {"edge", "worker"}, "worker": {"edge", "scheduler"}}
IN_THE_IMAGE = "/models/default"  # the small model
FABRIC_PORTS = {"scheduler": 8010, "worker": 8020}


@pytest.fixture(params=EXAMPLES)
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return rendered_examples()[request.param]


def containers(pod: Any) -> Iterator[Any]:
    yield from (*pod.get("initContainers", ()), *pod["containers"])


def seconds(arguments: list[str], flag: str) -> int:
    (value,) = (one.partition("=")[2] for one in arguments if one.startswith(f"{flag}="))
    return int(value)


def role_of(labels: Mapping[str, str]) -> str:
    return labels["app.kubernetes.io/component"]


def test_pods_meet_the_restricted_standard(rendered: Rendered) -> None:
    allowed = {"configMap", "emptyDir", "secret", "persistentVolumeClaim"}
    for name, pod in rendered.pods():
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod), name
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert all(set(volume) - {"name"} <= allowed for volume in pod["volumes"]), name
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert not any("hostPort" in port for port in container["ports"]), name
            assert container["resources"]["limits"]["memory"], name
            assert "requests" in container["resources"], name


def test_pods_know_nothing_of_the_cluster(rendered: Rendered) -> None:
    for name, pod in rendered.pods():
        assert pod["automountServiceAccountToken"] is False, name
        assert pod["enableServiceLinks"] is False, name
        assert pod["serviceAccountName"] in rendered.of_kind("ServiceAccount"), name
    assert not any(rendered.of_kind(kind) for kind in ("Role", "ClusterRole", "RoleBinding"))


def test_grace_is_longer_than_all_steps_of_an_end(rendered: Rendered) -> None:
    for name, pod in rendered.pods():
        (container,) = pod["containers"]
        match container["name"]:
            case "edge":
                wait = container["lifecycle"]["preStop"]["sleep"]["seconds"]
                # `--close-s` may pass for the last message and for the closing handshake.
                needed = wait + seconds(container["args"], "--drain-s") + 2 * 2
            case "worker":
                needed = seconds(container["args"], "--drain-timeout-s") + 2
            case _:
                needed = 2
        assert pod["terminationGracePeriodSeconds"] > needed + 20, name


def test_rollout_of_edges_takes_none_away_before_its_successor_is_ready(rendered: Rendered) -> None:
    for name, deployment in rendered.of_kind("Deployment").items():
        if role_of(deployment["metadata"]["labels"]) == "edge":
            assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0, name


def test_probes_ask_the_listener_for_health(rendered: Rendered) -> None:
    paths = {"startupProbe": "/startupz", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
    for name, pod in rendered.pods():
        (container,) = pod["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert f"--health-listen=0.0.0.0:{ports['health']}" in container["args"], name
        for probe, path in paths.items():
            assert container[probe]["httpGet"] == {"path": path, "port": "health"}, name


def test_each_role_has_one_disruption_budget_that_blocks_no_drain(rendered: Rendered) -> None:
    budgets = rendered.of_kind("PodDisruptionBudget")
    for name, deployment in rendered.of_kind("Deployment").items():
        spec = budgets[name]["spec"]
        assert spec["selector"] == deployment["spec"]["selector"], name
        assert spec["maxUnavailable"] == 1, name


def test_secrets_are_files_that_only_the_group_can_read(rendered: Rendered) -> None:
    for name, pod in rendered.pods():
        secrets = [volume for volume in pod["volumes"] if "secret" in volume]
        assert all(volume["secret"]["defaultMode"] == 0o440 for volume in secrets), name
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"], name
        for container in containers(pod):
            mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
            assert all(mounts[volume["name"]]["readOnly"] for volume in secrets), name


def test_no_secret_is_an_argument_or_a_variable(rendered: Rendered) -> None:
    for name, pod in rendered.pods():
        for container in containers(pod):
            assert "envFrom" not in container, name
            sources = [one["valueFrom"] for one in container["env"] if "valueFrom" in one]
            assert all(set(source) == {"fieldRef"} for source in sources), name
            assert not {one["name"] for one in container["env"]} - {
                *("HOME", "OTEL_EXPORTER_OTLP_ENDPOINT", "POD_IP", "POD_NAME")
            }, name
            # What a flag of a secret names is a file.
            for argument in container["args"]:
                flag, _, value = argument.partition("=")
                if re.search(r"key|token|password|cert|tls", flag) and value:
                    assert value.startswith("/etc/duplane/"), argument
    assert not rendered.of_kind("Secret")


def test_every_file_of_an_argument_is_mounted(rendered: Rendered) -> None:
    for name, pod in rendered.pods():
        (container,) = pod["containers"]
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            volume["name"] for volume in pod["volumes"]
        }, name
        for argument in container["args"]:
            value = argument.partition("=")[2]
            if value.startswith("/") and value != IN_THE_IMAGE:
                assert any(f"{value}/".startswith(f"{mount}/") for mount in mounts), argument


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    return selector["matchLabels"].items() <= labels.items()


def reaching(rendered: Rendered, labels: Mapping[str, str], port: int) -> list[Any]:
    """Return the peers that may connect to a port of the pod with these labels; None is all."""
    peers: list[Any] = []
    for policy in rendered.of_kind("NetworkPolicy").values():
        if selects(policy["spec"]["podSelector"], labels):
            for rule in policy["spec"].get("ingress", ()):
                if port in {one["port"] for one in rule.get("ports", ())} or "ports" not in rule:
                    peers += rule.get("from", [None])
    return peers


def pod_labels(rendered: Rendered) -> Iterator[tuple[str, Mapping[str, str]]]:
    for name, deployment in rendered.of_kind("Deployment").items():
        yield name, deployment["spec"]["template"]["metadata"]["labels"]


def test_every_pod_is_isolated_in_both_directions(rendered: Rendered) -> None:
    policies = rendered.of_kind("NetworkPolicy")
    for name, labels in pod_labels(rendered):
        kinds = {
            kind
            for policy in policies.values()
            if selects(policy["spec"]["podSelector"], labels)
            for kind in policy["spec"]["policyTypes"]
        }
        assert kinds == {"Ingress", "Egress"}, name


def test_only_the_roles_that_call_a_role_reach_it(rendered: Rendered) -> None:
    labels = dict(pod_labels(rendered))
    for name, own in labels.items():
        role = role_of(own)
        for port in FABRIC_PORTS.values():
            peers = reaching(rendered, own, port)
            assert all(peer and set(peer) == {"podSelector"} for peer in peers), name
            callers = {
                role_of(other)
                for other in labels.values()
                if any(selects(peer["podSelector"], other) for peer in peers)
            }
            assert callers == (REACHED_BY[role] if port == FABRIC_PORTS.get(role) else set()), name
        # Operators reach an edge by port forwarding only.
        assert not reaching(rendered, own, 8007), name


def test_what_may_be_reached_may_also_be_called(rendered: Rendered) -> None:
    """A connection needs a rule at both ends."""
    labels = dict(pod_labels(rendered))
    for name, own in labels.items():
        allowed = {
            (role_of(other), port["port"])
            for policy in rendered.of_kind("NetworkPolicy").values()
            if selects(policy["spec"]["podSelector"], own)
            for rule in policy["spec"].get("egress", ())
            for port in rule["ports"]
            for peer in rule.get("to", ())
            for other in labels.values()
            if "podSelector" in peer
            and "namespaceSelector" not in peer
            and selects(peer["podSelector"], other)
        }
        role = role_of(own)
        assert allowed == {
            (to, port) for to, port in FABRIC_PORTS.items() if role in REACHED_BY[to]
        }, name


def test_nobody_reads_metrics_or_health_unless_a_value_says_who() -> None:
    for name, expected in {"three-pools": 1, "first-try": 0}.items():
        rendered = rendered_examples()[name]
        for _, labels in pod_labels(rendered):
            for port in (HEALTH_PORT, METRICS_PORT):
                peers = reaching(rendered, labels, port)
                assert len(peers) == expected, name
                assert None not in peers, name


def test_only_schedulers_reach_etcd() -> None:
    rendered = rendered_examples()["three-pools"]
    etcd = {"app.kubernetes.io/name": "etcd"}
    peers = [peer["podSelector"] for peer in reaching(rendered, etcd, 2379)]
    callers = {
        role_of(labels)
        for _, labels in pod_labels(rendered)
        if any(selects(peer, labels) for peer in peers)
    }
    assert callers == {"scheduler"}
    # Members reach each other at all ports.
    assert {"matchLabels": etcd} in peers


def test_services_select_the_pods_of_their_role(rendered: Rendered) -> None:
    labels = dict(pod_labels(rendered))
    for name, service in rendered.of_kind("Service").items():
        selected = [
            pod for pod, own in labels.items() if service["spec"]["selector"].items() <= own.items()
        ]
        assert selected == [name]
    scheduler = rendered.of_kind("Service")["duplane-scheduler"]
    assert scheduler["spec"]["clusterIP"] == "None"


def test_certificates_name_the_roles_of_the_pods_that_show_them() -> None:
    rendered = rendered_examples()["one-node"]
    certificates = {
        one["spec"]["secretName"]: one["spec"] for one in rendered.of_kind("Certificate").values()
    }
    for name, pod in rendered.pods():
        (volume,) = (one for one in pod["volumes"] if one["name"] == "certificate")
        role = pod["containers"][0]["name"]
        spec = certificates[volume["secret"]["secretName"]]
        assert spec["dnsNames"] == [f"{role}.duplane.internal"], name
        assert spec["uris"] == [f"spiffe://duplane.internal/duplane/{role}/duplane"], name
        assert spec["privateKey"]["algorithm"] == "ECDSA", name
    # A worker may attach only with an id that begins with the name in its certificate.
    assert "--worker-id=duplane-$(POD_NAME)" in rendered.arguments("duplane-worker-main")
    other = rendered_examples()["certificate-secrets"]
    assert "--worker-id=fabric-$(POD_NAME)" in other.arguments("duplane-worker-main")


def test_pool_with_a_gpu_uses_it_and_the_image_for_it() -> None:
    rendered = rendered_examples()["three-pools"]
    (large,) = rendered.pod("duplane-worker-large")["containers"]
    assert large["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "--device=cuda:0" in large["args"]
    assert large["image"].startswith("registry.example.com/speech/duplane-worker-cuda:")
    (trial,) = rendered.pod("duplane-worker-trial")["containers"]
    assert "nvidia.com/gpu" not in trial["resources"]["limits"]
    assert "--device=cpu" in trial["args"]
    assert trial["image"].startswith("registry.example.com/speech/duplane-worker-cpu:")
