"""A simulated fabric: the real scheduler and the real admission of workers, on virtual time.

Callers, workers and connections are simulated. A seed decides every delay and every fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator

from simulation.checks import BrokenLawError, Laws, require
from simulation.network import Call, CallError, delay

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.lease_signing import LeaseSigner
from duplane.fabric.monitoring.spans import Telemetry
from duplane.fabric.v1 import lease_pb2, registry_pb2
from duplane.scheduler.granting import GrantLoop
from duplane.scheduler.metrics import SchedulerMetrics
from duplane.scheduler.position_updates import PositionUpdates
from duplane.scheduler.rpc.leases import LeaseServicer
from duplane.scheduler.rpc.registry import RegistryServicer
from duplane.scheduler.settings import SchedulerSettings
from duplane.scheduler.state import SchedulerState
from duplane.scheduler.store.memory import MemoryStore
from duplane.scheduler.waiters import Waiters
from duplane.scheduler.watch import Watch
from duplane.worker.admission import Admission, slot_reports

AUDIO = lease_pb2.SESSION_KIND_AUDIO_DUPLEX
SETTINGS = SchedulerSettings()
FAULTS_S = 20.0  # faults happen during this time; then the fabric must settle
REST_S = 300.0  # within this time every caller must have had a session
LAST_S = 20.0 + SETTINGS.claim_timeout_s  # then unclaimed grants have returned, slots are clean
SLOTS = 2
_signer = LeaseSigner()
_telemetry = Telemetry("scheduler")


class Scheduler:
    """One run of the scheduler process: its real parts without sockets."""

    def __init__(self, boot_ms: int, laws: Laws) -> None:
        clock = asyncio.get_running_loop().time
        self.calls: dict[Call, None] = {}  # a dict, because it keeps the order of their start
        self.store = MemoryStore(boot_ms, clock)
        self.state = SchedulerState(clock)
        grants = GrantLoop(
            self.store, self.state, SETTINGS.claim_timeout_s, SETTINGS.resume_grace_s
        )
        self.waiters = Waiters(self.store, self.state, SETTINGS.ticket_limit, grants.enqueue)
        positions = PositionUpdates(self.state)
        self.leases = LeaseServicer(
            SETTINGS,
            self.store,
            self.state,
            self.waiters,
            grants,
            _signer,
            _telemetry,
            SchedulerMetrics(self.state),
        )
        watch = Watch(self.state, SETTINGS.ticket_limit)
        self.registry = RegistryServicer(SETTINGS, self.store, self.state, watch, _signer)
        laws.scheduler_began(self.state)
        self.store.subscribe(self.state.apply)
        self._loops = [asyncio.create_task(loop.run()) for loop in (self.store, grants, positions)]

    def stop(self) -> None:
        """End the process at once."""
        for call in list(self.calls):
            call.cut()
        for loop in self._loops:
            loop.cancel()


class SimulatedFabric:
    """Scheduler, workers and callers of one seed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.laws = Laws()
        self._boot_ms = 1_700_000_000_000
        self.scheduler = self._boot()
        self.workers = {name: Worker(name, self) for name in ("w0", "w1", "w2")}

    async def run(self) -> None:
        """Run the simulation to its end. Raises BrokenLawError."""
        workers = [asyncio.create_task(worker.run()) for worker in self.workers.values()]
        callers = [
            asyncio.create_task(Caller(number, self).run())
            for number in range(self.chance.randint(6, 24))
        ]
        faults = asyncio.create_task(self._fail())
        try:
            async with asyncio.timeout(FAULTS_S + REST_S):
                await asyncio.gather(faults, *callers)
            await asyncio.sleep(LAST_S)
        except TimeoutError:
            raise self.laws.broken or BrokenLawError("a ticket was lost") from None
        finally:
            for task in (faults, *callers, *workers):
                task.cancel()
            self.scheduler.stop()
        if self.laws.broken:
            raise self.laws.broken
        self.laws.check_left(self.scheduler.state, self.scheduler.waiters)
        for worker in self.workers.values():
            require(worker.admission.is_idle, "a slot was not freed")
        require(self.laws.grant_count, "nothing was granted")

    @contextlib.asynccontextmanager
    async def call(self, method: str, request: object = None) -> AsyncGenerator[Call]:
        """Call the scheduler that runs at this moment."""
        await delay(self.chance)
        scheduler, call = self.scheduler, Call(self.chance)
        if method == "Attach":
            call.begin(lambda context: scheduler.registry.Attach(call.requests(), context))
        else:
            serve = getattr(scheduler.leases, method)
            call.begin(lambda context: serve(request, context))
        scheduler.calls[call] = None
        try:
            yield call
        finally:
            scheduler.calls.pop(call, None)
            call.cut()

    def _boot(self) -> Scheduler:
        self._boot_ms += 10_000
        return Scheduler(self._boot_ms, self.laws)

    async def _fail(self) -> None:
        """Inject faults for FAULTS_S seconds."""
        loop = asyncio.get_running_loop()
        while loop.time() < FAULTS_S:
            await asyncio.sleep(self.chance.expovariate(0.5))
            match self.chance.choice(("scheduler", "worker", "cut", "cut", "cut")):
                case "scheduler":
                    self.scheduler.stop()
                    await asyncio.sleep(0)
                    self.scheduler = self._boot()
                case "worker":
                    self.chance.choice(list(self.workers.values())).restart()
                case _:
                    if calls := list(self.scheduler.calls):
                        self.chance.choice(calls).cut()


