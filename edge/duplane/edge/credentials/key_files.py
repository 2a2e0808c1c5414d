"""The keys of tenants and of operators, from their files, which are read again when they change."""

from __future__ import annotations

from collections.abc import Collection

from duplane.edge.access import Caller, CallerKind, TenantLimits
from duplane.edge.clock import Clock, Moment
from duplane.edge.credentials.key_file import KeyFile
from duplane.edge.credentials.keys import (
    KEY_PREFIX,
    ApiKey,
    KeyRing,
    parse_operator_keys,
    parse_tenant_keys,
)
from duplane.edge.credentials.settings import CredentialSettings

_EMPTY = KeyRing()


class KeyFiles:
    """All keys. Raises ValueError for a file that cannot be used."""

    def __init__(self, settings: CredentialSettings, clock: Clock) -> None:
        self._clock = clock

        def wall_s() -> float:
            return clock.now().wall_s

        tenants, operators = settings.api_keys, settings.operator_keys
        self._tenants = tenants and KeyFile(tenants, "api_keys", parse_tenant_keys, wall_s)
        self._operators = operators and KeyFile(
            operators, "operator_keys", parse_operator_keys, wall_s
        )

    @property
    def _rings(self) -> tuple[KeyRing, KeyRing]:
        tenants = self._tenants.ring if self._tenants else _EMPTY
        operators = self._operators.ring if self._operators else _EMPTY
        return tenants, operators

    @property
    def tenants(self) -> Collection[str]:
        """The tenants that the file names."""
        return self._rings[0].tenants.keys()

    def limits_of(self, tenant: str) -> TenantLimits:
        """Return the limits of a tenant."""
        return self._rings[0].limits_of(tenant)

    def find_tenant(self, text: str) -> Caller | str | None:
        """Return the caller with a tenant's key; a text says why the key cannot be used.

        Returns None for an unknown key.
        """
        ring, _ = self._rings
        key, now = ring.find(text), self._clock.now()
        if key is None:
            return None
        return key.problem(now.wall_s) or _tenant_caller(key, ring, now)

    def find_operator(self, text: str) -> Caller | str | None:
        """Return the caller with an operator's key, as `find_tenant` does."""
        _, ring = self._rings
        key, now = ring.find(text), self._clock.now()
        if key is None:
            return None
        return key.problem(now.wall_s) or _operator_caller(key, now)

    def problem(self, credential: str) -> str:
        """Return why a credential is no longer valid; empty if it is.

        `credential` is `Caller.credential`. All that are no keys of a file remain valid.
        """
        if not credential.startswith(KEY_PREFIX):
            return ""
        key_id, now_s = credential.removeprefix(KEY_PREFIX), self._clock.now().wall_s
        rings = [ring for ring in self._rings if key_id in ring.keys]
        return rings[0].problem(key_id, now_s) if rings else "the key is revoked"

    def reload(self) -> None:
        """Read the files again. A file that cannot be used changes nothing."""
        for file in (self._tenants, self._operators):
            if file:
                file.reload()

    def reload_if_changed(self) -> None:
        """Read the files that have changed."""
        for file in (self._tenants, self._operators):
            if file:
                file.reload_if_changed()


def _tenant_caller(key: ApiKey, ring: KeyRing, now: Moment) -> Caller:
    return Caller(
        CallerKind.TENANT,
        tenant=key.holder,
        credential=KEY_PREFIX + key.key_id,
        expires_s=_monotonic_s(key, now),
        limits=ring.limits_of(key.holder),
    )


def _operator_caller(key: ApiKey, now: Moment) -> Caller:
    return Caller(
        CallerKind.OPERATOR,
        subject=key.holder,
        credential=KEY_PREFIX + key.key_id,
        scopes=key.scopes,
        expires_s=_monotonic_s(key, now),
    )


def _monotonic_s(key: ApiKey, now: Moment) -> float | None:
    return None if key.expires_s is None else now.monotonic_s + key.expires_s - now.wall_s
