"""What happens to resumable calls: sockets are dropped, edges are killed or restarted."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from duplane.tools.bench.options import FabricBench
from duplane.tools.bench.returns.balancer import Balancer
from duplane.tools.up.supervisor import Role

_LOOK_S = 0.05


@dataclass
class Disturbances:
    """What was done, and how long edges took to become empty."""

    counts: Counter[str] = field(default_factory=Counter[str])
    drains_s: list[float] = field(default_factory=list[float])


class Disturber:
    """Disturbs the connections and the edges of a fabric, as the flags say."""

    def __init__(self, options: FabricBench, balancer: Balancer, edges: Sequence[Role]) -> None:
        self.done = Disturbances()
        self._options = options
        self._balancer = balancer
        self._edges = edges

    async def run(self, calls: int, end_s: float) -> None:
        """Disturb until the monotonic time `end_s`."""
        options = self._options
        async with asyncio.TaskGroup() as tasks:
            if options.drop_sockets_every_s:
                tasks.create_task(self._drop(options.drop_sockets_every_s / calls, end_s))
            if options.kill_edge_every_s:
                tasks.create_task(self._kill(options.kill_edge_every_s, end_s))
            if options.restart_edges_every_s:
                tasks.create_task(self._restart(options.restart_edges_every_s, end_s))

    async def _drop(self, every_s: float, end_s: float) -> None:
        """Drop the oldest connection again and again: one with RST, the next without a word."""
        for number in itertools.count():
            if not await _until(every_s, end_s):
                return
            if connection := self._balancer.oldest():
                if number % 2:
                    connection.fall_silent()
                else:
                    connection.reset()
                self.done.counts["silent" if number % 2 else "reset"] += 1

    async def _kill(self, every_s: float, end_s: float) -> None:
        for edge in itertools.cycle(self._edges):
            if not await _until(every_s, end_s):
                return
            await self._all_ready()
            edge.send_signal(signal.SIGKILL)
            self.done.counts["killed"] += 1

    async def _restart(self, every_s: float, end_s: float) -> None:
        """Let each edge drain and end; meanwhile the balancer sends it no connections."""
        for edge in itertools.cycle(self._edges):
            if not await _until(every_s, end_s):
                return
            await self._all_ready()
            self._balancer.left.add(edge.address)
            began_s, process_id = time.monotonic(), edge.process_id
            edge.send_signal(signal.SIGTERM)
            await _ended(edge, process_id)
            self.done.drains_s.append(time.monotonic() - began_s)
            self.done.counts["restarted"] += 1
            await edge.ready()
            self._balancer.left.discard(edge.address)

    async def _all_ready(self) -> None:
        for edge in self._edges:
            await edge.ready()


async def _until(every_s: float, end_s: float) -> bool:
    """Wait for `every_s`. Return False if that is not before the monotonic time `end_s`."""
    if time.monotonic() + every_s > end_s:
        return False
    await asyncio.sleep(every_s)
    return True


async def _ended(edge: Role, process_id: int) -> None:
    """Wait until another process has taken the place of this one."""
    for _ in itertools.count():
        if edge.process_id != process_id:
            return
        await asyncio.sleep(_LOOK_S)
