"""Certificates of a fabric are replaced while sessions run: no call fails and no unit is late."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator
from datetime import timedelta
from pathlib import Path

import pytest
from support.fabric.tls_fabric import FabricCertificates, tls_fabric
from support.scheduler.scheduler_harness import AUDIO
from support.time_limits import WITHIN_S, until
from support.worker.worker_harness import pcm

from duplane.fabric import watched_files
from duplane.fabric.client import FabricClient
from duplane.fabric.tls.identity import Role
from duplane.fabric.tls.issuing import Authority
from duplane.fabric.v1 import admin_pb2, lease_pb2, session_pb2

pytestmark = [pytest.mark.slow, pytest.mark.timing]

LATE_S = 1.0  # a unit of one second must be answered before the next one
UNIT_INTERVAL_S = 0.05
UNITS_PER_SESSION = 6
SESSIONS = 3
LEAF_ROTATIONS = 20
LEAF_LIFE = timedelta(seconds=3)  # shorter than the test: sessions outlive their certificates
ROLES = (Role.SCHEDULER, Role.WORKER, Role.EDGE)


class Load:
    """Sessions and other calls of an edge. The first failure ends the test."""

    def __init__(self, client: FabricClient) -> None:
        self._client = client
        self.session_count = 0
        self.longest_s = 0.0

    async def talk(self, name: str, units_per_session: int | None) -> None:
        """Hold one session after the other; without a number of units, one session."""
        for number in itertools.count():
            wish = lease_pb2.AcquireLeaseRequest(request_id=f"{name}-{number}", kind=AUDIO)
            async with self._client.session(wish) as stream:
                await stream.open(session_pb2.Open())
                units = itertools.count() if units_per_session is None else range(units_per_session)
                for sequence in units:
                    begin_s = time.monotonic()
                    await stream.send(session_pb2.Unit(sequence=sequence, audio=pcm(0.1)))
                    assert (await stream.read()).delta.sequence == sequence
                    self.longest_s = max(self.longest_s, time.monotonic() - begin_s)
                    await asyncio.sleep(UNIT_INTERVAL_S)
                await stream.close()
                assert (await stream.read()).HasField("closed")
            self.session_count += 1

    async def ask(self) -> None:
        """List workers again and again."""
        while True:
            listed = await self._client.administer(
                lambda admin: admin.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=WITHIN_S)
            )
            assert len(listed.workers) == 1
            await asyncio.sleep(UNIT_INTERVAL_S)

    async def goes_on(self, count: int = 1) -> None:
        """Wait until `count` more sessions have begun and ended."""
        wanted = self.session_count + count

        async def is_reached() -> bool:
            return self.session_count >= wanted

        await until(is_reached, WITHIN_S)


class Reloads(logging.Handler):
    """Counts the reads of files."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        assert record.levelno == logging.INFO, record.getMessage()
        self.count += 1


@pytest.fixture
async def reloads(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Reloads]:
    monkeypatch.setattr(watched_files, "CHECK_INTERVAL_S", 0.02)
    log = logging.getLogger(watched_files.__name__)
    handler = Reloads()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler
    log.setLevel(logging.NOTSET)
    log.removeHandler(handler)


async def replace(certificates: FabricCertificates, reloads: Reloads) -> None:
    """Write new certificates for all processes, and wait until all have read them."""
    before = reloads.count
    for role in ROLES:
        certificates.issue(role, life=LEAF_LIFE)

    async def is_read() -> bool:
        return reloads.count >= before + len(ROLES)

    await until(is_read, WITHIN_S)


async def test_rotations_of_certificates_and_of_the_ca_disturb_no_session(
    tmp_path: Path, reloads: Reloads
) -> None:
    certificates = FabricCertificates(tmp_path)
    edge = certificates.credentials(Role.EDGE)
    async with (
        tls_fabric(certificates, slot_count=SESSIONS + 1) as fabric,
        FabricClient([fabric.scheduler.address], edge) as client,
        watched_files.watching(edge.watched_files),
        asyncio.TaskGroup() as tasks,
    ):
        load = Load(client)
        running = [
            tasks.create_task(load.ask()),
            tasks.create_task(load.talk("long", None)),
            *(
                tasks.create_task(load.talk(f"short-{number}", UNITS_PER_SESSION))
                for number in range(SESSIONS - 1)
            ),
        ]
        await load.goes_on()
        for _ in range(LEAF_ROTATIONS):
            await replace(certificates, reloads)
            await asyncio.sleep(UNIT_INTERVAL_S)
        await load.goes_on(SESSIONS)
        former, new = certificates.authority, Authority.make()
        certificates.bundle = former.pem + new.pem
        await replace(certificates, reloads)
        await load.goes_on(SESSIONS)
        certificates.authority = new
        await replace(certificates, reloads)
        await load.goes_on(SESSIONS)
        certificates.bundle = new.pem
        await replace(certificates, reloads)
        await load.goes_on(SESSIONS)
        for task in running:
            task.cancel()
    assert load.longest_s < LATE_S
