"""No process serves or calls other machines without credentials, unless a flag allows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.certificates import write_certificate
from support.edge.live_edge import live_edge
from support.tools.command import run_command

from duplane.edge import server as edge
from duplane.edge.credentials.settings import CredentialSettings
from duplane.edge.recording.settings import RecordingSettings
from duplane.edge.settings import EdgeSettings
from duplane.fabric.process import Shutdown, StartError
from duplane.fabric.tls.settings import FabricTlsSettings
from duplane.scheduler import service as scheduler
from duplane.scheduler.settings import SchedulerSettings
from duplane.worker import service as worker
from duplane.worker.settings import WorkerSettings

OPEN = ("0.0.0.0:0", "[::]:0", "0:0")  # the last text is not an address, but means 0.0.0.0
AWAY = ("127.0.0.1:8010", "10.255.255.1:8010")
PLAINTEXT = FabricTlsSettings(fabric_plaintext=True)
ANYBODY = CredentialSettings(auth="none")
UNUSED = "127.0.0.1:9"  # a scheduler that nobody needs


async def starts_and_ends(serve: Callable[..., Any], settings: object) -> None:
    """Start a process that ends as soon as it serves. Raises StartError."""
    shutdown = Shutdown()
    shutdown.drain()
    await serve(settings, shutdown)


async def refusal(serve: Callable[..., Any], settings: object) -> str:
    with pytest.raises(StartError) as refused:
        await starts_and_ends(serve, settings)
    return str(refused.value)


def of_scheduler(**settings: Any) -> SchedulerSettings:
    return SchedulerSettings(**{"listen": "127.0.0.1:0", **settings})


def of_worker(**settings: Any) -> WorkerSettings:
    given = {"checkpoint": "scripted", "advertise": "10.0.0.1:1", "schedulers": (UNUSED,)}
    return WorkerSettings(**{**given, **settings})


def of_edge(**settings: Any) -> EdgeSettings:
    return EdgeSettings(**{"listen": "127.0.0.1:0", "schedulers": (UNUSED,), **settings})


@pytest.mark.parametrize("listen", OPEN)
async def test_ports_of_the_fabric_beyond_this_machine_need_tls(listen: str) -> None:
    for serve, settings in (
        (scheduler.serve, of_scheduler(listen=listen)),
        (worker.serve, of_worker(listen=listen)),
        (worker.serve, of_worker(schedulers=AWAY)),
        (edge.serve, of_edge(schedulers=AWAY)),
    ):
        told = await refusal(serve, settings)
        assert "--fabric-tls" in told
        assert "--fabric-plaintext" in told


async def test_plaintext_is_allowed_by_name_and_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await starts_and_ends(scheduler.serve, of_scheduler(listen="0.0.0.0:0", fabric=PLAINTEXT))
    assert "without TLS" in caplog.text
    caplog.clear()
    await starts_and_ends(edge.serve, of_edge(schedulers=AWAY, fabric=PLAINTEXT))
    assert "calls 10.255.255.1:8010 without TLS" in caplog.text


@pytest.mark.parametrize("listen", OPEN)
async def test_edge_beyond_this_machine_needs_tls_and_credentials(
    listen: str, tmp_path: Path
) -> None:
    assert "--behind-tls-proxy" in await refusal(edge.serve, of_edge(listen=listen))
    assert "--auth none" in await refusal(edge.serve, of_edge(listen=listen, behind_tls_proxy=True))
    self_signed = of_edge(listen=listen, tls_self_signed=True, tls_state=tmp_path)
    assert "--auth none" in await refusal(edge.serve, self_signed)
    with_all = of_edge(listen=listen, behind_tls_proxy=True, credentials=ANYBODY)
    await starts_and_ends(edge.serve, with_all)


async def test_port_of_operators_beyond_this_machine_needs_tls() -> None:
    told = await refusal(edge.serve, of_edge(operator_listen="0.0.0.0:0"))
    assert "0.0.0.0:0" in told
    assert "--tls-cert" in told


async def test_edge_behind_a_proxy_on_its_machine_needs_credentials() -> None:
    assert "--api-keys" in await refusal(edge.serve, of_edge(behind_tls_proxy=True))


async def test_proxy_that_is_not_trusted_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warning = "--behind-tls-proxy without --trusted-proxies"
    await starts_and_ends(edge.serve, of_edge(behind_tls_proxy=True, credentials=ANYBODY))
    assert warning in caplog.text
    caplog.clear()
    named = of_edge(behind_tls_proxy=True, credentials=ANYBODY, trusted_proxies=("127.0.0.1",))
    await starts_and_ends(edge.serve, named)
    assert warning not in caplog.text


async def test_behind_a_proxy_the_address_of_this_machine_makes_no_operator() -> None:
    async with live_edge() as edge:
        assert (await edge.get("/workers"))[0] == 200
    async with live_edge(behind_tls_proxy=True) as edge:
        assert (await edge.get("/workers"))[0] in (401, 403)


async def test_metrics_beyond_this_machine_must_be_allowed() -> None:
    for serve, settings in (
        (scheduler.serve, of_scheduler),
        (worker.serve, of_worker),
        (edge.serve, of_edge),
    ):
        told = await refusal(serve, settings(metrics_listen="0.0.0.0:0"))
        assert "--metrics-public" in told
    allowed = of_scheduler(metrics_listen="0.0.0.0:0", metrics_public=True)
    await starts_and_ends(scheduler.serve, allowed)


async def test_health_beyond_this_machine_needs_no_flag() -> None:
    """Probes have no certificates, and the answers have no details."""
    for serve, settings in (
        (scheduler.serve, of_scheduler),
        (worker.serve, of_worker),
        (edge.serve, of_edge),
    ):
        await starts_and_ends(serve, settings(health_listen="0.0.0.0:0"))


async def test_recordings_must_have_an_age(tmp_path: Path) -> None:
    told = await refusal(edge.serve, of_edge(recording=RecordingSettings(tmp_path / "r")))
    assert "--record-days unlimited" in told
    kept = RecordingSettings(tmp_path / "r", max_age_s=float("inf"))
    await starts_and_ends(edge.serve, of_edge(recording=kept))


async def test_keys_that_others_can_read_are_refused(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path, "edge")
    key.chmod(0o644)
    told = await refusal(edge.serve, of_edge(tls_cert=certificate, tls_key=key))
    assert told.startswith("tls_key: ")
    assert "chmod 600" in told
    told = await refusal(scheduler.serve, of_scheduler(signing_key=key))
    assert told.startswith("signing_key: ")


async def test_unusable_files_of_a_scheduler_are_named(tmp_path: Path) -> None:
    certificate, _ = write_certificate(tmp_path, "etcd")
    garbage = tmp_path / "garbage.pem"
    garbage.touch(mode=0o600)
    told = await refusal(scheduler.serve, of_scheduler(signing_key=garbage))
    assert told.startswith("signing_key: ")
    etcd = of_scheduler(
        store="etcd://127.0.0.1:9", store_ca=certificate, store_cert=certificate, store_key=garbage
    )
    assert (await refusal(scheduler.serve, etcd)).startswith("store_key: ")


async def test_certificate_of_a_worker_is_checked_before_its_model_is_loaded(
    tmp_path: Path,
) -> None:
    settings = of_worker(
        checkpoint=tmp_path / "nowhere", fabric=FabricTlsSettings(fabric_tls=tmp_path)
    )
    assert (await refusal(worker.serve, settings)).startswith("fabric_tls: ")


async def test_on_this_machine_nothing_needs_a_credential(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    await starts_and_ends(scheduler.serve, of_scheduler())
    await starts_and_ends(edge.serve, of_edge())
    (line,) = [text for text in caplog.messages if "credential" in text]
    assert line == "only this machine can connect: clients need no credential"


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (("edge", "--listen", "0.0.0.0:0"), "--behind-tls-proxy"),
        (("up", "--host", "0.0.0.0", "--port", "0"), "--behind-tls-proxy"),
        (("up", "--host", "0.0.0.0", "--port", "0", "--behind-tls-proxy"), "--auth none"),
        (("status", "--scheduler", "10.255.255.1:8010"), "--fabric-plaintext"),
        (("drain", "w", "--scheduler", "10.255.255.1:8010"), "--fabric-tls"),
        (("trace", "--listen", "0.0.0.0:0"), "--metrics-public"),
    ],
)
def test_commands_exit_with_the_flag_to_use(arguments: Sequence[str], flag: str) -> None:
    code, output = run_command(*arguments)
    assert code == 1
    assert flag in output
