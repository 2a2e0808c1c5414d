"""A simulated fabric: real schedulers and the real admission of workers, on virtual time.

Callers, workers, connections and etcd are simulated. A seed decides the number of schedulers, every
delay and every fault. One scheduler keeps its leases in memory; several keep them in etcd.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Sequence
from functools import partial

from simulation.checks import BrokenLawError, Laws, require
from simulation.etcd import SimulatedClient, SimulatedEtcd
from simulation.network import Call, CallError, delay
from simulation.scheduler import SETTINGS, Scheduler

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import lease_pb2, registry_pb2
from duplane.worker.admission import Admission, slot_reports

AUDIO = lease_pb2.SESSION_KIND_AUDIO_DUPLEX
FAULTS_S = 12.0  # faults happen during this time; afterwards the fabric must settle
REST_S = 300.0  # within this time every caller must have had a session
# After this time, unclaimed grants have been returned and slots are clean.
LAST_S = 20.0 + SETTINGS.claim_timeout_s
ABSENT_S = 15.0  # after this time, etcd has deleted the records of dead schedulers
CUT_S = 25.0  # longest time without etcd: longer than a scheduler waits for etcd
DOWN_S = 6.0  # longest time from the death of a scheduler to its next start
NOTICE_S = 15.0  # longest time until a server notices that a client has gone
SLOW_CLAIM_S = 15.0  # longest time from a grant to its claim; longer than the time limit of claims
RELEASE_S = 2.0
SLOTS = 2
TENANTS = ("", "", "a", "a", "b")


class SimulatedFabric:
    """Scheduler, workers and callers of one seed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.laws = Laws()
        self._boot_ms = 1_700_000_000_000
        count = self.chance.randint(1, 3)
        self._etcd = SimulatedEtcd() if count > 1 else None
        self.schedulers: list[Scheduler | None] = [self._boot() for _ in range(count)]
        self.workers = {name: Worker(name, self) for name in ("w0", "w1", "w2")}

    async def run(self) -> None:
        """Run the simulation to its end. Raises BrokenLawError."""
        workers = [asyncio.create_task(worker.run()) for worker in self.workers.values()]
        callers = [
            asyncio.create_task(Caller(number, self).run())
            for number in range(self.chance.randint(4, 14))
        ]
        faults = asyncio.create_task(self._fail())
        try:
            async with asyncio.timeout(FAULTS_S + REST_S):
                await asyncio.gather(faults, *callers)
            await self._rest()
            self.check()
        except BrokenLawError:
            self.check()  # an earlier broken law may be the cause
            raise
        except TimeoutError:
            self.check()
            raise BrokenLawError("a ticket was lost") from None
        finally:
            for task in (faults, *callers, *workers):
                task.cancel()
        for scheduler in self.running:
            await scheduler.kill()
        require(self.laws.grant_count, "nothing was granted")

    async def _rest(self) -> None:
        """Wait until nothing is left of the sessions. Raises BrokenLawError after a time limit."""
        loop = asyncio.get_running_loop()
        limit = loop.time() + LAST_S + (ABSENT_S if self._etcd else 0)
        while left := self._left():
            require(loop.time() < limit, f"{left} are left")
            await asyncio.sleep(1)

    def _left(self) -> str:
        """Return what ended sessions have left behind, as a text that may be empty."""
        left = [self.laws.left(one.state, one.waiters) for one in self.running]
        if any(left):
            return next(filter(None, left))
        held = self._etcd.held if self._etcd else ()
        if any(b"/request/" in key or b"/order/" in key for key in held):
            return "keys"
        is_idle = all(worker.admission.is_idle for worker in self.workers.values())
        return "" if is_idle else "occupied slots"

    @property
    def running(self) -> Sequence[Scheduler]:
        """The running schedulers."""
        return [scheduler for scheduler in self.schedulers if scheduler]

    def check(self) -> None:
        """Raise the first broken law, or the error that ended a scheduler, if there is one."""
        failures = [one.failure for one in self.running if one.failure]
        if failure := self.laws.broken or next(iter(failures), None):
            raise failure

    @contextlib.asynccontextmanager
    async def call(self, at: int, method: str, request: object = None) -> AsyncGenerator[Call]:
        """Call the scheduler at an index, if it runs. Raises CallError."""
        await delay(self.chance)
        scheduler = self.schedulers[at % len(self.schedulers)]
        call = Call(self.chance)
        if scheduler is None:
            raise CallError("UNAVAILABLE", "it does not run")
        if method == "Attach":
            call.on_applied = self.laws.reports_of(scheduler.state)
            serve = partial(scheduler.registry.Attach, call.requests())
        else:
            serve = partial(getattr(scheduler.leases, method), request)
        scheduler.calls[call] = None
        call.begin(serve, lambda: scheduler.calls.pop(call, None))
        try:
            yield call
        finally:
            call.cut()

    def _boot(self) -> Scheduler:
        self._boot_ms += 10_000
        client = SimulatedClient(self._etcd, self.chance) if self._etcd else None
        return Scheduler(client, self._boot_ms, self.laws)

    async def _replace(self, at: int) -> None:
        """Kill a scheduler. Its next process starts immediately, or after some time."""
        if scheduler := self.schedulers[at]:
            self.schedulers[at] = None
            await scheduler.kill()
            await asyncio.sleep(self.chance.uniform(0, DOWN_S) if self._etcd else 0)
            self.schedulers[at] = self._boot()

    async def _fail(self) -> None:
        """Inject faults for FAULTS_S seconds."""
        loop = asyncio.get_running_loop()
        chance = self.chance
        until = loop.time() + FAULTS_S
        kinds = ("scheduler", "worker", "cut", "cut", "cut", "half cut", "half cut", "half cut")
        if self._etcd:
            kinds = (*kinds, "etcd", "outage", "session", "compaction")
        async with asyncio.TaskGroup() as tasks:
            while loop.time() < until:
                await asyncio.sleep(chance.expovariate(0.5))
                scheduler = chance.choice(self.running) if self.running else None
                match chance.choice(kinds):
                    case "scheduler":
                        tasks.create_task(self._replace(chance.randrange(len(self.schedulers))))
                    case "worker":
                        chance.choice(list(self.workers.values())).restart()
                    case "cut" if scheduler and scheduler.calls:
                        chance.choice(list(scheduler.calls)).cut()
                    case "half cut" if scheduler:
                        self._half_cut(scheduler)
                    case kind if self._etcd:
                        self._harm_etcd(self._etcd, kind, scheduler)
                    case _:
                        pass

    def _harm_etcd(self, etcd: SimulatedEtcd, kind: str, scheduler: Scheduler | None) -> None:
        match kind:
            case "etcd" if scheduler:
                self._cut_off(scheduler)
            case "outage":
                self._cut_off(*self.running)
            case "session":
                etcd.end_one(self.chance)
            case "compaction":
                etcd.compact()
            case _:
                pass

    def _cut_off(self, *schedulers: Scheduler) -> None:
        """Cut these schedulers off from etcd, all of them for the same time."""
        duration_s = self.chance.uniform(0, CUT_S)
        for scheduler in schedulers:
            if scheduler.client:
                scheduler.client.cut(duration_s)

    def _half_cut(self, scheduler: Scheduler) -> None:
        """Break a call after its first answer, so that the server detects the break late."""
        if answered := [call for call in scheduler.calls if call.has_answered]:
            self.chance.choice(answered).half_cut(self.chance.uniform(0, NOTICE_S))


