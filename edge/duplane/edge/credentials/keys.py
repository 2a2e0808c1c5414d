"""API keys: their text, and the file that has their hashes and the limits of the tenants. Pure.

A key is `dpk_ID_SECRET`. The secret is random and has 256 bits, so the file has its plain SHA-256:
a slow hash would add nothing. A file of API keys is TOML:

    [default]            # limits of tenants without a table of their own
    sessions = 10

    [tenants.acme]
    sessions = 40        # running at the same time
    waiting = 20         # in the queue
    minutes = 6000       # per day

    [[keys]]
    id = "0123456789ab"
    sha256 = "..."       # of the whole key
    tenant = "acme"
    expires = 2027-01-01T00:00:00Z
    disabled = false

In a file of keys of operators each key has `operator` and `scopes` instead of `tenant`.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time
from typing import Any, TypeGuard, cast

from duplane.edge.access import Scope, TenantLimits

KEY_PREFIX = "dpk_"
MAX_KEY_COUNT = 10_000
MAX_LIMIT = 10**9  # of a tenant
MAX_LIVE_KEYS = 2  # of one tenant or operator: the present one, and the next one during a change
OTHER_TENANTS = "other"  # the label of tenants in metrics that no file names

_KEY = re.compile(KEY_PREFIX + r"(?P<id>[0-9a-f]{12})_[0-9a-f]{64}", re.ASCII)
_ID = re.compile(r"[0-9a-f]{12}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_NO_DIGEST = bytes(hashlib.sha256().digest_size)  # no key has this hash


@dataclass(frozen=True, slots=True)
class NewKey:
    """A new key: `text` is shown once, and only `digest` is kept."""

    key_id: str
    text: str = field(repr=False)
    digest: str


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key of a file. `holder` is the name of its tenant or operator."""

    key_id: str
    digest: bytes = field(repr=False)
    holder: str
    scopes: frozenset[Scope] = frozenset()  # only of operators
    expires_s: float | None = None  # Unix time
    is_disabled: bool = False

    def problem(self, now_s: float) -> str:
        """Return why the key cannot be used at a Unix time; empty if it can."""
        if self.is_disabled:
            return "the key is disabled"
        if self.expires_s is not None and now_s >= self.expires_s:
            return "the key has expired"
        return ""


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The content of one file: keys by their ids, and limits by tenant."""

    keys: Mapping[str, ApiKey] = field(default_factory=dict[str, ApiKey])
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict[str, TenantLimits])
    default_limits: TenantLimits = field(default_factory=TenantLimits)

    def find(self, text: str) -> ApiKey | None:
        """Return the key with this text, which may be disabled or expired.

        An unknown id takes the same steps as a wrong secret, so that the time of the answer does
        not tell which ids exist.
        """
        match = _KEY.fullmatch(text)
        key = self.keys.get(match["id"]) if match else None
        digest = hashlib.sha256(text.encode(errors="replace")).digest()
        is_equal = hmac.compare_digest(digest, key.digest if key else _NO_DIGEST)
        return key if is_equal else None

    def problem(self, key_id: str, now_s: float) -> str:
        """Return why the key with an id can no longer be used; empty if it can."""
        key = self.keys.get(key_id)
        return key.problem(now_s) if key else "the key is revoked"

    def limits_of(self, tenant: str) -> TenantLimits:
        """Return the limits of a tenant."""
        return self.tenants.get(tenant, self.default_limits)


def is_limit(value: object) -> TypeGuard[int]:
    """Return whether a value can be the limit of a tenant."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_LIMIT


def narrower(one: TenantLimits, other: TenantLimits) -> TenantLimits:
    """Return the lower of each limit; None is no limit."""

    def lower(first: int | None, second: int | None) -> int | None:
        return min((limit for limit in (first, second) if limit is not None), default=None)

    return TenantLimits(
        lower(one.session_count, other.session_count),
        lower(one.waiting_count, other.waiting_count),
        lower(one.minutes, other.minutes),
    )


def new_key() -> NewKey:
    """Return a new random key."""
    key_id = secrets.token_hex(6)
    text = f"{KEY_PREFIX}{key_id}_{secrets.token_hex(32)}"
    return NewKey(key_id, text, hashlib.sha256(text.encode()).hexdigest())


def is_name(text: object) -> bool:
    """Return whether a text can be the name of a tenant or an operator."""
    return isinstance(text, str) and bool(_NAME.fullmatch(text)) and text != OTHER_TENANTS


