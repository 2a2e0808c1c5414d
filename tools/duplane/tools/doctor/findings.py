"""What `duplane doctor` finds, and how it is shown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

_FLAG = re.compile(r"--[a-z][a-z-]+")
_FIELD = re.compile(r"[a-z][a-z_]+")
HOST = "host"


class Level(StrEnum):
    """Whether the process can serve: yes; yes, but not for long or not well; no."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `flag` is the flag to change, HOST if no flag can help."""

    level: Level
    check: str
    flag: str
    message: str


def ok(check: str, flag: str, message: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(Level.OK, check, flag, message)


def warning(check: str, flag: str, message: str) -> Finding:
    """Return a finding that an operator should look at."""
    return Finding(Level.WARNING, check, flag, message)


def error(check: str, flag: str, message: str) -> Finding:
    """Return a finding because of which the process cannot serve, or fails when it drains."""
    return Finding(Level.ERROR, check, flag, message)


def flag_named(message: str) -> str:
    """Return the flag that a message of a setting names: a flag, or the field it begins with."""
    if found := _FLAG.search(message):
        return found[0]
    field = _FIELD.match(message)
    return f"--{field[0].replace('_', '-')}" if field else HOST


def has_errors(findings: Sequence[Finding]) -> bool:
    """Return whether a finding is an error."""
    return any(finding.level is Level.ERROR for finding in findings)


def to_text(role: str, findings: Sequence[Finding]) -> str:
    """Return the findings as lines, the worst last, where a terminal shows them."""
    order = list(Level)
    lines = [
        f"{finding.level:<8}{finding.flag:<22} {finding.check}: {finding.message}\n"
        for finding in sorted(findings, key=lambda one: order.index(one.level))
    ]
    errors, warnings = (
        sum(one.level is level for one in findings) for level in (Level.ERROR, Level.WARNING)
    )
    return f"{''.join(lines)}{role}: errors: {errors}, warnings: {warnings}\n"


def to_json(role: str, findings: Sequence[Finding]) -> dict[str, object]:
    """Return the findings as a JSON object."""
    return {
        "role": role,
        "ok": not has_errors(findings),
        "findings": [asdict(finding) for finding in findings],
    }
