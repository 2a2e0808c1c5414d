"""The key with which this scheduler signs leases, and its replacement by a new one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from duplane.fabric.lease_signing import LeaseSigner
from duplane.fabric.v1 import lease_pb2, registry_pb2
from duplane.scheduler.store.base import LeaseStore

# After this time, each worker that is still registered has the new key. A scheduler that has lost
# the store cannot send the key, but it ends the streams of its workers after 10 s, and a broken
# stream is noticed within 15 s.
KEY_LEAD_S = 30.0

_log = logging.getLogger(__name__)


class LeaseKeys:
    """Signs leases with one key at a time.

    Each scheduler has its own key and replaces only this key. `max_age_s` is the age at which the
    key is replaced; None means never. The public half of the next key is in the store for
    `KEY_LEAD_S`, without a break, before the key signs a lease. The workers keep the public half of
    the former key as long as leases signed with this key can be claimed.
    """

    def __init__(self, store: LeaseStore, signer: LeaseSigner, max_age_s: float | None) -> None:
        self._store = store
        self._signer = signer
        self._max_age_s = max_age_s
        self._published: set[str] = set()  # key ids
        self._has_changed = asyncio.Event()
        store.share_keys([signer.verification_key])
        store.watch_keys(self._on_keys)

    @property
    def verification_key(self) -> registry_pb2.VerificationKey:
        """The public half of the present key."""
        return self._signer.verification_key

    def sign(self, claims: lease_pb2.LeaseClaims) -> lease_pb2.Lease:
        """Return the lease with these claims."""
        return self._signer.sign(claims)

    async def run(self) -> None:
        """Replace the key each time it reaches `max_age_s`, until cancelled."""
        while self._max_age_s is not None:
            await asyncio.sleep(max(self._max_age_s - KEY_LEAD_S, 0.0))
            former = self._signer
            following = LeaseSigner()
            self._store.share_keys([former.verification_key, following.verification_key])
            await self._known_to_workers(following.verification_key.key_id)
            self._signer = following
            self._store.share_keys([following.verification_key])
            _log.info(
                "signing leases with the new key %s in place of %s",
                following.verification_key.key_id,
                former.verification_key.key_id,
            )

    async def _known_to_workers(self, key_id: str) -> None:
        """Wait until a key has been in the store for `KEY_LEAD_S` without a break."""
        while True:
            await self._until(key_id, is_published=True)
            try:
                async with asyncio.timeout(KEY_LEAD_S):
                    await self._until(key_id, is_published=False)
            except TimeoutError:
                return

    async def _until(self, key_id: str, *, is_published: bool) -> None:
        while (key_id in self._published) is not is_published:
            await self._has_changed.wait()

    def _on_keys(self, keys: Sequence[registry_pb2.VerificationKey]) -> None:
        self._published = {key.key_id for key in keys}
        self._has_changed.set()
        self._has_changed = asyncio.Event()
