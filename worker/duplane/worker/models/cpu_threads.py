"""Chooses the number of CPU threads of the model."""

from __future__ import annotations

import os
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
# In a model with fewer parameters than this, a matrix product takes less time than handing a part
# of it to another thread.
_LEAST_PARAMETERS = 20_000_000
_MOST_THREADS = 16  # more threads would only share the same memory bandwidth


def usable_cores(cpus: Path = _CPUS, quota: Path = _QUOTA) -> int:
    """Return the number of physical cores that this process may use.

    CPU affinity and CPU quota limit this number. The hardware threads of one core count once,
    because they share its arithmetic units. Only Linux tells all this; elsewhere the result is the
    number of hardware threads.
    """
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    siblings = {
        _read(cpus / f"cpu{number}/topology/thread_siblings_list") or str(number)
        for number in os.sched_getaffinity(0)
    }
    allowed, _, period = _read(quota).partition(" ")
    if allowed.isdecimal() and period.isdecimal():
        return max(1, min(len(siblings), int(allowed) // int(period)))
    return len(siblings)


def choose_threads(parameter_count: int, cores: int) -> int:
    """Return the number of threads for a model. With three or more cores, one core stays free."""
    if parameter_count < _LEAST_PARAMETERS or cores < 2:
        return 1
    return min(cores if cores == 2 else cores - 1, _MOST_THREADS)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
