"""Reads deploy/compose/compose.yaml as the container tools do, without such a tool."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml
from support.paths import ROOT

FOLDER = ROOT / "deploy/compose"
_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")

Services = Mapping[str, Mapping[str, Any]]


def services(**variables: str) -> Services:
    """Return the services, with the values of these variables or their defaults."""
    text = (FOLDER / "compose.yaml").read_text()

    def value(found: re.Match[str]) -> str:
        name, operator, default = found.groups()
        if name in variables:
            return variables[name]
        assert operator == "-", f"{name} has no default"
        return default

    return yaml.safe_load(_VARIABLE.sub(value, text))["services"]


def is_ours(service: Mapping[str, Any]) -> bool:
    """Return whether the image of the service is built from this repository."""
    return "build" in service
