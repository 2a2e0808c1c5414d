"""Settings of all processes: flag, environment variable, config file, default, and their page."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from support.tools.command import run_command

from duplane.edge.credentials.settings import CredentialSettings
from duplane.edge.recording.settings import Consent, RecordingSettings
from duplane.edge.settings import EdgeSettings, Limits
from duplane.fabric import process
from duplane.fabric.tls.settings import FabricTlsSettings
from duplane.scheduler.settings import SchedulerSettings
from duplane.tools import servers
from duplane.tools.up.fabric import UpSettings, edge_flags
from duplane.worker.settings import ScriptSettings, SessionLimits, WorkerSettings
from pages.settings import VERBS, Setting, settings_of, settings_page

CLASSES: dict[str, tuple[type, ...]] = {
    "edge": (EdgeSettings, CredentialSettings, FabricTlsSettings, Limits, RecordingSettings),
    "scheduler": (SchedulerSettings, FabricTlsSettings),
    "worker": (WorkerSettings, FabricTlsSettings, ScriptSettings, SessionLimits),
}
GROUPS = {
    "credentials",
    "fabric",
    "limits",
    "recording",
    "script",
}  # fields whose values are settings classes
SHARES = {"tenant_ticket_share"}  # at most 1
Run = Callable[..., Any]


def flat(settings: Any) -> Iterator[tuple[str, Any]]:
    """Yield every setting by the name of its field."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from flat(value)
        else:
            yield field.name, value


def numbers(verb: str) -> list[Setting]:
    """Return the numeric settings of a process."""
    (found,) = (one for one in VERBS if one.__name__ == verb)
    return [
        setting
        for setting in settings_of(found)
        if setting.default.replace(".", "").isdecimal() or setting.name in OPTIONAL_NUMBERS
    ]


