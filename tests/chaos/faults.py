"""Random faults of a fabric: processes are killed, frozen, and restarted in order."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from chaos.fabric import ChaosFabric
from support.fabric.servers import Server

Step = tuple[str, str]  # what is done, and the role of the process
ROLLING: Sequence[Step] = (("restart", "worker"), ("restart", "scheduler"))
"""Every worker drains, ends and is started again, one after the other; then every scheduler."""
KINDS: Sequence[Sequence[Step]] = (
    (("kill", "worker"),),
    (("freeze", "scheduler"), ("kill", "worker")),
    (("freeze", "worker"),),
    (("kill", "etcd"), ("kill", "worker")),
    ROLLING,
    (("freeze", "etcd"), ("kill", "worker")),
    (("kill", "scheduler"), ("kill", "worker")),
    (("freeze", "scheduler"),),
    (("kill", "scheduler"),),
    (("freeze", "etcd"),),
    (("kill", "etcd"),),
    (("freeze", "scheduler"), ("freeze", "worker")),
)
_RESTART_S = 1.0  # from a kill to the next start of the process
_FREEZE_S = 2.0, 6.0  # shortest and longest freeze
_END_S = 60.0  # for a process to end after SIGTERM


@dataclass(frozen=True)
class Fault:
    """A fault that has happened."""

    name: str  # the steps, without the numbers of processes
    at_s: float  # monotonic time
    session_count: int  # sessions at the workers that it has killed or frozen


def kinds(chooser: random.Random) -> Iterator[Sequence[Step]]:
    """Yield kinds of faults without end: each kind once, in a random order, and so on."""
    while True:
        yield from chooser.sample(KINDS, len(KINDS))


class Faults:
    """Does faults to a fabric, each `every_s` after the one before. `say` tells of each fault."""

    def __init__(
        self, fabric: ChaosFabric, chooser: random.Random, say: Callable[[str], None]
    ) -> None:
        self.done: list[Fault] = []
        self._fabric = fabric
        self._chooser = chooser
        self._say = say

    async def run(self, seconds: float, every_s: float) -> None:
        """Do faults for `seconds`. Each waits until all workers serve again after the last one."""
        begin_s = time.monotonic()
        for number, steps in enumerate(kinds(self._chooser), 1):
            rest_s = begin_s + number * every_s - time.monotonic()
            if time.monotonic() + rest_s > begin_s + seconds:
                return
            await asyncio.sleep(max(0.0, rest_s))
            await self._do(steps, begin_s)
            await self._fabric.until_whole()

    async def _do(self, steps: Sequence[Step], begin_s: float) -> None:
        if steps is ROLLING:
            self._note("rolling restart", begin_s)
            for _, role in steps:
                for name in self._names(role):
                    await self._restart(name)
            return
        chosen = [(verb, self._chooser.choice(self._names(role))) for verb, role in steps]
        freeze_s = self._chooser.uniform(*_FREEZE_S)
        held = await self._fabric.session_counts()
        count = sum(held.get(name, 0) for _, name in chosen)
        processes = ", ".join(name for _, name in chosen)
        details = f" ({processes}; {count} sessions; freezes {freeze_s:.1f} s)"
        self._note(", ".join(f"{verb} {role}" for verb, role in steps), begin_s, details, count)
        await asyncio.gather(*(self._hit(verb, name, freeze_s) for verb, name in chosen))

    def _names(self, role: str) -> Sequence[str]:
        return [name for name in self._fabric.processes if name.startswith(role)]

    def _note(self, name: str, begin_s: float, details: str = "", session_count: int = 0) -> None:
        now_s = time.monotonic()
        self.done.append(Fault(name, now_s, session_count))
        self._say(f"{now_s - begin_s:6.1f} s  {name}{details}")

    async def _hit(self, verb: str, name: str, freeze_s: float) -> None:
        """Kill a process and start it again, or freeze it for a while."""
        process = self._fabric.processes[name]
        if verb == "freeze":
            process.freeze()
            await asyncio.sleep(freeze_s)
            process.thaw()
        else:
            process.kill()
            await asyncio.sleep(_RESTART_S)
            process.start()

    async def _restart(self, name: str) -> None:
        """End a process, which may drain first, and start it again."""
        server = self._fabric.processes[name]
        assert isinstance(server, Server)
        server.send(signal.SIGTERM)
        await asyncio.to_thread(server.wait, _END_S)
        server.start()
        await self._fabric.until_whole()
