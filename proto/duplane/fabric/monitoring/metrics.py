"""Prometheus instruments whose label values are declared in advance, and a process's registry.

There is a series for each combination of label values from the start. So `rate()` counts the first
event of a series too, and the number of series does not grow with the number of sessions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from duplane.fabric.releases import own_release

OTHER = "other"  # the label value under which all undeclared values are counted
UNIT_DEADLINE_S = 1.0  # of units of one second; slower answers fall behind real time
UNIT_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    *(UNIT_DEADLINE_S, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0),
)

Instrument = TypeVar("Instrument", Counter, Histogram)


class Family(Generic[Instrument]):
    """One instrument for each combination of label values, all made by the constructor.

    `labels` maps each label to its values, in the order of the arguments of `of`.
    """

    def __init__(self, instrument: Instrument, labels: Mapping[str, Collection[str]]) -> None:
        self._instrument = instrument
        self._values = tuple(labels.values())
        self._children: dict[tuple[str, ...], Instrument] = {
            values: instrument.labels(*values) if values else instrument
            for values in itertools.product(*self._values)
        }

    def of(self, *values: str) -> Instrument:
        """Return the instrument with these label values. Undeclared values count as `other`."""
        child = self._children.get(values)
        return child if child is not None else self._of_other(values)

    def _of_other(self, values: tuple[str, ...]) -> Instrument:
        known = (
            value if value in declared else OTHER
            for value, declared in zip(values, self._values, strict=True)
        )
        return self._instrument.labels(*known)


def counters(
    registry: CollectorRegistry, name: str, text: str, **labels: Collection[str]
) -> Family[Counter]:
    """Return a counter for each combination of label values; `name` ends with `_total`."""
    return Family(Counter(name, text, tuple(labels), registry=registry), labels)


def late_units(registry: CollectorRegistry, role: str) -> Counter:
    """Return the counter of units that took longer in this process than their sound lasts."""
    return counters(
        registry,
        "duplane_unit_deadlines_missed_total",
        "Units that took longer than their sound lasts.",
        role=(role,),
    ).of(role)


def histograms(
    registry: CollectorRegistry,
    name: str,
    text: str,
    buckets: Collection[float] = UNIT_BUCKETS_S,
    **labels: Collection[str],
) -> Family[Histogram]:
    """Return a histogram for each combination of label values; `buckets` are its upper bounds."""
    histogram = Histogram(name, text, tuple(labels), registry=registry, buckets=tuple(buckets))
    return Family(histogram, labels)


class Observed(Collector):
    """Gauges that are computed whenever Prometheus reads the metrics.

    `read` computes them on the event loop. The state that `read` uses changes only on the same
    loop, so this state does not change meanwhile.
    """

    def __init__(self, registry: CollectorRegistry, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Return the gauges with their present values."""
        return self._read()


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    """Return one gauge."""
    return GaugeMetricFamily(name, text, value=value)


def gauges(
    name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
) -> GaugeMetricFamily:
    """Return one gauge for each combination of label values."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def new_registry(role: str) -> CollectorRegistry:
    """Return a registry with the version, CPU time, memory and open files of this process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    build = Gauge("duplane_build_info", "Version.", ("role", "version"), registry=registry)
    build.labels(role, own_release()).set(1)
    return registry