class Worker:
    """A worker: its real admission, a simulated attach loop, and sessions without a model."""

    def __init__(self, name: str, fabric: SimulatedFabric) -> None:
        self.name = name
        self._fabric = fabric
        self._incarnation = 0
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
            with contextlib.suppress(CallError):
                await self._attach()
            await asyncio.sleep(self._fabric.chance.uniform(0.1, 0.5))

    async def _attach(self) -> None:
        async with self._fabric.call("Attach") as call:
            register = registry_pb2.Register(
                worker_id=self.name,
                incarnation=str(self._incarnation),
                address="127.0.0.1:1",
                kinds=[AUDIO],
                slots=slot_reports(self.admission),
            )
            call.send(registry_pb2.AttachRequest(register=register))
            self._call, reports = call, asyncio.create_task(self._report_at_intervals())
            try:
                while True:
                    self._execute(await call.read())
            finally:
                self._call = None
                reports.cancel()

    async def _report_at_intervals(self) -> None:
        while True:
            await asyncio.sleep(SETTINGS.report_interval_s)
            self._report()

    def _report(self) -> None:
        if self._call:
            report = registry_pb2.Report(slots=slot_reports(self.admission))
            self._call.send(registry_pb2.AttachRequest(report=report))

    def _execute(self, message: registry_pb2.AttachResponse) -> None:
        if message.HasField("registered"):
            registered = message.registered
            now = asyncio.get_running_loop().time()
            self.admission.register(registered.worker_epoch, registered.verification_keys, now)
        elif message.HasField("revoke"):
            revoke = message.revoke
            self.admission.revoke(revoke.slot, revoke.fencing_number, revoke.lease_id)

    async def serve(self, lease: lease_pb2.Lease, held_s: float, cleanup_s: float) -> None:
        """Run one session to its end. Raises FabricError if the lease is refused."""
        admission = self.admission
        claims = admission.claim(lease, asyncio.get_running_loop().time())
        self._fabric.laws.session_began(self.name, claims.slot, claims.lease_id)
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
        self._ticket_id = ""

    async def run(self) -> None:
        """Wait for a grant and use it; sometimes leave the queue, or do not use the grant."""
        chance = self._fabric.chance
        await asyncio.sleep(chance.uniform(0, FAULTS_S / 2))
        patience_s = chance.uniform(0, 20) if chance.random() < 0.2 else REST_S
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
                request_id=request_id, kind=AUDIO, ticket_id=self._ticket_id
            )
            try:
                return await self._read_grant(request)
            except CallError as error:
                require(error.code == "UNAVAILABLE", f"a call ended with {error}")
            except TimeoutError:
                await self._release(lease_pb2.ReleaseLeaseRequest(request_id=request_id))
                raise
            await asyncio.sleep(self._fabric.chance.uniform(0, 0.5))

    async def _read_grant(self, request: lease_pb2.AcquireLeaseRequest) -> lease_pb2.Granted:
        position: int | None = None
        async with self._fabric.call("AcquireLease", request) as call:
            while True:
                response = await call.read()
                if response.HasField("granted"):
                    self._ticket_id = response.granted.ticket_id or self._ticket_id
                    return response.granted
                self._fabric.laws.position_shown(position, response.queued.position)
                position, self._ticket_id = response.queued.position, response.queued.ticket_id

    async def _use(self, granted: lease_pb2.Granted) -> bool:
        """Claim a lease and hold its slot, or die before the claim. False if the claim fails."""
        chance = self._fabric.chance
        if chance.random() < 0.1:
            return True  # the edge has died: nobody claims this lease or gives it back
        await delay(chance)
        worker = self._fabric.workers[granted.worker_id]
        try:
            if chance.random() < 0.15:
                raise FabricError(Reason.UNAVAILABLE, "the edge cannot reach the worker")
            await worker.serve(granted.lease, chance.expovariate(0.25), chance.uniform(0, 0.5))
        except FabricError:
            await self._release(lease_pb2.ReleaseLeaseRequest(lease_id=granted.lease_id))
            return False
        return True

    async def _release(self, request: lease_pb2.ReleaseLeaseRequest) -> None:
        await delay(self._fabric.chance)
        with contextlib.suppress(FabricError):
            await self._fabric.scheduler.leases.ReleaseLease(request, None)
