"""Reads metrics as Prometheus does."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import aiohttp
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

Series = tuple[str, frozenset[tuple[str, str]]]


class Scrape(Mapping[Series, float]):
    """The values of one scrape. `scrape.value("x_total", kind="a")` finds one of them."""

    def __init__(self, text: str) -> None:
        self.families = list(text_string_to_metric_families(text))
        self._values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families
            for sample in family.samples
        }

    def __getitem__(self, series: Series) -> float:
        return self._values[series]

    def __iter__(self):
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def value(self, name: str, **labels: str) -> float:
        return self._values[name, frozenset(labels.items())]

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of all series that have at least these labels."""
        wanted = labels.items()
        return sum(
            value for (found, own), value in self._values.items() if found == name and wanted <= own
        )

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self._values}


def read(registry: CollectorRegistry) -> Scrape:
    """Read a registry of this process."""
    return Scrape(generate_latest(registry).decode())


async def scrape(url: str) -> Scrape:
    """Read the metrics of a process over HTTP."""
    async with aiohttp.ClientSession() as client, client.get(url) as response:
        assert response.status == 200
        assert response.content_type == "text/plain"
        return Scrape(await response.text())


def logged_url(records: list[logging.LogRecord]) -> str:
    """Return the newest URL of metrics in the log of this test."""
    messages = [record.getMessage() for record in records]
    return next(text for text in reversed(messages) if "metrics at" in text).split()[-1]
