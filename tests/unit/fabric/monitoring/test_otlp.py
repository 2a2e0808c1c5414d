"""Export of spans over OTLP: its standard settings."""

from __future__ import annotations

import pytest

from duplane.fabric.monitoring.otlp import check_exporter, is_export_configured
from duplane.fabric.process import StartError

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4317"}


def test_export_follows_the_standard_settings() -> None:
    exporter = "OTEL_TRACES_EXPORTER"
    assert not is_export_configured({})
    assert is_export_configured(ENDPOINT)
    assert is_export_configured({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h:1"})
    assert is_export_configured({exporter: "otlp"})
    assert not is_export_configured(ENDPOINT | {exporter: "none"})
    assert not is_export_configured(ENDPOINT | {"OTEL_SDK_DISABLED": "true"})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("OTEL_TRACES_EXPORTER", "console"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf"),
    ],
)
def test_exporter_that_is_not_installed_is_refused_by_name(setting: str, value: str) -> None:
    with pytest.raises(StartError, match=setting):
        check_exporter({setting: value})
