"""The text of a file of API keys: adds and disables keys, and keeps all comments."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from duplane.edge.credentials.keys import (
    ApiKey,
    KeyRing,
    NewKey,
    parse_operator_keys,
    parse_tenant_keys,
)
from duplane.fabric.files import replacing
from duplane.tools.bench.report import table

_PRIVATE = 0o600
_HEAD = re.compile(r"^[ \t]*\[", re.MULTILINE)
_DISABLED = re.compile(r"^[ \t]*disabled[ \t]*=.*\n", re.MULTILINE)


def read(path: Path) -> str:
    """Return the text of a file. Raises OSError or ValueError."""
    return path.read_text("utf-8")


def write(path: Path, text: str) -> None:
    """Replace a file in one step. A new file can be read only by its owner. Raises OSError."""
    mode, owner = _PRIVATE, None
    with contextlib.suppress(FileNotFoundError):
        before = path.stat()
        mode, owner = stat.S_IMODE(before.st_mode), (before.st_uid, before.st_gid)
    with replacing(path) as part:
        part.write_text(text, "utf-8")
        if owner and owner != (os.getuid(), os.getgid()):
            os.chown(part, *owner)
        part.chmod(mode)


def parse(text: str) -> KeyRing:
    """Parse a file of either kind. Raises ValueError that names the field at fault."""
    is_of_operators = re.search(r"^[ \t]*operator[ \t]*=", text, re.MULTILINE)
    return (parse_operator_keys if is_of_operators else parse_tenant_keys)(text, _now().timestamp())


def expiry_in(days: float) -> datetime:
    """Return the time in some days, in whole seconds."""
    return (_now() + timedelta(days=days)).replace(microsecond=0)


def with_key(
    text: str,
    key: NewKey,
    tenant: str,
    operator: str,
    scopes: Sequence[str],
    expires: datetime | None,
) -> str:
    """Return the text with one more key, of a tenant or of an operator."""
    lines = ["[[keys]]", f'id = "{key.key_id}"', f'sha256 = "{key.digest}"']
    lines.append(f"tenant = {_quoted(tenant)}" if tenant else f"operator = {_quoted(operator)}")
    if scopes:
        lines.append(f"scopes = [{', '.join(map(_quoted, scopes))}]")
    if expires:
        lines.append(f"expires = {expires.isoformat()}")
    before = f"{text.rstrip()}\n\n" if text.strip() else ""
    return before + "\n".join(lines) + "\n"


def with_disabled(text: str, key_id: str) -> str:
    """Return the text with a key disabled. Raises ValueError if its table has an unusual form."""
    wanted = tomllib.loads(text)
    for entry in wanted["keys"]:
        if entry["id"] == key_id:
            entry["disabled"] = True
    line = rf"""^[ \t]*id[ \t]*=[ \t]*["']{re.escape(key_id)}["'].*$"""
    found = re.search(line, text, re.MULTILINE)
    if found:
        begin = max((head.start() for head in _HEAD.finditer(text, 0, found.start())), default=0)
        after = _HEAD.search(text, found.end())
        end = after.start() if after else len(text)
        body = _DISABLED.sub("", text[found.end() : end])
        before = _DISABLED.sub("", text[begin : found.end()])
        changed = f"{text[:begin]}{before}\ndisabled = true{body}{text[end:]}"
        with contextlib.suppress(tomllib.TOMLDecodeError):
            if tomllib.loads(changed) == wanted:
                return changed
    raise ValueError(f"add `disabled = true` to the key {key_id} by hand: its form is unusual")


def table_of(ring: KeyRing) -> str:
    """Return a table of the keys."""
    now_s = _now().timestamp()
    rows = [_row(key, now_s) for key in ring.keys.values()]
    return table(f"keys: {len(rows)}", ("id", "owner", "scopes", "expires", "state"), rows)


def _row(key: ApiKey, now_s: float) -> tuple[str, ...]:
    at = key.expires_s
    expires = "-" if at is None else datetime.fromtimestamp(at, UTC).strftime("%FT%TZ")
    state = "disabled" if key.is_disabled else "expired" if key.problem(now_s) else "live"
    return key.key_id, key.holder, ",".join(sorted(key.scopes)) or "-", expires, state


def _quoted(text: str) -> str:
    """Return a TOML string. The parser refuses names that would need an escape."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _now() -> datetime:
    return datetime.now(UTC)