class Worker:
    """A worker: its real admission, a simulated attach loop, and sessions without a model."""

    def __init__(self, name: str, fabric: SimulatedFabric) -> None:
        self.name = name
        self._fabric = fabric
        self._incarnation = 0
        self._stream_number = 0
        self._at = 0  # index of the scheduler
        self._call: Call | None = None
        self._sessions: dict[asyncio.Task[None], None] = {}
        self._new_admission()

    def _new_admission(self) -> None:
        self.admission = Admission(self.name, SLOTS, [AUDIO], self._report)

    def restart(self) -> None:
        """Kill the process, and start another one with the same name."""
        self._incarnation += 1
        for session in list(self._sessions):
            session.cancel()
        for slot in range(SLOTS):
            self._fabric.laws.slot_cleaned(self.name, slot)
        self._new_admission()
        if self._call:
            self._call.cut()

    async def run(self) -> None:
        """Attach, again and again."""
        while True:
            self._stream_number += 1
            with contextlib.suppress(CallError):
                await self._attach()
            self._at += 1
            await asyncio.sleep(self._fabric.chance.uniform(0.1, 0.5))

    async def _attach(self) -> None:
        async with self._fabric.call(self._at, "Attach") as call:
            register = registry_pb2.Register(
                worker_id=self.name,
                incarnation=str(self._incarnation),
                address="127.0.0.1:1",
                kinds=[AUDIO],
                slots=slot_reports(self.admission),
                stream_number=self._stream_number,
            )
            call.send(registry_pb2.AttachRequest(register=register))
            self._call = call
            reports = asyncio.create_task(self._report_at_intervals())
            try:
                while True:
                    self._execute(await call.read())
            finally:
                self._call = None
                reports.cancel()
                self.admission.detach(asyncio.get_running_loop().time())

    async def _report_at_intervals(self) -> None:
        while True:
            await asyncio.sleep(SETTINGS.report_interval_s)
            self._report()

    def _report(self) -> None:
        if self._call:
            report = registry_pb2.Report(slots=slot_reports(self.admission))
            self._call.send(registry_pb2.AttachRequest(report=report))

    def _execute(self, message: registry_pb2.AttachResponse) -> None:
        now = asyncio.get_running_loop().time()
        if message.HasField("registered"):
            registered = message.registered
            self.admission.register(registered.worker_epoch, registered.verification_keys, now)
        elif message.HasField("revoke"):
            revoke = message.revoke
            self.admission.revoke(revoke.slot, revoke.fencing_number, revoke.lease_id)
            self._fabric.laws.number_revoked(self.name, revoke.slot, revoke.fencing_number)
        elif message.HasField("progress"):
            self.admission.note_progress(message.progress.fencing_number, now)

    async def serve(self, lease: lease_pb2.Lease, held_s: float, cleanup_s: float) -> None:
        """Run one session to its end. Raises FabricError if the lease is refused."""
        admission = self.admission
        claims = admission.claim(lease, asyncio.get_running_loop().time())
        self._fabric.laws.session_began(self.name, claims.slot, claims.fencing_number)
        session = asyncio.create_task(self._converse(admission, claims.slot, held_s, cleanup_s))
        self._sessions[session] = None
        session.add_done_callback(lambda ended: self._sessions.pop(ended, None))
        await asyncio.wait([session])

    async def _converse(
        self, admission: Admission, slot: int, held_s: float, cleanup_s: float
    ) -> None:
        await asyncio.sleep(held_s)
        admission.begin_cleanup(slot)
        await asyncio.sleep(cleanup_s)
        self._fabric.laws.slot_cleaned(self.name, slot)
        admission.finish_cleanup(slot, is_clean=True)


