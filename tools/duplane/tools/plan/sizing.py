"""Sizes a fabric. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from duplane.tools.plan import figures
from duplane.tools.plan.device_file import DeviceFigures

SPARE = "one more, so that the loss of any one is covered"


@dataclass(frozen=True)
class Load:
    """What the fabric must serve: sessions at the same time, and how they are."""

    sessions: int
    speaking: float  # share of the sessions that hear speech at a time
    minutes: float  # mean duration of a session

    @property
    def begun_per_s(self) -> float:
        """Sessions that begin in a second."""
        return self.sessions / (self.minutes * 60)


@dataclass(frozen=True)
class Size:
    """One line of a plan."""

    what: str
    value: float
    unit: str
    source: str


def fabric_sizes(load: Load) -> Iterator[Size]:
    """Yield the sizes of everything but the devices.

    Raises ValueError if the load exceeds what was measured.
    """
    yield from _edges(load)
    yield from _schedulers(load)
    yield from _etcd(load)


def _edges(load: Load) -> Iterator[Size]:
    per_core = figures.SESSIONS_PER_EDGE_CORE
    needed = math.ceil(load.sessions / per_core.value)
    busy = math.ceil(load.sessions / needed)
    yield Size("edges, one core each", needed + 1, "", f"{per_core.source}; {SPARE}")
    yield Size("sessions of an edge", busy, "", "modelled: sessions / (edges - 1)")
    last_mb = min(figures.JOURNAL_MB_PER_MINUTE.value * load.minutes, figures.MAX_JOURNAL_MB)
    journal_mb = last_mb / 2
    memory_mb = figures.EDGE_MB.value + busy * (
        figures.EDGE_SESSION_MB_WITHOUT_JOURNAL + journal_mb
    )
    source = "modelled from measured figures: sessions are half as old as they become"
    yield Size("memory of an edge", math.ceil(memory_mb), "MB", source)
    journals = math.ceil(busy * last_mb)
    source = f"modelled: all sessions at their end; {figures.JOURNAL_MB_PER_MINUTE.source}"
    yield Size("--journal-total-bytes of an edge", journals, "MB", source)
    for what, kilobytes, share in (
        ("network from clients, all edges", figures.UP_KB_PER_UNIT, 1.0),
        ("network to clients, all edges", figures.DOWN_KB_PER_UNIT, load.speaking),
    ):
        megabits = load.sessions * kilobytes.value * share * 8 / 1000
        yield Size(what, math.ceil(megabits), "Mbit/s", kilobytes.source)


def _schedulers(load: Load) -> Iterator[Size]:
    limit = figures.GRANTS_PER_S
    if load.begun_per_s > limit.value:
        raise ValueError(
            f"sessions: {load.begun_per_s:.0f} sessions would begin in a second;"
            f" {limit.value:g} grants per second is the most that was measured"
        )
    yield Size("schedulers", figures.SCHEDULERS, "", f"design: {SPARE}, also while one restarts")
    cores = load.sessions * figures.SCHEDULER_US_PER_UNIT.value / 1e6
    source = figures.SCHEDULER_US_PER_UNIT.source
    yield Size("cores of all schedulers", math.ceil(cores), "", source)
    memory = figures.SCHEDULER_MB
    yield Size("memory of a scheduler", memory.value, "MB", memory.source)
    share = 100 * load.begun_per_s / limit.value
    yield Size("grants, of the measured rate", math.ceil(share), "%", limit.source)


def _etcd(load: Load) -> Iterator[Size]:
    yield Size("members of etcd", figures.ETCD_MEMBERS, "", "design: a majority without one member")
    revisions = load.begun_per_s * figures.ETCD_COMPACTED_MINUTES * 60
    kept = revisions * figures.ETCD_REVISIONS_PER_SESSION
    megabytes = kept * figures.ETCD_KB_PER_REVISION / 1000
    source = (
        f"modelled: {figures.ETCD_REVISIONS_PER_SESSION} revisions of"
        f" {figures.ETCD_KB_PER_REVISION:g} KB for each session, kept"
        f" {figures.ETCD_COMPACTED_MINUTES:g} minutes (assumed)"
    )
    yield Size("database of a member", max(1, math.ceil(megabytes)), "MB", source)


def device_sizes(load: Load, device: DeviceFigures) -> Iterator[Size]:
    """Yield the sizes of the devices. Raises ValueError if the file has no figure for the load."""
    slots = device.slots(load.speaking)
    needed = math.ceil(load.sessions / slots)
    yield Size("slots of a worker (--slots)", slots, "", f"measured: {device.source}")
    spare = "one more, whose slots the sessions of a lost worker get"
    source = f"modelled: sessions / slots; {spare}"
    yield Size(f"GPUs ({device.name}), a worker each", needed + 1, "", source)
    yield Size("slots", (needed + 1) * slots, "", "modelled: GPUs * slots of a worker")
