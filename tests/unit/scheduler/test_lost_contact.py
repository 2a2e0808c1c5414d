"""A scheduler that cannot reach etcd sends its workers and callers away, and serves again later.

The schedulers and etcd are those of the simulation, on virtual time.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from simulation.calls import (
    Chance,
    Schedulers,
    code_of,
    granted,
    queued,
    schedulers_of,
    simulated,
)
from simulation.etcd import PROBE_S
from simulation.network import Call
from simulation.virtual_time import run

from duplane.fabric.errors import FabricError
from duplane.fabric.v1 import admin_pb2
from duplane.scheduler.rpc.admin import AdminServicer
from duplane.scheduler.store.base import RETURN_S
from duplane.scheduler.store.etcd.contact import Contact
from duplane.scheduler.store.etcd.postponed import Postponed
from duplane.scheduler.store.etcd.session import ABSENCE_LIMIT_S, PRESENCE_TTL_S

CUT_S = 60.0
LIMIT_S = PRESENCE_TTL_S + ABSENCE_LIMIT_S
OUTAGE_S = LIMIT_S + 2.0
SOON_S = 1.0


def test_cut_off_scheduler_sends_its_worker_and_callers_to_another_one() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with schedulers_of(2) as fabric:
            worker = fabric.attach(0, 1)
            assert (await worker.read()).HasField("registered")
            assert (await granted(fabric.acquire(0, "holder"))).worker_id == "w"
            waiting = [fabric.acquire(0, f"r{number}") for number in range(3)]
            places = [await queued(call) for call in waiting]
            began = loop.time()
            fabric.clients[0].cut(CUT_S)
            releasing = fabric.release(0, "holder")  # waits for etcd
            async with asyncio.timeout(LIMIT_S + SOON_S):
                assert await code_of(releasing) == "UNAVAILABLE"
                assert await code_of(worker) == "UNAVAILABLE"
                assert [await code_of(call) for call in waiting] == ["UNAVAILABLE"] * 3
            assert loop.time() - began > LIMIT_S - PRESENCE_TTL_S / 2
            assert not fabric.schedulers[0].availability.is_serving
            async with asyncio.timeout(SOON_S):  # refused without a wait
                assert await code_of(fabric.attach(0, 2)) == "UNAVAILABLE"
                assert await code_of(fabric.acquire(0, "r0", places[0])) == "UNAVAILABLE"
                assert await code_of(fabric.release(0, "holder")) == "UNAVAILABLE"
            # The callers arrive at the other scheduler in reverse order. All keep their tickets.
            moved = [
                fabric.acquire(1, f"r{number}", places[number]) for number in reversed(range(3))
            ]
            returned = [(await queued(call)).ticket_id for call in moved]
            assert returned == [place.ticket_id for place in reversed(places)]
            second = fabric.attach(1, 3)
            assert (await second.read()).HasField("registered")
            first = await granted(moved[-1])
            assert first.ticket_id == places[0].ticket_id
            for call in (second, *moved):
                call.cut()

    simulated(main())


def test_scheduler_serves_again_when_it_reaches_etcd() -> None:
    async def main() -> None:
        async with schedulers_of(2) as fabric:
            worker = fabric.attach(0, 1)
            cut_off = fabric.schedulers[0]
            assert (await worker.read()).HasField("registered")
            fabric.clients[0].cut(CUT_S)
            assert await code_of(worker) == "UNAVAILABLE"
            cut_off.availability.changed.clear()
            async with asyncio.timeout(CUT_S):
                await cut_off.availability.changed.wait()
            assert cut_off.availability.is_serving
            assert not cut_off.state.workers, "the facts are not those of etcd"
            again = fabric.attach(0, 2)
            assert (await again.read()).HasField("registered")
            assert (await granted(fabric.acquire(0, "r"))).worker_id == "w"
            again.cut()

    simulated(main())


def test_single_scheduler_serves_its_callers_in_order_after_a_cut() -> None:
    """No other scheduler ends the session of this one in etcd, so the tickets outlast the cut."""

    async def main() -> None:
        async with schedulers_of(1) as fabric:
            waiting = [fabric.acquire(0, f"r{number}") for number in range(3)]
            places = [await queued(call) for call in waiting]
            fabric.clients[0].cut(CUT_S / 2)
            assert [await code_of(call) for call in waiting] == ["UNAVAILABLE"] * 3
            (scheduler,) = fabric.schedulers
            while not scheduler.availability.is_serving:
                scheduler.availability.changed.clear()
                await scheduler.availability.changed.wait()
            moved = [
                fabric.acquire(0, f"r{number}", places[number]) for number in reversed(range(3))
            ]
            returned = [(await queued(call)).ticket_id for call in moved]
            assert returned == [place.ticket_id for place in reversed(places)]
            worker = fabric.attach(0, 1)
            assert (await granted(moved[-1])).ticket_id == places[0].ticket_id
            for call in (worker, *moved):
                call.cut()

    simulated(main())


async def fail_etcd(fabric: Schedulers) -> None:
    """Cut all schedulers off from etcd for a while. Return when all of them serve again."""
    for client in fabric.clients:
        client.cut(OUTAGE_S)
    await asyncio.sleep(OUTAGE_S)
    assert not any(scheduler.availability.is_serving for scheduler in fabric.schedulers)
    for scheduler in fabric.schedulers:
        while not scheduler.availability.is_serving:
            scheduler.availability.changed.clear()
            await scheduler.availability.changed.wait()


def test_callers_keep_their_places_after_an_outage_of_etcd() -> None:
    """The worker and a new caller come first, then the callers in the reverse order."""

    async def main() -> None:
        async with schedulers_of(2) as fabric:
            waiting = [fabric.acquire(0, f"r{number}") for number in range(3)]
            places = [await queued(call) for call in waiting]
            await fail_etcd(fabric)
            worker = fabric.attach(0, 1)
            assert (await worker.read()).HasField("registered")
            new = fabric.acquire(1, "new")
            assert (await queued(new)).position == 4
            moved: dict[int, Call] = {}
            for number in reversed(range(3)):
                moved[number] = fabric.acquire(1, f"r{number}", places[number])
                assert (await queued(moved[number])).position == number + 1
            assert (await granted(moved[0])).ticket_id == places[0].ticket_id
            assert (await queued(moved[1])).position == 1
            for call in (worker, new, *moved.values()):
                call.cut()

    simulated(main())


def test_calls_that_do_not_return_after_an_outage_of_etcd_are_forgotten() -> None:
    async def main() -> None:
        async with schedulers_of(2) as fabric:
            state = fabric.schedulers[1].state
            worker = fabric.attach(0, 1)
            assert (await worker.read()).HasField("registered")
            assert (await granted(fabric.acquire(0, "holder"))).worker_id == "w"
            await queued(fabric.acquire(0, "gone"))
            await fail_etcd(fabric)
            assert state.tickets
            assert state.workers
            await asyncio.sleep(RETURN_S + SOON_S)
            assert not state.tickets
            assert not state.workers

    simulated(main())


def test_worker_that_returns_after_an_outage_of_etcd_stays() -> None:
    async def main() -> None:
        async with schedulers_of(2) as fabric:
            assert (await fabric.attach(0, 1).read()).HasField("registered")
            await fail_etcd(fabric)
            worker = fabric.attach(1, 2)
            assert (await worker.read()).HasField("registered")
            await asyncio.sleep(RETURN_S + SOON_S)
            assert "w" in fabric.schedulers[0].state.workers
            worker.cut()

    simulated(main())


def test_postponed_operations_do_not_begin_while_the_contact_is_lost_again() -> None:
    async def main() -> None:
        contact = Contact()
        begun = list[str]()
        postponed = Postponed(contact)
        limit_s = RETURN_S / 2

        async def until_current() -> None:
            pass

        running = asyncio.create_task(contact.run(limit_s, until_current))
        postponed.require_contact("early", lambda: begun.append("early"))
        await asyncio.sleep(limit_s + 0.01)
        with pytest.raises(FabricError):
            postponed.require_contact("late", lambda: begun.append("late"))
        confirm(contact)
        await asyncio.sleep(0.01)
        assert not contact.is_lost
        await asyncio.sleep(2 * RETURN_S)
        assert contact.is_lost
        assert begun == []
        for _ in range(5):
            confirm(contact)
            await asyncio.sleep(RETURN_S / 4)
        assert begun == ["late"]
        running.cancel()

    run(main())


def confirm(contact: Contact, offset_s: float = 0.0) -> None:
    at = asyncio.get_running_loop().time() + offset_s
    contact.confirm_presence(at)
    contact.confirm_watch(at)


def test_scheduler_whose_watch_is_blind_sends_its_callers_to_another_one() -> None:
    """etcd still confirms the scheduler's presence, but the watch delivers no grants."""

    async def main() -> None:
        async with schedulers_of(2) as fabric:
            blind, other = fabric.schedulers
            waiting = fabric.acquire(0, "r")
            place = await queued(waiting)
            fabric.clients[0].is_blind = True
            async with asyncio.timeout(LIMIT_S + PROBE_S + SOON_S):
                assert await code_of(waiting) == "UNAVAILABLE"
            assert not blind.availability.is_serving
            assert other.availability.is_serving
            worker = fabric.attach(1, 1)
            assert (await granted(fabric.acquire(1, "r", place))).worker_id == "w"
            fabric.clients[0].is_blind = False
            await asyncio.sleep(PROBE_S + SOON_S)
            assert blind.availability.is_serving
            worker.cut()

    simulated(main())