def parse_tenant_keys(text: str, now_s: float) -> KeyRing:
    """Parse a file of API keys of tenants.

    Raises ValueError that names the field at fault.
    """
    tables = _parse(text, {"default", "tenants", "keys"})
    keys = _keys(tables, "tenant", now_s)
    limits = {
        tenant: _limits(value, f"tenants.{tenant}")
        for tenant, value in _table(tables.get("tenants", {}), "tenants").items()
    }
    for tenant in limits:
        if not is_name(tenant):
            raise ValueError(f"tenants.{tenant} is not a name of a tenant")
    default = _limits(tables.get("default", {}), "default")
    named = {key.holder: default for key in keys.values()}
    return KeyRing(keys, {**named, **limits}, default)


def parse_operator_keys(text: str, now_s: float) -> KeyRing:
    """Parse a file of keys of operators. Raises ValueError that names the field at fault."""
    return KeyRing(_keys(_parse(text, {"keys"}), "operator", now_s))


def _parse(text: str, known: set[str]) -> Mapping[str, Any]:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("the file has too many lists in lists") from None
    _refuse_unknown(tables, known, "")
    # A program that rewrites the file in place leaves it empty for a moment. This must not revoke
    # all keys.
    if not tables:
        raise ValueError("the file has neither keys nor tenants")
    return tables


def _keys(tables: Mapping[str, Any], holder: str, now_s: float) -> dict[str, ApiKey]:
    entries = tables.get("keys", [])
    if not isinstance(entries, list):
        raise ValueError("keys must be tables, each with the head [[keys]]")
    rows = cast("list[object]", entries)
    if len(rows) > MAX_KEY_COUNT:
        raise ValueError(f"keys has {len(rows)} entries, must not have more than {MAX_KEY_COUNT}")
    keys: dict[str, ApiKey] = {}
    for index, row in enumerate(rows):
        key = _key(_table(row, f"keys[{index}]"), holder, f"keys[{index}]")
        if key.key_id in keys:
            raise ValueError(f"keys[{index}].id is there twice: {key.key_id}")
        keys[key.key_id] = key
    live = Counter(key.holder for key in keys.values() if not key.problem(now_s))
    for name, count in live.items():
        if count > MAX_LIVE_KEYS:
            raise ValueError(
                f"keys: {holder} {name} has {count} live keys, must not have more than"
                f" {MAX_LIVE_KEYS}; disable one"
            )
    return keys


def _key(entry: Mapping[str, Any], holder: str, where: str) -> ApiKey:
    known = {"id", "sha256", holder, "expires", "disabled"}
    _refuse_unknown(entry, known | ({"scopes"} if holder == "operator" else set()), f"{where}.")
    key_id, digest, name = entry.get("id"), entry.get("sha256"), entry.get(holder)
    if not isinstance(key_id, str) or not _ID.fullmatch(key_id):
        raise ValueError(f"{where}.id must be 12 hexadecimal digits")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise ValueError(f"{where}.sha256 must be 64 hexadecimal digits")
    if not is_name(name):
        raise ValueError(f"{where}.{holder} must be a name of letters, digits, '.', '_' and '-'")
    is_disabled = entry.get("disabled", False)
    if not isinstance(is_disabled, bool):
        raise ValueError(f"{where}.disabled must be true or false")
    return ApiKey(
        key_id,
        bytes.fromhex(digest),
        str(name),
        parse_scopes(entry.get("scopes"), f"{where}.scopes")
        if holder == "operator"
        else frozenset(),
        _expiry(entry.get("expires"), f"{where}.expires"),
        is_disabled,
    )


def parse_scopes(value: object, where: str) -> frozenset[Scope]:
    """Return the scopes in a list of their names. Raises ValueError that begins with `where`."""
    names = cast("list[object]", value) if isinstance(value, list) else []
    known = [scope.value for scope in Scope]
    if not names or any(name not in known for name in names):
        raise ValueError(f"{where} must be a list of some of {', '.join(known)}")
    return frozenset(Scope(name) for name in names)


def _expiry(value: object, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.timestamp()
    if isinstance(value, date) and not isinstance(value, datetime):
        return datetime.combine(value, time(), UTC).timestamp()
    raise ValueError(f"{where} must be a date, or a date and time with a time zone")


def _limits(value: object, where: str) -> TenantLimits:
    table = _table(value, where)
    names = ("sessions", "waiting", "minutes")
    _refuse_unknown(table, set(names), f"{where}.")
    for name, limit in table.items():
        if not is_limit(limit):
            raise ValueError(f"{where}.{name} must be a whole number from 0 to {MAX_LIMIT}")
    return TenantLimits(*(table.get(name) for name in names))


def _table(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a table")
    return cast("dict[str, Any]", value)


def _refuse_unknown(table: Mapping[str, Any], known: set[str], where: str) -> None:
    for name in table:
        if name not in known:
            raise ValueError(f"{where}{name} is unknown, must be one of {', '.join(sorted(known))}")
