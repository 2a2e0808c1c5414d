"""Measures the CPU time and the memory of processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from duplane.tools.bench.load.row import ProcessSample
from duplane.tools.command import UsageError

SAMPLE_S = 1.0
ProcessIds = Callable[[], Sequence[int]]
"""Returns the ids of processes at present: a process that is started again has another id."""


@dataclass
class Watched:
    """One or more processes with one name, and their samples."""

    name: str
    process_ids: ProcessIds
    samples: list[ProcessSample] = field(default_factory=list[ProcessSample])
    has_ended: bool = False  # whether one of the processes has ended
    _cpu_s: dict[int, float] = field(default_factory=dict[int, float])  # of each process so far

    def look(self) -> None:
        """Add a sample, unless a process has ended."""
        rss_bytes = 0
        try:
            for process in map(psutil.Process, self.process_ids()):
                self._cpu_s[process.pid] = _cpu_s(process)
                rss_bytes += process.memory_info().rss
        except psutil.NoSuchProcess:
            self.has_ended = True
            return
        self.samples.append(ProcessSample(time.monotonic(), rss_bytes, sum(self._cpu_s.values())))


def _cpu_s(process: psutil.Process) -> float:
    """Return the CPU time that a process has used.

    Linux has a CPU clock for each process; the id of this clock is computed as
    clock_getcpuclockid(3) does. psutil would give times in steps of 10 ms, which are too coarse for
    a few units.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return time.clock_gettime(~process.pid << 3 | 2)
    times = process.cpu_times()
    return times.user + times.system


class Watch:
    """Takes samples of processes once a second."""

    def __init__(self, process_ids: Mapping[str, ProcessIds]) -> None:
        self.watched = [Watched(name, pids) for name, pids in process_ids.items()]
        for watched in self.watched:
            for pid in watched.process_ids():
                if not psutil.pid_exists(pid):
                    raise UsageError(f"process: there is no process {pid}")

    def look(self) -> None:
        """Take a sample of all processes now."""
        for watched in self.watched:
            watched.look()

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.look()


def free_cores(reserved: int) -> Iterable[int]:
    """Return the cores of this process except `reserved`. Raises UsageError if no core is left."""
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError("edge_cpu: this system cannot assign a process to a core")
    cores = os.sched_getaffinity(0)
    if reserved not in cores:
        raise UsageError(f"edge_cpu is {reserved}, must be one of {sorted(cores)}")
    if len(cores) < 2:
        raise UsageError("edge_cpu: there is no other core for the other processes")
    return cores - {reserved}


def assign(process_id: int, cores: Iterable[int]) -> None:
    """Restrict a process and all its threads to some cores."""
    wanted = set(cores)
    for thread in psutil.Process(process_id).threads():
        os.sched_setaffinity(thread.id, wanted)