class Caller:
    """One session of an edge. It acquires a lease and claims it, or sometimes gives up."""

    def __init__(self, number: int, fabric: SimulatedFabric) -> None:
        self._name = f"r{number}"
        self._fabric = fabric
        self._tenant_id = fabric.chance.choice(TENANTS)
        self._ticket_id, self._ticket_proof = "", b""
        self._was_granted = False
        self._caller_key = self._name.encode()
        self._at = 0  # index of the scheduler

    async def run(self) -> None:
        """Wait for a grant and use it; sometimes leave the queue, or do not use the grant."""
        chance = self._fabric.chance
        await asyncio.sleep(chance.uniform(0, FAULTS_S / 2))
        patience_s = chance.uniform(0, 20) if chance.random() < 0.3 else REST_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                for attempt in range(1000):
                    if await self._use(await self._acquire(f"{self._name}/{attempt}")):
                        return
                    await asyncio.sleep(chance.uniform(0.1, 0.4))
        require(patience_s < REST_S, "a ticket was lost")

    async def _acquire(self, request_id: str) -> lease_pb2.Granted:
        while True:
            request = lease_pb2.AcquireLeaseRequest(
                request_id=request_id,
                kind=AUDIO,
                ticket_id=self._ticket_id,
                tenant_id=self._tenant_id,
                was_granted=self._was_granted,
                ticket_proof=self._ticket_proof,
                caller_key=self._caller_key,
            )
            try:
                return await self._read_grant(request)
            except CallError as error:
                require(error.code == "UNAVAILABLE", f"a call ended with {error}")
                self._at += 1
            except TimeoutError:
                await self._release(lease_pb2.ReleaseLeaseRequest(request_id=request_id))
                raise
            await asyncio.sleep(self._fabric.chance.uniform(0, 0.5))

    async def _read_grant(self, request: lease_pb2.AcquireLeaseRequest) -> lease_pb2.Granted:
        position: int | None = None
        async with self._fabric.call(self._at, "AcquireLease", request) as call:
            while True:
                response = await call.read()
                if response.HasField("granted"):
                    if response.granted.ticket_id:
                        self._ticket_id = response.granted.ticket_id
                        self._ticket_proof = response.granted.ticket_proof
                    self._was_granted = bool(self._ticket_id)
                    return response.granted
                self._fabric.laws.position_shown(position, response.queued.position)
                self._fabric.laws.place_shown(self._ticket_id, response.queued.ticket_id)
                position, self._ticket_id = response.queued.position, response.queued.ticket_id
                self._ticket_proof = response.queued.ticket_proof

    async def _use(self, granted: lease_pb2.Granted) -> bool:
        """Claim a lease and hold its slot, or die before the claim.

        Return False if the claim fails.
        """
        chance = self._fabric.chance
        if chance.random() < 0.1:
            return True  # the edge has died: nobody claims this lease or gives it back
        await delay(chance)
        worker = self._fabric.workers[granted.worker_id]
        try:
            if chance.random() < 0.15:
                raise FabricError(Reason.UNAVAILABLE, "the edge cannot reach the worker")
            if chance.random() < 0.1:
                await asyncio.sleep(chance.uniform(0, SLOW_CLAIM_S))
            await worker.serve(granted.lease, chance.expovariate(0.25), chance.uniform(0, 0.5))
        except FabricError:
            await self._release(lease_pb2.ReleaseLeaseRequest(lease_id=granted.lease_id))
            return False
        if chance.random() < 0.2:
            with contextlib.suppress(FabricError):  # a copy of the call arrives late
                await worker.serve(granted.lease, 1, 0)
        return True

    async def _release(self, request: lease_pb2.ReleaseLeaseRequest) -> None:
        with contextlib.suppress(CallError, TimeoutError):
            async with (
                asyncio.timeout(RELEASE_S),
                self._fabric.call(self._at, "ReleaseLease", request) as call,
            ):
                await call.read()  # wait for the end of the call
