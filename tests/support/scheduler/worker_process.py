"""A worker process for tests of store and policy together, without sockets."""

from __future__ import annotations

from dataclasses import dataclass

from support.scheduler.scheduler_harness import FREE, register_message

from duplane.fabric.v1 import registry_pb2

SLOTS = 2


@dataclass
class WorkerProcess:
    """A worker process. Its state survives restarts of the scheduler."""

    name: str
    pool: str
    incarnation: int = 0
    slots: list[registry_pb2.SlotReport] | None = None

    def message(self) -> registry_pb2.Register:
        self.slots = self.slots or [
            registry_pb2.SlotReport(slot=slot, state=FREE) for slot in range(SLOTS)
        ]
        incarnation = f"{self.name}/{self.incarnation}"
        return register_message(
            self.name, incarnation=incarnation, pool=self.pool, slots=self.slots
        )
