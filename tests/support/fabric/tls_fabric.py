"""A fabric with mutual TLS in the test's process: its certificates, a scheduler and a worker."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from support.fabric.in_process import LocalWorker
from support.scheduler.scheduler_harness import SchedulerHarness
from support.time_limits import WITHIN_S, until

from duplane.fabric.tls.credentials import FabricCredentials
from duplane.fabric.tls.identity import Identity, Role
from duplane.fabric.tls.issuing import Authority, write_leaf
from duplane.fabric.tls.settings import DEFAULT_TRUST_DOMAIN, FabricTlsSettings
from duplane.tools.operators.snapshots import merge, read_fabric

NAME = "host"
LIFE = timedelta(hours=1)


class FabricCertificates:
    """The certificates of the processes of one fabric, each in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.authority = Authority.make()
        self.bundle = self.authority.pem

    def issue(
        self,
        role: Role,
        name: str = NAME,
        *,
        trust_domain: str = DEFAULT_TRUST_DOMAIN,
        life: timedelta = LIFE,
        **options: Any,
    ) -> Path:
        """Write a new certificate; return its directory, which is the same for role and name."""
        identity = Identity(trust_domain, role, name)
        chain, key = self.authority.issue(identity, life, **options)
        directory = self._directory / role / name
        write_leaf(directory, chain, key, self.bundle)
        return directory

    def settings(self, role: Role, name: str = NAME, **settings: Any) -> FabricTlsSettings:
        return FabricTlsSettings(fabric_tls=self.issue(role, name), **settings)

    def credentials(self, role: Role, name: str = NAME) -> FabricCredentials:
        return FabricCredentials(self.issue(role, name), role, DEFAULT_TRUST_DOMAIN)


@dataclass
class TlsFabric:
    """A running scheduler and worker."""

    scheduler: SchedulerHarness
    worker: LocalWorker
    worker_address: str


@contextlib.asynccontextmanager
async def tls_fabric(
    certificates: FabricCertificates, *, slot_count: int = 4, deny: Path | None = None
) -> AsyncGenerator[TlsFabric]:
    """Run a scheduler and a worker with the scripted model until the end of the `with`."""
    settings = certificates.settings(Role.SCHEDULER, fabric_deny=deny)
    operator = certificates.credentials(Role.OPERATOR)
    async with SchedulerHarness.running(fabric=settings) as scheduler:
        worker = LocalWorker(
            None,
            checkpoint="scripted",
            schedulers=(scheduler.address,),
            slot_count=slot_count,
            worker_id=f"{NAME}-1",
            fabric=certificates.settings(Role.WORKER, fabric_deny=deny),
        )
        addresses: list[str] = []

        async def is_attached() -> bool:
            workers = merge(await read_fabric([scheduler.address], operator)).workers
            addresses[:] = [one.worker.address for one in workers]
            return bool(addresses)

        try:
            await until(is_attached, WITHIN_S)
            yield TlsFabric(scheduler, worker, addresses[0])
        finally:
            await worker.cancel()
