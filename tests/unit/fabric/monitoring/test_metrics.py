"""Instruments: label values are a closed set, and every series exists from the start."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from duplane.fabric.monitoring.metrics import Observed, counters, gauge, gauges, histograms


def series(registry: CollectorRegistry) -> dict[str, float]:
    lines = generate_latest(registry).decode().splitlines()
    found = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in found if "_created" not in name}


def test_every_series_exists_before_its_first_event() -> None:
    registry = CollectorRegistry()
    counters(registry, "x_total", "X.", a=("1", "2"), b=("3", "4"))
    assert series(registry) == {
        f'x_total{{a="{a}",b="{b}"}}': 0 for a in ("1", "2") for b in ("3", "4")
    }


def test_label_value_that_is_not_declared_counts_as_other() -> None:
    registry = CollectorRegistry()
    family = counters(registry, "x_total", "X.", a=("1",), b=("2",))
    for number in range(100):
        family.of("1", f"invented {number}").inc()
        family.of(f"invented {number}", "2").inc()
    assert series(registry) == {
        'x_total{a="1",b="2"}': 0,
        'x_total{a="1",b="other"}': 100,
        'x_total{a="other",b="2"}': 100,
    }


def test_number_of_label_values_is_checked() -> None:
    family = histograms(CollectorRegistry(), "x", "X.", (1,), a=("1",))
    with pytest.raises(ValueError, match="zip"):
        family.of("1", "2")


def test_family_without_labels_is_one_series() -> None:
    registry = CollectorRegistry()
    counters(registry, "x_total", "X.").of().inc()
    assert series(registry) == {"x_total": 1}


def test_gauges_are_read_when_they_are_collected() -> None:
    registry = CollectorRegistry()
    level = {("a",): 1.0}
    Observed(registry, lambda: [gauge("x", "X.", 5), gauges("y", "Y.", ("l",), level)])
    level["b",] = 2.0
    assert series(registry) == {"x": 5, 'y{l="a"}': 1, 'y{l="b"}': 2}
