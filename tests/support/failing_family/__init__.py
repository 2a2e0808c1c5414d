"""A family whose model cannot be loaded: `--pool` says in which way."""

from __future__ import annotations

import logging
import os
import threading

from support.echo_family import EchoDevice

from duplane.worker.models.interface import Device, LoadError, Model, Preparer
from duplane.worker.settings import WorkerSettings

_log = logging.getLogger("duplane.tests")


def open_device(settings: WorkerSettings) -> Device:
    """Return the device; the entry point of the family."""
    return _FailingDevice(settings)


class _FailingDevice(EchoDevice):
    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(settings.given_slot_count, settings.context_token_limit)
        self._fault = settings.pool

    def load(self) -> tuple[Preparer, Model]:
        _log.debug("a detail of %s", self._fault)
        _log.warning("tries %s", self._fault)
        match self._fault:
            case "refused":
                raise LoadError("the checkpoint is refused")
            case "broken":
                raise RuntimeError("a fault of the program")
            case "gone":
                os._exit(3)
            case _:
                threading.Event().wait()
        raise AssertionError(self._fault)