OPTIONAL_NUMBERS = ("session_s", "max_age_s", "max_total_bytes")
UNITS = {"max_age_s": 86_400, "max_total_bytes": 10**9}
MANY = 1000  # within the bounds of every setting except these
FEW = {"claim_timeout_s": 10}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run a server verb without serving; return its settings."""
    served: list[Any] = []
    for name in CLASSES:
        module = "server" if name == "edge" else "service"
        monkeypatch.setattr(
            f"duplane.{name}.{module}.serve", lambda settings, _: served.append(settings)
        )
    monkeypatch.setattr(process, "run", lambda main: main(None) or 0)
    monkeypatch.setattr(servers, "configure_logging", lambda *_: None)

    def run_verb(verb: str, *arguments: str, **environment: str) -> Any:
        required = ("--checkpoint", str(tmp_path)) if verb == "worker" else ()
        code, output = run_command(verb, *required, *arguments, **environment)
        assert code == 0, output
        return served.pop()

    return run_verb


def config(tmp_path: Path, text: str) -> str:
    file = tmp_path / "duplane.toml"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_every_setting_is_a_flag_with_help(verb: Callable[..., int]) -> None:
    settings = list(settings_of(verb))
    assert not [setting.flag for setting in settings if not setting.help]
    classes = CLASSES.get(verb.__name__, ())
    fields = {field.name for one in classes for field in dataclasses.fields(one)} - GROUPS
    assert fields <= {setting.name for setting in settings}
    shown = run_command(verb.__name__, "--help")[1]
    assert not [setting.flag for setting in settings if setting.flag not in shown]


@pytest.mark.parametrize("verb", CLASSES)
def test_every_bound_is_set_by_flag_environment_and_file(
    verb: str, run: Run, tmp_path: Path
) -> None:
    settings = numbers(verb)
    assert len(settings) >= 7
    keys = [setting.flag.removeprefix("--") for setting in settings]
    values = [
        str(1 / (2 + number) if one.name in SHARES else FEW.get(one.name, MANY) + number)
        for number, one in enumerate(settings)
    ]
    expected = {
        setting.name: float(value) * UNITS.get(setting.name, 1)
        for setting, value in zip(settings, values, strict=True)
    }
    more = ("--record", str(tmp_path)) if verb == "edge" else ()
    lines = [f"{key} = {value}" for key, value in zip(keys, values, strict=True)]
    variables = {
        "DUPLANE_" + key.upper().replace("-", "_"): value
        for key, value in zip(keys, values, strict=True)
    }
    flags = [part for pair in zip(keys, values, strict=True) for part in (f"--{pair[0]}", pair[1])]
    for found in (
        run(verb, *more, *flags),
        run(verb, *more, **variables),
        run(verb, *more, "--config", config(tmp_path, "\n".join([f"[{verb}]", *lines]))),
    ):
        values_found = dict(flat(found))
        assert {name: values_found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        pytest.param(settings, setting.name, id=f"{verb}-{setting.name}")
        for verb, classes in CLASSES.items()
        for setting in numbers(verb)
        for settings in classes
        if setting.name in {field.name for field in dataclasses.fields(settings)}
    ],
)
@pytest.mark.parametrize("value", [-1, float("nan")])
def test_number_out_of_bounds_is_refused_by_name(
    settings: Callable[..., object], name: str, value: float
) -> None:
    required: dict[str, Path] = {}
    if settings is WorkerSettings:
        required["checkpoint"] = Path("c")
    if settings is RecordingSettings:
        required["directory"] = Path("r")
    with pytest.raises(ValueError, match=f"^{name} is "):
        settings(**required, **{name: value})


def test_without_flags_defaults_hold(run: Run) -> None:
    assert run("edge") == EdgeSettings()
    assert run("scheduler") == SchedulerSettings()


def test_flag_wins_over_environment_over_file_over_default(run: Run, tmp_path: Path) -> None:
    file = config(tmp_path, "[edge]\nqueue-s = 1\nidle-s = 1\nopen-s = 1\n")
    settings = run(
        *("edge", "--queue-s", "3", "--config", file),
        DUPLANE_QUEUE_S="2",
        DUPLANE_IDLE_S="2",
    )
    limits = settings.limits
    assert (limits.queue_s, limits.idle_s, limits.open_s, limits.init_s) == (3, 2, 1, 60)


def test_each_process_reads_its_own_table(run: Run, tmp_path: Path) -> None:
    file = config(
        tmp_path,
        '[edge]\nscheduler = ["a:1", "b:2"]\nreuse_port = true\n'
        '[scheduler]\nlisten = "c:3"\n[worker]\nslots = 9\ncuda-graphs = false\n',
    )
    assert run("edge", "--config", file) == EdgeSettings(schedulers=("a:1", "b:2"), reuse_port=True)
    assert run("scheduler", "--config", file) == SchedulerSettings(listen="c:3")
    worker = run("worker", "--config", file)
    assert (worker.slot_count, worker.cuda_graphs) == (9, False)
    assert run("edge", DUPLANE_SCHEDULER="a:1,b:2").schedulers == ("a:1", "b:2")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[edge]\nqueue = 1\n", "queue"),
        ("[edge]\nqueue-s = 'long'\n", "queue-s"),
        ("[edge]\nqueue-s = -1\n", "queue_s"),
        ("[edges]\nqueue-s = 1\n", "edges"),
        ("queue-s = 1\n", "queue-s"),
        ("[edge\n", "line 1"),
    ],
)
def test_config_file_that_cannot_be_used_ends_with_the_reason(
    text: str, named: str, tmp_path: Path
) -> None:
    file = config(tmp_path, text)
    code, output = run_command("edge", "--config", file)
    assert code == 2
    assert named in output
    (line,) = output.splitlines()
    assert line.startswith("duplane: ")


def test_config_file_that_is_missing_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.toml")
    code, output = run_command("edge", "--config", missing)
    assert (code, missing in output) == (2, True)


def test_recording_is_switched_on_by_flag_and_by_environment(run: Run, tmp_path: Path) -> None:
    flags = ("--record", str(tmp_path), "--record-consent", "on_request", "--record-days", "2")
    assert run("edge", *flags).recording == RecordingSettings(
        tmp_path, Consent.ON_REQUEST, max_age_s=172_800
    )
    assert run("edge").recording is None
    found = run("edge", DUPLANE_RECORD=str(tmp_path), DUPLANE_RECORD_GIGABYTES="1.5").recording
    assert found == RecordingSettings(tmp_path, max_total_bytes=1_500_000_000)
    unlimited = run("edge", *flags[:2], "--record-days", "unlimited").recording
    assert unlimited == RecordingSettings(tmp_path, max_age_s=math.inf)
    code, output = run_command("edge", *flags[:2], "--record-consent", "maybe")
    assert (code, "record-consent" in output) == (2, True)


def test_settings_of_credentials_are_set_by_flags(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    expected = CredentialSettings(
        auth="keys",
        api_keys=file,
        operator_keys=file,
        jwks="https://issuer.example/jwks",
        jwt_issuer="i",
        jwt_audience="a",
        jwt_algorithms=("ES256", "RS256"),
        jwt_operators=True,
        token_key_file=file,
    )
    arguments = ["--jwt-operators"]
    for name in (field.name for field in dataclasses.fields(expected)):
        value = getattr(expected, name)
        if value is not True:
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            arguments += [f"--{name.replace('_', '-')}", text]
    assert run("edge", *arguments).credentials == expected
    assert run("edge").credentials == CredentialSettings()


def test_all_processes_together_pass_flags_on_to_the_edge(run: Run) -> None:
    origins = ("https://page.example", "http://127.0.0.1:9000")
    edge = run("edge", *edge_flags(UpSettings(allowed_origins=origins, auth="none")))
    assert edge.allowed_origins == origins
    assert edge.credentials.auth == "none"
    assert run("edge", *edge_flags(UpSettings())) == run("edge")
    assert run("edge", *edge_flags(UpSettings(tls_self_signed=True))).tls_self_signed


def test_settings_are_set_by_flags(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    expected: dict[str, Any] = {
        "pool": "p",
        "reuse_port": True,
        "behind_tls_proxy": True,
        "metrics_public": True,
        "tls_cert": file,
        "tls_key": file,
        "tls_state": tmp_path,
        "operator_listen": "127.0.0.1:8007",
        "trusted_proxies": ("10.0.0.0/8", "::1"),
        "allowed_origins": ("https://voice.example", "http://localhost:3000"),
        "allowed_hosts": ("voice.example", "*.voice.example"),
        "admin_token": "secret",
        "default_voice": file,
        "presets": tmp_path,
        "ref_audio": tmp_path,
        "pages": "off",
        "playback_delay_ms": 5,
        "metrics_listen": "127.0.0.1:9000",
        "health_listen": "0.0.0.0:9001",
        "continuity": "worker",
        "vad_model": file,
        "log_addresses": "short",
        "log_level": "DEBUG",
        "log_format": "json",
    }
    switches = {"reuse_port", "behind_tls_proxy", "metrics_public"}
    arguments = [f"--{name.replace('_', '-')}" for name in switches]
    for name in expected.keys() - switches:
        value = expected[name]
        text = ",".join(value) if isinstance(value, tuple) else str(value)
        arguments += [f"--{name.replace('_', '-')}", text]
    settings = run("edge", *arguments)
    assert {name: getattr(settings, name) for name in expected} == expected
    fields = {field.name for field in dataclasses.fields(EdgeSettings)}
    others = {
        *("admin_token_file", "credentials", "fabric", "limits", "listen", "needs", "recording"),
        *("schedulers", "tls_self_signed"),
    }
    assert fields == expected.keys() | others
    assert "secret" not in repr(settings)
    assert run("edge", "--need", "model=a,zone=b").needs == ("model=a", "zone=b")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--log-format", "xml"], "log-format"),
        (["--trusted-proxies", "proxy.example"], "trusted_proxies"),
        (["--allowed-origins", "voice.example"], "allowed_origins"),
        (["--allowed-origins", "null"], "allowed_origins"),
        (["--allowed-origins", "https://voice.example/page"], "allowed_origins"),
        (["--allowed-hosts", "voice.example:443"], "allowed_hosts"),
        (["--allowed-hosts", "voice.*"], "allowed_hosts"),
        (["--operator-listen", "nowhere"], "operator_listen"),
        (["--listen", "nowhere"], "listen"),
        (["--metrics-listen", "nowhere"], "metrics_listen"),
        (["--health-listen", "nowhere"], "health_listen"),
        (["--scheduler", "foo"], "schedulers"),
        (["--need", "model"], "needs: 'model' is not KEY=VALUE"),
        (["--tls-cert", __file__], "tls_key"),
        (["--queue-s", "-1"], "queue_s"),
        (["--queue-s", "many"], "--queue-s"),
        (["--units-per-s", "0"], "units_per_s"),
        (["--read-share", "0"], "read_share"),
        (["--client-s", "0"], "client_s"),
    ],
)
def test_value_that_cannot_be_used_ends_with_the_reason(arguments: list[str], named: str) -> None:
    code, output = run_command("edge", *arguments)
    assert code == 2
    assert named in output


def test_page_of_the_settings_is_fresh() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == settings_page(), "run: make settings"


def test_up_validates_the_settings_of_every_process_before_it_starts_one(tmp_path: Path) -> None:
    file = config(tmp_path, "[scheduler]\nticket-limit = 0\n")
    code, output = run_command("up", "--port", "0", "--config", file)
    assert code == 2
    assert "ticket_limit" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("up", "--slots", "0"), "slot_count is 0, must be above 0 (flag --slots)"),
        (("up", "--workers", "0"), "worker_count is 0, must be above 0 (flag --workers)"),
        (("up", "--metrics-port", "0"), "metrics_port is 0, must not be below 1"),
    ],
)
def test_error_names_the_flag_if_its_name_is_not_that_of_the_setting(
    arguments: tuple[str, ...], message: str
) -> None:
    assert run_command(*arguments) == (2, f"duplane: {message}\n")
