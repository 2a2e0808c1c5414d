"""The standard `OTEL_*` settings for the export of spans over OTLP."""

from __future__ import annotations

import os
from collections.abc import Mapping

from opentelemetry.sdk.resources import SERVICE_NAME, Resource

from duplane.fabric.process import StartError

EXIT_TIMEOUT_S = 1.5  # for the last export, so that a dead collector delays no exit


def is_export_configured(environ: Mapping[str, str] = os.environ) -> bool:
    """True if the `OTEL_*` settings ask for an export of spans."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = environ.get("OTEL_TRACES_EXPORTER", "")
    if exporter:
        return exporter != "none"
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    return any(environ.get(name) for name in endpoints)


def check_exporter(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse every exporter but OTLP over gRPC, the only one that is installed.

    Raises StartError.
    """
    for name, allowed in (
        ("OTEL_TRACES_EXPORTER", ("", "otlp")),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", ("", "grpc")),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", ("", "grpc")),
    ):
        value = environ.get(name, "")
        if value not in allowed:
            raise StartError(f"{name} is {value!r}, must be {allowed[-1]!r}")


def resource(role: str) -> Resource:
    """Return the description of this process that every export contains."""
    named = os.environ.get("OTEL_SERVICE_NAME")
    return Resource.create({} if named else {SERVICE_NAME: f"duplane-{role}"})
