"""Drills of faults inside the fabric: workers, devices, schedulers, etcd, certificates."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from datetime import timedelta
from pathlib import Path

import psutil
from drills import supervisor
from drills.drills import drill
from drills.site import WITHIN_S, Site, running
from support.fabric.real_fabric import Client
from support.scheduler.etcd_server import EtcdCluster
from support.time_limits import until

from duplane.fabric.tls.identity import Role, parse_identity
from duplane.fabric.tls.issuing import Authority, write_leaf
from duplane.worker.models.scripted.model import Mark

UNIT_S = 0.5  # between two units of a call, whose context has room for 680 units


@contextlib.asynccontextmanager
async def with_etcd(folder: Path, count: int) -> AsyncGenerator[Site]:
    """A fabric of two schedulers, whose members of etcd the site starts."""
    cluster = EtcdCluster(folder, count)
    for number, member in enumerate(cluster.members, 1):
        supervisor.define(folder, f"etcd{number}", member.command)
    members = supervisor.names(folder)
    await asyncio.to_thread(supervisor.start_all, folder, members)
    try:
        async with running(folder, scheduler_count=2, store=cluster.url("/drill/")) as site:
            yield site
    finally:
        for name in members:
            supervisor.kill(folder, name)


async def exchange_during(client: Client, work: asyncio.Future[None]) -> None:
    """Exchange units until the work is done: the caller notices nothing."""
    while not work.done():
        await client.exchange()
        await asyncio.wait({work}, timeout=UNIT_S)
    await work


@drill("worker-offline", "DuplaneProcessDown", "DuplaneNoWorkers", "DuplaneWorkersLost")
async def worker_offline(folder: Path) -> None:
    """Kill all workers; a client waits meanwhile."""
    async with running(folder) as site, site.call() as client:
        await client.end()
        site.kill("worker1", "worker2")
        await site.fires("DuplaneProcessDown", "DuplaneNoWorkers", "DuplaneWorkersLost")
        assert "lost" in await site.follow("worker-offline", "Look")
        await site.follow("worker-offline", "Do")
        await site.until_ready(2)
        assert "lost" not in await site.follow("worker-offline", "Over")
        await site.clears("DuplaneProcessDown", "DuplaneNoWorkers", "DuplaneWorkersLost")
        async with site.call() as again:
            await again.end()


@drill("no-slots", "DuplaneQueueWaits")
async def no_slots(folder: Path) -> None:
    """Hold both slots, so that a third client waits for more than a minute."""
    async with (
        running(folder) as site,
        site.call() as one,
        site.call() as other,
        site.client() as waiting,
    ):

        async def alerted() -> None:
            await site.fires("DuplaneQueueWaits", within_s=60 + WITHIN_S)
            assert "waiting: 1" in await site.follow("no-slots", "Look")
            await site.follow("no-slots", "Do")

        work = asyncio.ensure_future(alerted())
        await asyncio.gather(exchange_during(one, work), exchange_during(other, work))
        await waiting.begin()
        assert "waiting: 0" in await site.follow("no-slots", "Over")
        await site.clears("DuplaneQueueWaits")
        for client in (waiting, one, other):
            await client.end()


@drill("device-stuck", "DuplaneDeviceStuck")
async def device_stuck(folder: Path) -> None:
    """Let a call into the model of a worker never return; the worker ends itself."""
    flags = ("--stuck-after-s", "1", "--hung-after-s", "8")
    async with running(folder, worker_count=1, worker_flags=flags) as site:
        async with site.call() as client:
            client.speech[client.sent * 16_000] = Mark.HUNG_DEVICE.value
            await client.send_unit()
            await site.fires("DuplaneDeviceStuck")
        await site.follow("device-stuck", "Look")

        async def has_ended() -> bool:
            return supervisor.process(folder, "worker1") is None

        await until(has_ended, WITHIN_S)
        await site.follow("device-stuck", "Do")
        await site.until_ready(1)
        await site.clears("DuplaneDeviceStuck")
        await site.follow("device-stuck", "Over")
        async with site.call() as again:
            await again.end()


@drill("schedulers-gone", "DuplaneNoSchedulers")
async def schedulers_gone(folder: Path) -> None:
    """Kill both schedulers during a call."""
    async with with_etcd(folder, 1) as site, site.call() as client:
        site.kill("scheduler1", "scheduler2")

        async def recovered() -> None:
            await site.fires("DuplaneNoSchedulers")
            assert "no scheduler answers" in await site.follow("schedulers-gone", "Look")
            await site.follow("schedulers-gone", "Do")
            await site.until_ready(2)
            await site.clears("DuplaneNoSchedulers")

        await exchange_during(client, asyncio.ensure_future(recovered()))
        assert "answers" in await site.follow("schedulers-gone", "Over")
        async with site.call() as other:
            await other.end()
        await client.end()


@drill("etcd-without-majority", "DuplaneStoreContactLost")
async def etcd_without_majority(folder: Path) -> None:
    """Kill two of three members of etcd during a call."""
    page = "etcd-without-majority"
    async with with_etcd(folder, 3) as site, site.call() as client:
        site.kill("etcd2", "etcd3")

        async def recovered() -> None:
            await site.fires("DuplaneStoreContactLost")
            await site.follow(page, "Look")
            await site.follow(page, "Do")
            await site.clears("DuplaneStoreContactLost")
            await site.until_ready(2)

        await exchange_during(client, asyncio.ensure_future(recovered()))
        await site.follow(page, "Over")
        async with site.call() as other:
            await other.end()
        await client.end()


@drill("restore-from-nothing", "DuplaneNoSchedulers")
async def restore_from_nothing(folder: Path) -> None:
    """Lose etcd with its data, and the schedulers, during a call."""
    page = "restore-from-nothing"
    async with with_etcd(folder, 1) as site, site.call() as client:
        site.kill("etcd1", "scheduler1", "scheduler2")

        async def recovered() -> None:
            await site.fires("DuplaneNoSchedulers")
            await site.follow(page, "Look")
            await site.follow(page, "Do")
            await site.until_ready(2)
            await site.clears("DuplaneNoSchedulers")

        await exchange_during(client, asyncio.ensure_future(recovered()))
        await site.follow(page, "Over")
        slots = [
            slot for row in (await site.status())["workers"] for slot in row["worker"]["slots"]
        ]
        assert sum(slot["state"] == "SLOT_STATE_OCCUPIED" for slot in slots) == 1
        async with site.call() as other:
            await other.end()
        await client.end()


@drill("certificate-expired", "DuplaneCertificateEnds")
async def certificate_expired(folder: Path) -> None:
    """Give the workers a certificate that ends soon; a worker that starts after its end cannot."""
    page = "certificate-expired"
    certificates = folder / "certs"
    tls = "--fabric-tls", "SITE/certs/"

    def of(role: Role) -> tuple[str, str]:
        return tls[0], f"{tls[1]}{role}"

    prepare = f"duplane certs dev {certificates} --name worker --days 30"
    async with running(
        folder,
        scheduler_flags=of(Role.SCHEDULER),
        worker_flags=of(Role.WORKER),
        edge_flags=of(Role.EDGE),
        environment={"DUPLANE_FABRIC_TLS": str(certificates / Role.OPERATOR)},
        prepare=prepare,
    ) as site:
        authority = Authority.load(certificates)
        identity = parse_identity("spiffe://duplane.internal/duplane/worker/worker")
        chain, key = authority.issue(identity, timedelta(seconds=15))
        write_leaf(certificates / Role.WORKER, chain, key, authority.pem)
        await site.fires("DuplaneCertificateEnds")

        async def has_expired() -> bool:
            return "has expired" in await site.follow(page, "Look")

        await until(has_expired, WITHIN_S)
        site.kill("worker1")
        await site.shell("start worker1")

        async def has_ended() -> bool:
            return supervisor.process(folder, "worker1") is None

        await until(has_ended, WITHIN_S)
        assert "has expired" in (folder / "worker1.log").read_text()
        await site.follow(page, "Do")
        await site.until_ready(2)
        await site.clears("DuplaneCertificateEnds")
        await site.follow(page, "Over")
        async with site.call() as client:
            await client.end()


@drill("units-late", "DuplaneUnitsLate")
async def units_late(folder: Path) -> None:
    """Make a worker slow; its session moves when it drains."""
    page = "units-late"
    async with running(folder, worker_count=1) as site, site.call() as client:
        (worker,) = [found for found in [supervisor.process(folder, "worker1")] if found]

        async def be_slow() -> None:
            await site.fires("DuplaneUnitsLate")

        work = asyncio.ensure_future(be_slow())
        while not work.done():
            await slow_exchange(client, worker)
        await work
        await site.follow(page, "Look")
        await exchange_during(client, asyncio.ensure_future(followed(site, page)))
        await site.follow(page, "Over")
        late = "sum(increase(duplane_unit_deadlines_missed_total{role='edge'}[2s])) or vector(0)"
        await exchange_during(
            client, asyncio.ensure_future(site.prometheus.until(late, [0.0], WITHIN_S))
        )
        await client.end()


async def slow_exchange(client: Client, worker: psutil.Process) -> None:
    """Exchange a unit that takes longer than its sound lasts, because the worker is frozen."""
    worker.suspend()
    try:
        await client.send_unit()
        await asyncio.sleep(1.2)  # the fault itself: the time by which the unit is late
    finally:
        worker.resume()
    await client.receive()


async def followed(site: Site, page: str) -> None:
    await site.follow(page, "Do")
