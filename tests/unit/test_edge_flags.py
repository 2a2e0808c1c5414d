"""Every bound of the edge has its flag and its environment variable."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from duplane.edge import server
from duplane.edge.recording.settings import Consent, RecordingSettings
from duplane.edge.settings import EdgeSettings, Limits
from duplane.fabric import process
from duplane.tools.edge_flags import LIMITS, RECORDING, SETTINGS
from duplane.tools.main import app

OTHER_SETTINGS = {"listen", "schedulers", "limits", "recording"}  # flags of their own
OTHER_RECORDING = {"directory", "consent", "max_age_s", "max_total_bytes"}  # flags of their own
OTHER_RECORDING |= {"sweep_interval_s"}  # no bound
Run = Callable[..., EdgeSettings]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `duplane edge` and return the settings that it would serve with."""
    told: list[EdgeSettings] = []
    monkeypatch.setattr(server, "serve", lambda settings, _: told.append(settings))
    monkeypatch.setattr(process, "run", lambda main: main(None) or 0)
    monkeypatch.setattr(process, "configure_logging", lambda *_: None)

    def run_edge(*arguments: str, **environment: str) -> EdgeSettings:
        result = CliRunner().invoke(app, ["edge", *arguments], env=environment)
        assert result.exit_code == 0, result.output
        return told.pop()

    return run_edge


def test_every_bound_and_setting_is_a_flag() -> None:
    assert {one.name for one in dataclasses.fields(Limits)} == LIMITS.keys()
    assert {one.name for one in dataclasses.fields(RecordingSettings)} == (
        RECORDING.keys() | OTHER_RECORDING
    )
    assert {one.name for one in dataclasses.fields(EdgeSettings)} == (
        SETTINGS.keys() | OTHER_SETTINGS
    )


def test_without_flags_defaults_hold(run: Run) -> None:
    assert run() == EdgeSettings(schedulers=("127.0.0.1:8010",))


def test_recording_is_switched_on_by_flag_and_by_environment(run: Run, tmp_path: Path) -> None:
    flags = ("--record", str(tmp_path), "--record-consent", "on_request", "--record-days", "1")
    assert run(*flags).recording == RecordingSettings(
        tmp_path, Consent.ON_REQUEST, max_age_s=86_400
    )
    assert run(
        DUPLANE_RECORD=str(tmp_path), DUPLANE_RECORD_GIGABYTES="2"
    ).recording == RecordingSettings(tmp_path, max_total_bytes=2_000_000_000)
    refused = CliRunner().invoke(app, ["edge", "--record-consent", "maybe"])
    assert refused.exit_code == 2
    assert "record-consent" in refused.output


@pytest.mark.parametrize("name", LIMITS)
def test_every_limit_is_set_by_flag_and_by_environment(name: str, run: Run) -> None:
    flag = f"--{name.replace('_', '-')}"
    assert getattr(run(flag, "7").limits, name) == 7
    assert getattr(run(**{f"DUPLANE_{name.upper()}": "7"}).limits, name) == 7
    refused = CliRunner().invoke(app, ["edge", flag, "-1"])
    assert refused.exit_code == 2
    assert flag in CliRunner().invoke(app, ["edge", "--help"], env={"COLUMNS": "200"}).output


@pytest.mark.parametrize("name", RECORDING)
def test_every_bound_of_recordings_is_set_by_flag_and_by_environment(
    name: str, run: Run, tmp_path: Path
) -> None:
    flag, record = f"--record-{name.replace('_', '-')}", ("--record", str(tmp_path))
    assert getattr(run(*record, flag, "7").recording, name) == 7
    assert getattr(run(*record, **{f"DUPLANE_RECORD_{name.upper()}": "7"}).recording, name) == 7
    assert CliRunner().invoke(app, ["edge", flag, "-1"]).exit_code == 2


def test_settings_are_set_by_flags(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    given: dict[str, Any] = {
        "pool": "p",
        "reuse_port": True,
        "tls_cert": file,
        "tls_key": file,
        "trusted_proxies": ("10.0.0.0/8", "::1"),
        "admin_token": "secret",
        "default_voice": file,
        "presets": tmp_path,
        "ref_audio": tmp_path,
        "playback_delay_ms": 5,
    }
    assert given.keys() == SETTINGS.keys()
    arguments = ["--reuse-port", "--trusted-proxies", "10.0.0.0/8,::1"]
    for name in given.keys() - {"reuse_port", "trusted_proxies"}:
        arguments += [f"--{name.replace('_', '-')}", str(given[name])]
    settings = run(*arguments)
    assert {name: getattr(settings, name) for name in given} == given
    assert "secret" not in repr(settings)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--trusted-proxies", "proxy.example"], "trusted_proxies"),
        (["--listen", "nowhere"], "listen"),
        (["--tls-cert", __file__], "tls_key"),
        (["--units-per-s", "0"], "units_per_s"),
        (["--read-share", "0"], "read_share"),
        (["--ping-s", "0"], "ping_s"),
    ],
)
def test_what_cannot_be_ends_with_the_reason(arguments: list[str], names: str) -> None:
    result = CliRunner().invoke(app, ["edge", *arguments])
    assert result.exit_code == 2
    assert names in result.output
