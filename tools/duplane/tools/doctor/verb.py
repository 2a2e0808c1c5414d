"""The verb `duplane doctor`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import orjson
from cyclopts import Parameter
from cyclopts.types import ExistingFile

from duplane.fabric.settings import PositiveFloat
from duplane.tools import servers
from duplane.tools.command import EXIT_FAILED, UsageError, app, parse_settings, use_config

if TYPE_CHECKING:
    from duplane.tools.doctor.limits import Settings

Role = Literal["edge", "scheduler", "worker"]


@app.command
def doctor(
    role: Role,
    /,
    *flags: Annotated[str, Parameter(allow_leading_hyphen=True)],
    grace_s: PositiveFloat | None = None,
    as_json: Annotated[bool, Parameter("--json", negative=())] = False,
    # `flags` take each flag after the role that is unknown here, also this one of all verbs.
    config: Annotated[ExistingFile | None, Parameter(show=False)] = None,
) -> int:
    """Check on this host whether a process could serve with its settings. It starts nothing.

    It reads the same flags, environment variables and config file as the process: certificates
    (role, key, days left), a call to every peer, rights in etcd, the device, the clock, open
    files, the time to stop, and settings that contradict each other. Each finding names the flag
    to change.

    Exit code: 0 without an error, 1 with one. Warnings do not change it.

    Parameters
    ----------
    role
        Process to check.
    flags
        Flags of the process, as for `duplane edge`, `scheduler` or `worker`.
    grace_s
        Seconds after which the process is killed when it is stopped: `TimeoutStopSec` of systemd,
        `terminationGracePeriodSeconds` of Kubernetes, `stop_grace_period` of Compose.
    as_json
        Print the findings as one JSON object in a line.
    config
        TOML file with the settings of the process.
    """
    from duplane.tools.doctor.examination import examine
    from duplane.tools.doctor.findings import (
        Finding,
        error,
        flag_named,
        has_errors,
        to_json,
        to_text,
    )

    if config is not None:
        use_config(config)
    found: list[Finding] = []
    try:
        settings = _settings(role, flags)
    except UsageError as problem:
        found.append(error("settings", flag_named(str(problem)), str(problem)))
    else:
        found += asyncio.run(examine(settings, grace_s))
    if as_json:
        sys.stdout.write(orjson.dumps(to_json(role, found)).decode() + "\n")
    else:
        sys.stdout.write(to_text(role, found))
    return EXIT_FAILED if has_errors(found) else 0


def _settings(role: Role, flags: Sequence[str]) -> Settings:
    """Return the settings with which the process would run. Raises UsageError."""
    match role:
        case "edge":
            return parse_settings(servers.edge, flags, {})
        case "scheduler":
            return parse_settings(servers.scheduler, flags, {})
        case "worker":
            return parse_settings(servers.worker, flags, {})
