"""`duplane doctor`: limits, contradictions, certificates and devices, without any peer."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.certificates import write_certificate
from support.fabric.tls_fabric import FabricCertificates
from support.ports import free_ports
from support.tools.command import run_command

from duplane.edge.settings import EdgeSettings, Limits
from duplane.fabric.tls.identity import Role
from duplane.scheduler.settings import SchedulerSettings
from duplane.tools.doctor import certificates, device, limits, peers
from duplane.tools.doctor.device import Torch
from duplane.tools.doctor.findings import Finding, Level, flag_named, to_text
from duplane.worker.settings import WorkerSettings

NOW, HOUR = timedelta(), timedelta(hours=1)


def edge(**settings: Any) -> EdgeSettings:
    return EdgeSettings(**settings)


def worker(**settings: Any) -> WorkerSettings:
    return WorkerSettings(**{"checkpoint": "scripted", **settings})


def scheduler(**settings: Any) -> SchedulerSettings:
    return SchedulerSettings(**settings)


def names(finding: Finding) -> tuple[str, str]:
    return finding.level, finding.flag


@pytest.mark.parametrize("make", [edge, worker, scheduler])
def test_defaults_contradict_nothing(make: Callable[[], limits.Settings]) -> None:
    assert not list(limits.contradictions(make()))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (edge(limits=Limits(session_count=9, connection_count=8)), "--session-count"),
        (edge(limits=Limits(client_session_count=17)), "--client-session-count"),
        (edge(limits=Limits(overdue_s=10.0)), "--failover-s"),
        (edge(limits=Limits(journal_total_bytes=1)), "--journal-bytes"),
        (edge(behind_tls_proxy=True), "--trusted-proxies"),
        (edge(metrics_listen="127.0.0.1:8006"), "--metrics-listen"),
        (edge(operator_listen="127.0.0.1:7", health_listen="127.0.0.1:7"), "--operator-listen"),
        (scheduler(health_listen="0.0.0.0:8010"), "--health-listen"),
        (worker(stuck_after_s=120.0), "--stuck-after-s"),
        (worker(schedulers=("10.0.0.1:8010",)), "--advertise"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_contradiction_names_the_flag(settings: limits.Settings, expected: str) -> None:
    (finding,) = limits.contradictions(settings)
    assert finding.flag == expected
    assert finding.level is not Level.OK


def test_two_free_ports_are_not_the_same_port() -> None:
    free = edge(listen="127.0.0.1:0", metrics_listen="127.0.0.1:0", health_listen="127.0.0.1:0")
    assert not list(limits.contradictions(free))


@pytest.mark.parametrize(
    ("make", "flag", "enough_s"),
    [
        (edge, "--drain-s", 610.0),
        (worker, "--drain-timeout-s", 620.0),
        (scheduler, "--stop-timeout-s", 10.0),
    ],
)
def test_time_to_stop_is_compared_with_the_drain(
    make: Callable[[], limits.Settings], flag: str, enough_s: float
) -> None:
    assert names(limits.time_to_stop(make(), enough_s)) == (Level.OK, flag)
    assert names(limits.time_to_stop(make(), None)) == (Level.OK, flag)
    assert names(limits.time_to_stop(make(), 2.0)) == (Level.ERROR, flag)


def test_units_of_systemd_give_enough_time() -> None:
    for settings in (edge(), worker()):
        assert limits.time_to_stop(settings, 660.0).level is Level.OK
    assert limits.time_to_stop(scheduler(), 30.0).level is Level.OK


def test_open_files_are_compared_with_the_connections() -> None:
    assert names(limits.open_files(edge(), 5000)) == (Level.OK, "--connection-count")
    assert names(limits.open_files(edge(), -1)) == (Level.OK, "--connection-count")
    assert names(limits.open_files(edge(), 1024)) == (Level.WARNING, "--connection-count")
    assert names(limits.open_files(scheduler(), 1024)) == (Level.WARNING, "host")


def test_clock_that_is_not_synchronised_is_warned_of() -> None:
    assert names(limits.clock(5)) == (Level.WARNING, "host")
    assert names(limits.clock(0)) == (Level.OK, "host")
    assert names(limits.clock(-1)) == (Level.OK, "host")
    assert limits.clock().flag == "host"  # whatever this host says


@pytest.mark.parametrize(
    ("name", "torch", "driver_count", "expected"),
    [
        ("cpu", None, 0, "not installed"),
        ("cuda:0", Torch("2.9", "", 0), 1, "has no CUDA"),
        ("cuda:0", Torch("2.9", "13.0", 0), 1, "the driver is older"),
    ],
)
def test_torch_that_does_not_fit_is_an_error(
    name: str, torch: Torch | None, driver_count: int, expected: str
) -> None:
    finding = device.of_torch(name, torch, driver_count)
    assert names(finding) == (Level.ERROR, "--device")
    assert expected in finding.message


def test_torch_that_fits_is_well() -> None:
    for name, torch in (("cpu", Torch("2.9", "", 0)), ("cuda:1", Torch("2.9", "13.0", 2))):
        assert names(device.of_torch(name, torch, torch.device_count)) == (Level.OK, "--device")


def test_missing_device_and_checkpoint_are_errors(tmp_path: Path) -> None:
    (finding,) = device.findings(worker(checkpoint=tmp_path))
    assert names(finding) == (Level.ERROR, "--checkpoint")
    (tmp_path / "config.json").touch()
    (finding,) = device.findings(worker(checkpoint=tmp_path, device="cuda:99"))
    assert names(finding) == (Level.ERROR, "--device")


def test_certificate_of_the_fabric_is_well(tmp_path: Path) -> None:
    issuing = FabricCertificates(tmp_path)
    settings = issuing.settings(Role.WORKER, "gpu7")
    issuing.issue(Role.WORKER, "gpu7", life=100 * HOUR)
    found = list(certificates.of_fabric(settings, Role.WORKER, "gpu7-cuda:0"))
    assert [names(one) for one in found] == [(Level.OK, "--fabric-tls")] * 2


@pytest.mark.parametrize(
    ("role", "worker_id", "options", "ago", "expected"),
    [
        (Role.EDGE, None, {}, NOW, ("--fabric-tls", "for the role worker, must be for edge")),
        (Role.WORKER, "other", {}, NOW, ("--worker-id", "neither 'gpu7'")),
        (Role.WORKER, None, {"trust_domain": "else"}, NOW, ("--fabric-tls", "trust domain")),
        (Role.WORKER, None, {}, 10 * HOUR, ("--fabric-tls", "has expired")),
        (Role.WORKER, None, {}, -100 * HOUR, ("--fabric-tls", "valid only from")),
    ],
    ids=["role", "worker id", "trust domain", "expired", "clock behind"],
)
def test_certificate_that_peers_would_refuse_is_an_error(
    tmp_path: Path,
    role: Role,
    worker_id: str | None,
    options: dict[str, Any],
    ago: timedelta,
    expected: tuple[str, str],
) -> None:
    issuing = FabricCertificates(tmp_path)
    settings = issuing.settings(Role.WORKER, "gpu7")
    issuing.issue(Role.WORKER, "gpu7", now=datetime.now(UTC) - ago, **options)
    found = list(certificates.of_fabric(settings, role, worker_id))
    (wrong,) = (one for one in found if one.level is Level.ERROR)
    assert wrong.flag == expected[0]
    assert expected[1] in wrong.message


def test_certificate_that_ends_soon_is_a_warning(tmp_path: Path) -> None:
    issuing = FabricCertificates(tmp_path)
    settings = issuing.settings(Role.EDGE)
    issuing.issue(Role.EDGE, life=100 * HOUR, now=datetime.now(UTC) - 90 * HOUR)
    leaf, ca = certificates.of_fabric(settings, Role.EDGE)
    assert (names(leaf), names(ca)) == ((Level.WARNING, "--fabric-tls"), (Level.OK, "--fabric-tls"))
    assert "0.4 days are left" in leaf.message


def test_key_of_another_certificate_and_open_key_are_errors(tmp_path: Path) -> None:
    issuing = FabricCertificates(tmp_path)
    settings = issuing.settings(Role.EDGE)
    key = issuing.issue(Role.EDGE) / "tls.key"
    other = (issuing.issue(Role.SCHEDULER) / "tls.key").read_bytes()
    own = key.read_bytes()
    key.write_bytes(other)
    (finding,) = certificates.of_fabric(settings, Role.EDGE)
    assert names(finding) == (Level.ERROR, "--fabric-tls")
    assert "not the key of the certificate" in finding.message
    key.write_bytes(own)
    key.chmod(0o644)
    (finding,) = certificates.of_fabric(settings, Role.EDGE)
    assert "chmod 600" in finding.message


def test_certificate_of_an_edge_and_its_key_must_fit(tmp_path: Path) -> None:
    flags = ("--tls-cert", "--tls-key")
    chain, key = write_certificate(tmp_path, "edge")
    (finding,) = certificates.of_pair(chain, key, *flags)
    assert names(finding) == (Level.OK, "--tls-cert")
    (tmp_path / "other").mkdir()
    _, other = write_certificate(tmp_path / "other", "other")
    (finding,) = certificates.of_pair(chain, other, *flags)
    assert names(finding) == (Level.ERROR, "--tls-key")
    (finding,) = certificates.of_pair(key, other, *flags)
    assert names(finding) == (Level.ERROR, "--tls-cert")
    (finding,) = certificates.of_bundle(key, "--store-ca")
    assert names(finding) == (Level.ERROR, "--store-ca")
    assert certificates.of_bundle(chain, "--store-ca")[0].level is Level.OK


@pytest.mark.parametrize(
    ("message", "flag"),
    [
        ("tls_key: x is readable", "--tls-key"),
        ("give keys with --api-keys FILE", "--api-keys"),
        ("10.0.0.1 is open", "host"),
    ],
)
def test_flag_is_found_in_a_message(message: str, flag: str) -> None:
    assert flag_named(message) == flag


def test_the_worst_finding_is_the_last_line() -> None:
    found = [Finding(level, "c", "--f", level) for level in reversed(Level)]
    lines = to_text("edge", found).splitlines()
    assert [line.split()[0] for line in lines] == ["ok", "warning", "error", "edge:"]
    assert lines[-1] == "edge: errors: 1, warnings: 1"


def test_settings_that_cannot_be_used_are_a_finding() -> None:
    code, output = run_command("doctor", "edge", "--queue-s", "-1", "--json")
    assert code == 1
    answer = orjson.loads(output)
    (finding,) = answer.pop("findings")
    assert answer == {"role": "edge", "ok": False}
    assert (finding["level"], finding["flag"]) == ("error", "--queue-s")


@pytest.mark.parametrize(
    "order", [("--config", "{}", "scheduler"), ("scheduler", "--config", "{}")]
)
def test_config_file_is_read_on_either_side_of_the_role(
    order: tuple[str, ...], tmp_path: Path
) -> None:
    config = tmp_path / "duplane.toml"
    config.write_text('[scheduler]\nlisten = "0.0.0.0:1"\n')
    arguments = [part.format(config) for part in order]
    code, output = run_command("doctor", *arguments, "--json")
    assert code == 1, output
    (wrong,) = (one for one in orjson.loads(output)["findings"] if one["level"] == "error")
    assert (wrong["check"], wrong["flag"]) == ("start", "--fabric-tls")


def test_time_until_a_process_is_killed_is_above_zero() -> None:
    code, output = run_command("doctor", "scheduler", "--grace-s", "-5")
    assert (code, output) == (2, "duplane: --grace-s is -5.0, must be above 0\n")


def test_what_a_process_refuses_at_its_start_is_a_finding() -> None:
    code, output = run_command("doctor", "scheduler", "--listen", "0.0.0.0:1", "--json")
    findings = orjson.loads(output)["findings"]
    assert code == 1
    (wrong,) = (one for one in findings if one["level"] == "error")
    assert (wrong["check"], wrong["flag"]) == ("start", "--fabric-tls")


def test_scheduler_alone_is_well_and_etcd_that_does_not_answer_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "TIMEOUT_S", 0.1)
    code, output = run_command("doctor", "scheduler", "--grace-s", "30")
    assert code == 0, output
    (port,) = free_ports(1)
    code, output = run_command("doctor", "scheduler", "--store", f"etcd://127.0.0.1:{port}")
    assert code == 1
    (line,) = (one for one in output.splitlines() if one.startswith("error"))
    assert line.split()[1] == "--store"
    assert "etcd does not answer" in line


def test_a_signing_key_that_is_no_key_is_an_error(tmp_path: Path) -> None:
    key = tmp_path / "signing.key"
    key.touch(mode=0o600)
    code, output = run_command("doctor", "scheduler", "--signing-key", str(key))
    assert code == 1
    assert [line.split()[1] for line in output.splitlines() if line.startswith("error")] == [
        "--signing-key"
    ]
