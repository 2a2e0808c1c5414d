"""The session of one scheduler in etcd: leases that last as long as the scheduler renews them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import NoReturn, TypeVar

from duplane.fabric.lease_signing import LEASE_LIFE_S
from duplane.fabric.repeated_log import RepeatedLog
from duplane.fabric.v1 import registry_pb2
from duplane.scheduler.etcd.client import EtcdClient, EtcdError, NoAnswerError
from duplane.scheduler.etcd.lease import LeaseKeeper
from duplane.scheduler.etcd.v3 import etcd_pb2
from duplane.scheduler.store.etcd.contact import Contact
from duplane.scheduler.store.etcd.mirror import RETRY_PAUSE_S, Mirror

# When a scheduler dies, its key `presence/ID` ends within `PRESENCE_TTL_S`. The other schedulers
# end its session `ABSENCE_LIMIT_S` later. Until then, the callers and workers of the dead scheduler
# can return at another scheduler.
PRESENCE_TTL_S = 7
ABSENCE_LIMIT_S = 3.0
# A freeze of an etcd member is unlikely to last this long; `Session` says why that matters.
SESSION_TTL_S = 60
# The signing key of a scheduler that dies must last as long as the leases that it has signed.
KEY_TTL_S = int(LEASE_LIFE_S)
_END_TIMEOUT_S = 1.0
_LEASE_BITS = 62

Name = TypeVar("Name", str, bytes)
_log = logging.getLogger(__name__)


def contact_limit_s() -> float:
    """Return for how long, at least, a session lasts after etcd last confirmed its presence."""
    return PRESENCE_TTL_S + ABSENCE_LIMIT_S


class Session:
    """Leases of a scheduler: for its presence, for its registrations and tickets, and for each key.

    A leader of etcd that was frozen can end leases whose time ran out during the freeze, although
    the next leader has renewed them (etcd issue 15247). So only the lease of the presence is short,
    and a scheduler that loses its presence announces it again. The other leases last longer than a
    freeze is likely to last.

    When etcd has ended the session, the scheduler begins another one under a new name. The keys of
    the old session are gone: workers register again, and callers return to their places.
    """

    def __init__(self, client: EtcdClient, mirror: Mirror, contact: Contact, base: int) -> None:
        self.lease = 0  # the lease of the present session; 0 before the first
        self._shared: dict[str, registry_pb2.VerificationKey] = {}  # by key id
        self._has_shared = asyncio.Event()
        self._has_left = False
        self._client = client
        self._absence = RepeatedLog(_log)
        self._mirror = mirror
        self._contact = contact
        self._keys = mirror.facts.keys
        self._base = base

    @property
    def name(self) -> str:
        """The name of the session's key."""
        return f"{self.lease:x}"

    @property
    def is_known(self) -> bool:
        """True if the facts contain this scheduler's session, its presence and its public keys."""
        facts = self._mirror.facts
        has_session = self.name in facts.sessions and self.name in facts.present
        return has_session and self._has_published_keys

    @property
    def _has_published_keys(self) -> bool:
        """True if the facts contain the public keys that `share_keys` has set."""
        published = {key.key_id for key in self._mirror.facts.verification_keys}
        return self._shared.keys() <= published

    def share_keys(self, keys: Sequence[registry_pb2.VerificationKey]) -> None:
        """Publish these keys. An earlier key that is not among them ends after `KEY_TTL_S`."""
        self._shared = {key.key_id: key for key in keys}
        self._has_shared.set()

    async def run(self) -> None:
        """Keep the leases until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._hold_keys(tasks))
            tasks.create_task(self._hold_session())
            tasks.create_task(self._end_absent())

    async def end(self) -> None:
        """End this scheduler's session in etcd now, if etcd answers. Begin no other session."""
        self._has_left = True
        with contextlib.suppress(EtcdError, NoAnswerError, TimeoutError):
            async with asyncio.timeout(_END_TIMEOUT_S):
                await self._client.revoke_lease(self.lease)

    async def _hold_keys(self, tasks: asyncio.TaskGroup) -> NoReturn:
        """Publish each key that `share_keys` has set, and keep its etcd lease alive."""
        holding: dict[str, asyncio.Task[NoReturn]] = {}
        while True:
            self._has_shared.clear()
            for key_id in holding.keys() - self._shared.keys():
                holding.pop(key_id).cancel()
            for key_id in self._shared.keys() - holding.keys():
                holding[key_id] = tasks.create_task(self._hold_key(self._shared[key_id]))
            await self._has_shared.wait()

    async def _hold_key(self, key: registry_pb2.VerificationKey) -> NoReturn:
        published = self._mirror.facts.signing_keys
        while True:
            lease = await self._grant(KEY_TTL_S, partial(self._publish_key, key))
            name = self._keys.signing(key.key_id, f"{lease:x}")
            await self._until_ended(lease, KEY_TTL_S, published, name)
            _log.warning("the key %s ended in etcd; publishing it again", key.key_id)

    async def _hold_session(self) -> None:
        """Keep this scheduler's session in etcd.

        It begins after the public signing keys are published, because workers verify grants with
        them.
        """
        facts = self._mirror.facts
        while not self._has_left:
            await self._mirror.until(lambda: self._has_published_keys)
            lease = await self._grant(SESSION_TTL_S, self._begin)
            present = asyncio.create_task(self._hold_presence(self.name))
            try:
                await self._until_ended(lease, SESSION_TTL_S, facts.sessions, self.name)
            finally:
                present.cancel()
                await asyncio.gather(present, return_exceptions=True)
            if not self._has_left:
                _log.error("session %x has ended in etcd; beginning another one", lease)

    async def _hold_presence(self, name: str) -> NoReturn:
        facts = self._mirror.facts
        while True:
            lease = await self._grant(PRESENCE_TTL_S, partial(self._announce, name))
            await self._until_ended(
                lease, PRESENCE_TTL_S, facts.present, name, self._contact.confirm_presence
            )
            _log.warning("the presence of session %s ended in etcd; announcing it again", name)

    async def _end_absent(self) -> NoReturn:
        """End the sessions of schedulers that are absent for longer than `ABSENCE_LIMIT_S`."""
        while True:
            await self._mirror.until(lambda: bool(self._absent()))
            noticed = self._absent()
            await asyncio.sleep(ABSENCE_LIMIT_S)
            await self._mirror.until_whole()
            for name in [absent for absent in self._absent() if absent in noticed]:
                with contextlib.suppress(EtcdError, NoAnswerError):  # the next pass tries again
                    await self._client.revoke_lease(int(name, 16))
                    _log.warning("ended session %s in etcd: its scheduler is absent", name)

    def _absent(self) -> Sequence[str]:
        """Return the sessions whose schedulers are absent, in the order of their beginning."""
        facts = self._mirror.facts
        present = {self.name, *facts.present}
        return [name for name in facts.sessions if name not in present]

    async def _until_ended(
        self,
        lease: int,
        ttl_s: int,
        names: Collection[Name],
        name: Name,
        on_renewed: Callable[[float], None] | None = None,
    ) -> None:
        """Renew a lease until it ends, or until the facts no longer list `name` in `names`.

        The facts show the end of the lease sooner than the next renewal does.
        """
        keeping = asyncio.create_task(self._keep(lease, ttl_s, on_renewed))
        vanishing = asyncio.create_task(self._vanished(names, name))
        try:
            await asyncio.wait((keeping, vanishing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            keeping.cancel()
            vanishing.cancel()
            await asyncio.gather(keeping, vanishing, return_exceptions=True)

    async def _grant(self, ttl_s: int, publish: Callable[[int], Awaitable[None]]) -> int:
        """Make a lease and publish the keys that are attached to it; return the lease."""
        lease = secrets.randbits(_LEASE_BITS) + 1

        async def attempt() -> None:
            await self._client.grant_lease(lease, ttl_s)
            await publish(lease)

        await self._persist(attempt)
        return lease

    async def _keep(
        self, lease: int, ttl_s: int, on_renewed: Callable[[float], None] | None = None
    ) -> None:
        keeper = LeaseKeeper(self._client, lease, ttl_s, on_renewed)
        try:
            await keeper.run()
        finally:
            await keeper.close()

    async def _vanished(self, names: Collection[Name], name: Name) -> None:
        """Wait until a name has appeared in the facts and has vanished from them again."""
        await self._mirror.until(lambda: name in names)
        await self._mirror.until(lambda: name not in names)

    async def _persist(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Repeat `attempt` until etcd confirms it. More than one attempt may take effect."""
        while True:
            try:
                await attempt()
            except (EtcdError, NoAnswerError) as error:
                self._absence.report(f"no session in etcd: {error}")
                await asyncio.sleep(RETRY_PAUSE_S)
            else:
                self._absence.resolve("etcd answers")
                return

    async def _publish_key(self, key: registry_pb2.VerificationKey, lease: int) -> None:
        name = self._keys.signing(key.key_id, f"{lease:x}")
        await self._client.put(name, key.SerializeToString(), lease)

    async def _announce(self, name: str, lease: int) -> None:
        await self._client.put(self._keys.presence(name), b"", lease)

    async def _begin(self, lease: int) -> None:
        """Publish this scheduler's session. Set `base` and the ticket key first, if absent."""
        await self._create(self._keys.base, b"%d" % self._base)
        await self._create(self._keys.ticket_key, secrets.token_bytes())
        self.lease = lease  # operations wait until the watch delivers the key below
        await self._client.put(self._keys.session(f"{lease:x}"), b"", lease)
        _log.info("session %x in etcd", lease)

    async def _create(self, key: bytes, value: bytes) -> None:
        """Set a key that all schedulers share, unless it exists."""
        is_absent = etcd_pb2.Compare(key=key, target=etcd_pb2.Compare.CREATE, create_revision=0)
        put = etcd_pb2.RequestOp(request_put=etcd_pb2.PutRequest(key=key, value=value))
        await self._client.txn(etcd_pb2.TxnRequest(compare=[is_absent], success=[put]))
