"""What a launch costs on the host, alone and beside a second Python thread that is busy."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor

from device_hour.costs import write_costs
from device_hour.driver import Driver
from device_hour.session import Session
from duplane.tools.bench.peaks import synchronize
from duplane.worker.models.minicpm_o.blocks.block import Block
from duplane.worker.models.minicpm_o.transfer import Download

NUMBERS = 512
"""Whole numbers that a launch uploads."""
OPERATIONS = 1000
LAUNCHES = 200


def host(session: Session) -> dict[str, Any]:
    """Return the host's microseconds for an operation and its milliseconds for a launch and a unit.

    A launch is one upload, one replay of a graph without work, and one download. The units are
    those of half of the slots; beside a busy thread they show how long the front of a worker may
    hold the interpreter.
    """
    found: dict[str, Any] = {"operation_us": 1e6 * _operation_s(session.device)}
    launch = _launch(session.device)
    driver, repeats = session.loaded().driver, session.sizes.repeats
    slots = range(max(1, driver.model.constants.slot_count // 2))
    for name, place in (("", _quiet), ("busy_", _busy)):
        with place():
            found[f"{name}launch_ms"] = 1e3 * _median_s(launch, LAUNCHES)
            found |= {
                f"{name}{kind}_ms": 1e3 * s for kind, s in _units(driver, slots, repeats).items()
            }
        session.keep(found)
    write_costs(session)
    return found | {"conversations": len(slots)}


def _operation_s(device: torch.device) -> float:
    """Return the seconds to launch one operation without waiting for it."""
    values = torch.zeros(1, device=device)
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(OPERATIONS):
        values.add_(1.0)
    spent = time.perf_counter() - begin
    synchronize(device)
    return spent / OPERATIONS


@torch.inference_mode()
def _launch(device: torch.device) -> Callable[[], object]:
    """Return a launch of a block that does almost nothing; a GPU replays a graph of it."""

    def compute(form: int, numbers: Tensor) -> Tensor:
        del form
        return numbers.float().add(1.0)

    block = Block[int](compute, device)
    numbers = np.arange(NUMBERS, dtype=np.int64)
    if device.type == "cuda":
        block.capture("the empty block", [(0, [numbers])], lambda: None)

    @torch.inference_mode()
    def launch() -> object:
        return Download(block.stage(0, numbers).run()).result()

    return launch


def _median_s(call: Callable[[], object], repeats: int) -> float:
    spent: list[float] = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        spent.append(time.perf_counter() - begin)
    return statistics.median(spent)


def _units(driver: Driver, slots: Sequence[int], repeats: int) -> dict[str, float]:
    """Return the median seconds of units that listen and of units that speak."""
    for slot in slots:
        driver.open(slot)
    driver.speak(slots, 2 * repeats)
    speak_s = _median_s(lambda: driver.speak(slots), repeats)
    listen_s = _median_s(lambda: driver.listen(slots), repeats)
    driver.close()
    return {"speaking": speak_s, "listening": listen_s}


@contextmanager
def _quiet() -> Generator[None]:
    yield


@contextmanager
def _busy() -> Generator[None]:
    """Let a second thread write and read JSON in the body of the `with`."""
    is_over = threading.Event()

    def work() -> None:
        rows = [{"number": number} for number in range(100)]
        while not is_over.is_set():
            orjson.loads(orjson.dumps(rows))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
