"""The verbs of `duplane keys`: write and change files of API keys."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from cyclopts.types import ExistingFile

from duplane.fabric.settings import Names
from duplane.tools.command import UsageError, app

if TYPE_CHECKING:
    from duplane.edge.credentials.keys import KeyRing

keys = App(name="keys", help="Write files of API keys, for --api-keys and --operator-keys.")
app.command(keys)
_MAX_DAYS = 36_500


@keys.command
def new(
    file: Path,
    /,
    *,
    tenant: str = "",
    operator: str = "",
    scopes: Annotated[Names, Parameter("--scope")] = (),
    days: float | None = None,
) -> None:
    """Add a new key to a file and print it. It is shown only now: the file has its SHA-256.

    A tenant or operator can have two live keys, so that clients can change to the new one before
    the old one is revoked. Edges read the file again within 5 seconds.

    Parameters
    ----------
    file
        File of keys of tenants, or file of keys of operators. It is created if it is missing.
    tenant
        Tenant that the key is for.
    operator
        Operator that the key is for.
    scopes
        What the operator may do, separated by commas: read, drain, recordings, voices, sessions.
    days
        Days until the key expires. Default: it does not expire.
    """
    from duplane.edge.credentials.keys import new_key
    from duplane.tools.keys import key_text

    if bool(tenant) == bool(operator):
        raise UsageError("give either --tenant or --operator")
    if bool(operator) != bool(scopes):
        raise UsageError("--operator needs --scope, and --tenant has none")
    if days is not None and not 0 < days <= _MAX_DAYS:
        raise UsageError(f"--days is {days:g}, must be above 0 and not above {_MAX_DAYS}")
    key = new_key()
    expires = None if days is None else key_text.expiry_in(days)
    try:
        text = key_text.read(file) if file.exists() else ""
        added = key_text.with_key(text, key, tenant, operator, scopes, expires)
        key_text.parse(added)
        key_text.write(file, added)
    except ValueError as error:
        raise UsageError(f"{file}: {error}") from None
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    sys.stderr.write(f"key {key.key_id} of {tenant or operator}, shown only now:\n")
    sys.stdout.write(f"{key.text}\n")


@keys.command(name="list")
def list_keys(file: ExistingFile, /) -> None:
    """List the keys of a file: their ids, owners, scopes and states.

    Parameters
    ----------
    file
        File of keys.
    """
    from duplane.tools.keys import key_text

    sys.stdout.write(key_text.table_of(_parsed(file)))


@keys.command
def revoke(file: ExistingFile, key_id: str, /) -> None:
    """Disable a key. Its sessions end within 10 seconds.

    Parameters
    ----------
    file
        File of keys.
    key_id
        Id of the key: the 12 digits after `dpk_`.
    """
    from duplane.tools.keys import key_text

    ring = _parsed(file)
    if key_id not in ring.keys:
        raise UsageError(f"{file}: there is no key {key_id!r}")
    try:
        key_text.write(file, key_text.with_disabled(key_text.read(file), key_id))
    except ValueError as error:
        raise UsageError(f"{file}: {error}") from None
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    sys.stdout.write(f"key {key_id} of {ring.keys[key_id].holder} is disabled\n")


def _parsed(file: Path) -> KeyRing:
    from duplane.tools.keys import key_text

    try:
        return key_text.parse(key_text.read(file))
    except ValueError as error:
        raise UsageError(f"{file}: {error}") from None
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
