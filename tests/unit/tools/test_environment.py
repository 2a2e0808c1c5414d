"""The environment of the processes that `duplane up` starts."""

from __future__ import annotations

import pytest

from duplane.fabric import process
from duplane.tools import servers  # noqa: F401 - registers the verbs
from duplane.tools.up.environment import environment_of, environment_without_settings

INHERITED = {
    "PATH": "/bin",
    "CUDA_VISIBLE_DEVICES": "1",
    "DUPLANE_CONFIG": "fabric.toml",
    "DUPLANE_ADMIN_TOKEN": "secret",
    "DUPLANE_STORE_PASSWORD": "/run/password",
    "DUPLANE_CONTEXT": "512",
    "DUPLANE_LOG_LEVEL": "DEBUG",
    "DUPLANE_PORT": "8006",
    "NOTIFY_SOCKET": "/run/systemd/notify",
    "WATCHDOG_USEC": "30000000",
    "WATCHDOG_PID": "12",
}
OF_ALL = {"PATH", "CUDA_VISIBLE_DEVICES", "DUPLANE_CONFIG", process.SUPERVISED}


@pytest.mark.parametrize(
    ("verb", "own"),
    [
        ("edge", {"DUPLANE_ADMIN_TOKEN", "DUPLANE_LOG_LEVEL"}),
        ("scheduler", {"DUPLANE_STORE_PASSWORD", "DUPLANE_LOG_LEVEL"}),
        ("worker", {"DUPLANE_CONTEXT", "DUPLANE_LOG_LEVEL"}),
    ],
)
def test_a_process_gets_the_variables_of_its_own_settings_only(verb: str, own: set[str]) -> None:
    assert environment_of(verb, INHERITED).keys() == OF_ALL | own


def test_a_process_that_has_all_settings_as_arguments_gets_no_variable_of_duplane() -> None:
    kept = environment_without_settings(INHERITED)
    assert kept == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1"}
