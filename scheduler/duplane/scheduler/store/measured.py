"""A lease store with metrics of its operations and of the scheduler's contact to it."""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, cast

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from duplane.fabric.monitoring.metrics import Observed, counters, gauge, histograms
from duplane.scheduler.store.base import LeaseStore

_OTHERS = ("run", "leave", "until_whole")
OPERATIONS = tuple(
    sorted(
        name
        for name in LeaseStore.__abstractmethods__
        if name not in _OTHERS and inspect.iscoroutinefunction(getattr(LeaseStore, name))
    )
)
"""The operations of a store, without those that set it up, run it and end it."""

_OUTCOMES = ("done", "void", "failed")  # void: the operation's object had ended or changed
_BUCKETS_S = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_Operation = Callable[..., Awaitable[Any]]


def measured(store: LeaseStore, registry: CollectorRegistry) -> LeaseStore:
    """Return `store` with metrics: count and duration of its operations, and its contact."""
    return cast(LeaseStore, _MeasuredStore(store, registry))


class _MeasuredStore:
    """Has all methods of a store. The methods in `OPERATIONS` are measured."""

    def __init__(self, store: LeaseStore, registry: CollectorRegistry) -> None:
        self._counts = counters(
            registry,
            "duplane_store_operations_total",
            "Operations of the lease store.",
            operation=OPERATIONS,
            outcome=_OUTCOMES,
        )
        self._durations = histograms(
            registry,
            "duplane_store_operation_duration_seconds",
            "Duration of the lease store's operations.",
            _BUCKETS_S,
            operation=OPERATIONS,
        )
        self._contact_losses = counters(
            registry,
            "duplane_store_contact_losses_total",
            "Times at which the scheduler lost the contact to its store.",
        ).of()
        self._has_contact = True
        Observed(registry, self._observe)
        store.watch_contact(self._on_contact)
        self.subscribe = store.subscribe
        self.run = store.run
        self.leave = store.leave
        self._store = store
        self.share_keys = store.share_keys
        self.watch_keys = store.watch_keys
        self.watch_contact = store.watch_contact
        self.until_whole = store.until_whole
        for name in OPERATIONS:
            setattr(self, name, self._measured(name, getattr(store, name)))

    @property
    def has_kept_queue(self) -> bool:
        return self._store.has_kept_queue

    def _on_contact(self, is_lost: bool) -> None:
        self._has_contact = not is_lost
        if is_lost:
            self._contact_losses.inc()

    def _observe(self) -> Iterable[Metric]:
        yield gauge(
            "duplane_store_contact",
            "1 while the scheduler has contact to its store; without contact it refuses all calls.",
            float(self._has_contact),
        )

    def _measured(self, name: str, operation: _Operation) -> _Operation:
        duration = self._durations.of(name)
        done, void, failed = (self._counts.of(name, outcome) for outcome in _OUTCOMES)

        async def measure(*arguments: Any, **named: Any) -> Any:
            began_s = time.perf_counter()
            try:
                result = await operation(*arguments, **named)
            except BaseException:
                failed.inc()
                raise
            duration.observe(time.perf_counter() - began_s)
            (done if result else void).inc()
            return result

        return measure
