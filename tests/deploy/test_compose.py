"""The compose file: its flags are those of the commands, and its services have no rights."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.check_programs import run_check
from support.compose import FOLDER, is_ours, services
from support.paths import ROOT

from duplane.tools import servers
from duplane.tools.command import parse_settings

VERBS = {"edge": servers.edge, "scheduler": servers.scheduler, "worker": servers.worker}
SERVICES = {name: {"command": [""], **service} for name, service in services().items()}
ROLES = [name for name, service in SERVICES.items() if service["command"][0] in VERBS]

each_role = pytest.mark.parametrize("name", ROLES)
each_service = pytest.mark.parametrize("name", SERVICES)


@pytest.fixture
def settings_of(tmp_path: Path) -> Callable[[str], Any]:
    """Return the settings of a service; its certificates are in `tmp_path`."""

    def settings_of(name: str) -> Any:
        verb, *arguments = SERVICES[name]["command"]
        arguments = [argument.replace("=/certs", f"={tmp_path}") for argument in arguments]
        return parse_settings(VERBS[verb], arguments, {})

    return settings_of


@pytest.mark.slow
def test_the_files_have_the_form_of_the_specification() -> None:
    files = sorted(FOLDER.glob("compose*.yaml"))
    assert len(files) == 2
    run_check("check-jsonschema", "--builtin-schema", "vendor.compose-spec", *files)


def test_the_fabric_is_whole() -> None:
    verbs = [SERVICES[name]["command"][0] for name in ROLES]
    assert sorted(verbs) == ["edge", *["scheduler"] * 3, *["worker"] * 2]
    assert set(SERVICES) - set(ROLES) == {
        "certificates",
        "etcd",
        "operator",
        "prometheus",
        "grafana",
    }


@each_service
def test_no_service_has_rights_of_the_host(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "devices", "pid", "ipc"} & set(service)
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    if is_ours(service):
        assert service["user"] == "10001:10001"
        assert {"pids_limit", "mem_limit"} <= set(service)


@each_role
def test_a_process_sees_only_the_certificate_of_its_role(name: str) -> None:
    (mount,) = [
        volume for volume in SERVICES[name]["volumes"] if volume["source"] == "certificates"
    ]
    assert f"--fabric-tls={mount['target']}" in SERVICES[name]["command"]
    assert mount["read_only"] is True
    assert mount["volume"] == {"subpath": SERVICES[name]["command"][0]}


@each_role
def test_processes_find_each_other(name: str) -> None:
    """Each address is a service that listens at this port, in a network of this service."""
    text = " ".join(SERVICES[name]["command"])
    found = re.findall(r"([a-z][a-z0-9-]*):(\d+)", text)
    assert found
    for other, port in found:
        assert set(SERVICES[other]["networks"]) & set(SERVICES[name]["networks"])
        assert f"0.0.0.0:{port}" in " ".join(SERVICES[other]["command"])


def test_a_service_has_time_to_drain(settings_of: Callable[[str], Any]) -> None:
    assert SERVICES["edge"]["stop_grace_period"] == "660s"
    assert settings_of("edge").limits.drain_s < 660


def test_only_schedulers_reach_etcd() -> None:
    in_store = {
        name for name, service in SERVICES.items() if "store" in service.get("networks", ())
    }
    assert in_store == {"etcd", "scheduler-1", "scheduler-2", "scheduler-3"}


def test_prometheus_scrapes_every_process(settings_of: Callable[[str], Any]) -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    (group,) = job["static_configs"]
    assert set(group["targets"]) == {f"{name}:9100" for name in ROLES}
    for name in ROLES:
        assert settings_of(name).metrics_listen == "0.0.0.0:9100"


@each_service
def test_what_is_mounted_exists(name: str) -> None:
    for volume in SERVICES[name].get("volumes", ()):
        source = volume.partition(":")[0] if isinstance(volume, str) else volume["source"]
        if source.startswith("."):
            assert (FOLDER / source).resolve().is_file(), source
    build = SERVICES[name].get("build")
    if build:
        context = (FOLDER / build["context"]).resolve()
        assert context == ROOT
        assert (context / build["dockerfile"]).is_file()


def test_a_gpu_belongs_to_one_worker() -> None:
    text = (FOLDER / "compose.gpu.yaml").read_text()
    workers = yaml.safe_load(text)["services"]
    assert set(workers) == {"worker-1", "worker-2"}
    used = [worker["gpus"][0]["device_ids"] for worker in workers.values()]
    assert used == [["0"], ["1"]]
    assert all(worker["build"]["args"] == {"TORCH": "cuda"} for worker in workers.values())