def test_short_cut_ends_no_call() -> None:
    async def main() -> None:
        async with schedulers_of(2) as fabric:
            waiting = fabric.acquire(0, "r")
            await queued(waiting)
            fabric.clients[0].cut(LIMIT_S - PRESENCE_TTL_S / 2)
            await asyncio.sleep(LIMIT_S + SOON_S)
            assert fabric.schedulers[0].availability.is_serving
            worker = fabric.attach(1, 1)
            assert (await granted(waiting)).worker_id == "w"
            worker.cut()

    simulated(main())


def test_contact_is_back_only_with_the_present_facts() -> None:
    async def main() -> None:
        contact = Contact()
        is_current = asyncio.Event()
        seen = list[bool]()
        contact.listeners.append(seen.append)

        async def until_current() -> None:
            await is_current.wait()

        running = asyncio.create_task(contact.run(LIMIT_S, until_current))
        await asyncio.sleep(LIMIT_S - 1)
        confirm(contact, -2)
        await asyncio.sleep(LIMIT_S - 3)
        assert seen == []
        await asyncio.sleep(2)
        assert seen == [True]
        contact.confirm_presence(asyncio.get_running_loop().time())
        await asyncio.sleep(1)
        is_current.set()
        await asyncio.sleep(1)
        assert seen == [True], "the watch is not up to date yet"
        is_current.clear()
        contact.confirm_watch(asyncio.get_running_loop().time())
        await asyncio.sleep(1)
        assert seen == [True]
        is_current.set()
        await asyncio.sleep(1)
        assert seen == [True, False]
        running.cancel()

    run(main())


def test_lists_of_a_scheduler_without_contact_are_refused() -> None:
    async def main() -> None:
        async with schedulers_of(1) as fabric:
            (scheduler,) = fabric.schedulers
            admin = AdminServicer(scheduler.store, scheduler.state, scheduler.watch)

            async def list_workers(context: Any) -> None:
                await context.write(
                    await admin.ListWorkers(admin_pb2.ListWorkersRequest(), context)
                )

            async def code() -> str:
                call = Call(Chance())
                call.begin(list_workers)
                return await code_of(call)

            assert await code() == "OK"
            fabric.clients[0].cut(CUT_S)
            await asyncio.sleep(LIMIT_S + SOON_S)
            assert await code() == "UNAVAILABLE"

    simulated(main())
