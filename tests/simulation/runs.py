"""Simulates the fabric of one seed."""

from __future__ import annotations

from collections.abc import Sequence

from simulation.etcd import simulated_etcd
from simulation.fabric import SimulatedFabric
from simulation.virtual_time import LifelikeLoop, run


def simulate(seed: int) -> Sequence[str]:
    """Simulate a fabric; return the kinds of all changes. Raises BrokenLawError."""

    async def simulated() -> Sequence[str]:
        fabric = SimulatedFabric(seed)
        await fabric.run()
        return fabric.laws.history

    with simulated_etcd():
        return run(simulated(), LifelikeLoop)


def failure_of(seed: int) -> str:
    """Simulate a fabric; return the law that it broke, or an empty text."""
    try:
        simulate(seed)
    except Exception as error:  # noqa: BLE001 - every exception is a fault
        return f"seed {seed}: {type(error).__name__}: {error}"
    return ""
