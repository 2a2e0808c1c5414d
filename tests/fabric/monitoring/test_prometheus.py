"""The metrics of `duplane up` in Prometheus, and their use in the alerts and the dashboard.

The tests with a real Prometheus are skipped if Prometheus is neither installed nor available from
Debian.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson
import pytest
import yaml
from support.edge.live_edge import APPEND, UPDATE, receive, send
from support.monitoring.metrics import Scrape, scrape
from support.monitoring.prometheus import DEPLOY, RULES, Prometheus, prometheus_program
from support.paths import ROOT
from websockets.asyncio.client import connect

from duplane.fabric.monitoring.metrics import OTHER
from pages.metrics import metrics_page, registries

DASHBOARD = DEPLOY / "dashboard.json"
WITHIN_S = 60.0
ROLES = ("edge", "scheduler", "worker")


# --- the metrics in rules and dashboard ---


def rule_expressions() -> Iterator[tuple[str, str]]:
    """Yield the name of each rule with its expression."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule.get("alert") or rule["record"], rule["expr"]


def panel_expressions() -> Iterator[tuple[str, str]]:
    """Yield each expression of the dashboard with the title of its panel."""
    for panel in orjson.loads(DASHBOARD.read_bytes())["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def metric_names(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:duplane|process)[_:][a-z0-9_:]+", expression))


def recorded_names() -> set[str]:
    return {name for name, _ in rule_expressions() if ":" in name}


# --- a running fabric ---


@dataclass
class Monitored:
    """A running `duplane up` with metrics."""

    edge: str
    urls: dict[str, str]  # key: the role of the process

    async def scrapes(self) -> dict[str, Scrape]:
        return {role: await scrape(url) for role, url in self.urls.items()}

    async def converse(self, unit_count: int) -> None:
        """Run one session to its end."""
        async with connect(f"ws://{self.edge}/v1/realtime?mode=audio", proxy=None) as client:
            while (await receive(client))["type"] != "session.queue_done":
                pass
            await send(client, UPDATE)
            assert (await receive(client))["type"] == "session.created"
            for _ in range(unit_count):
                await send(client, APPEND)
                await receive(client)
            await send(client, {"type": "session.close", "reason": "user_stop"})
            await client.wait_closed()


def first_free_port(count: int) -> int:
    """Return the first of `count` consecutive free ports."""
    for first in range(20_000, 30_000, count):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no free ports")


@pytest.fixture(scope="module")
async def fabric() -> AsyncGenerator[Monitored]:
    flags = ("--port", "0", "--slots", "2", "--checkpoint", "scripted")
    up = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "duplane.tools", "up", *flags),
        *("--metrics-port", str(first_free_port(3))),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert up.stdout
        async with asyncio.timeout(WITHIN_S):
            ready = (await up.stdout.readline()).decode()
            metrics = ready
            while metrics and not metrics.startswith("metrics of "):
                metrics = (await up.stdout.readline()).decode()
        edge = re.search(r"ws://(\S+?)/", ready)
        urls = re.findall(r"http://\S+", metrics)
        assert edge, ready
        yield Monitored(edge[1], dict(zip(ROLES, urls, strict=True)))
        up.send_signal(signal.SIGINT)
        assert await up.wait() == 0
    finally:
        if up.returncode is None:
            up.kill()
            await up.wait()


async def test_every_process_serves_its_own_metrics(fabric: Monitored) -> None:
    await fabric.converse(unit_count=3)
    seen = await fabric.scrapes()
    for role in ROLES:
        (build,) = (labels for name, labels in seen[role] if name == "duplane_build_info")
        assert dict(build)["role"] == role
        assert seen[role].value("process_cpu_seconds_total") > 0
    for role in ("edge", "worker"):
        counted = seen[role].total("duplane_units_total", role=role)
        assert counted >= 3
        assert seen[role].total("duplane_unit_duration_seconds_count", role=role) == counted
    assert seen["scheduler"].total("duplane_slots", role="scheduler") == 2
    assert seen["scheduler"].value("duplane_lease_events_total", event="claimed") >= 1


async def test_dashboard_and_rules_use_metrics_that_exist(fabric: Monitored) -> None:
    seen = await fabric.scrapes()
    existing = set().union(*(each.names for each in seen.values())) | recorded_names()
    used = {
        name
        for _, expression in (*rule_expressions(), *panel_expressions())
        for name in metric_names(expression)
    }
    assert len(used) > 30
    assert used - existing == set()


def test_dashboard_shows_every_metric() -> None:
    shown = {name for _, expression in panel_expressions() for name in metric_names(expression)}
    for name, expression in rule_expressions():
        if name in shown:
            shown |= metric_names(expression)
    made = {
        f"{metric.name}_total" if metric.type == "counter" else metric.name
        for registry in registries().values()
        for metric in registry.collect()
        if metric.name.startswith("duplane_")
    }
    shown = {re.sub("_(bucket|sum|count)$", "", name) for name in shown}
    assert made - shown == set()


async def test_label_values_are_those_that_are_declared(fabric: Monitored) -> None:
    await fabric.converse(unit_count=1)
    for role, seen in (await fabric.scrapes()).items():
        declared: dict[str, set[str]] = {}
        for metric in registries()[role].collect():
            for sample in metric.samples:
                for label, value in sample.labels.items():
                    declared.setdefault(label, {OTHER, ""}).add(value)
        undeclared = {
            (name, label, value)
            for name, labels in seen
            for label, value in labels
            if name.startswith("duplane_") and label != "le" and value not in declared[label]
        }
        assert not undeclared


async def test_sessions_add_no_series(fabric: Monitored) -> None:
    await fabric.converse(unit_count=1)
    before = {role: len(seen) for role, seen in (await fabric.scrapes()).items()}
    for _ in range(5):
        await fabric.converse(unit_count=2)
    assert {role: len(seen) for role, seen in (await fabric.scrapes()).items()} == before


def test_page_of_the_metrics_is_fresh() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == metrics_page(), "run: make metrics"


# --- a real Prometheus ---


async def run_promtool(*arguments: str, text: str = "") -> str:
    """Run promtool, which must succeed; return its output."""
    running = await asyncio.create_subprocess_exec(
        *(prometheus_program("promtool"), *arguments),
        cwd=DEPLOY,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await running.communicate(text.encode())
    assert running.returncode == 0, output.decode()
    return output.decode()


async def test_rules_and_configuration_are_valid_and_alerts_fire_when_they_should() -> None:
    await run_promtool("check", "config", "prometheus.yml")
    await run_promtool("check", "rules", "--lint-fatal", "rules.yml")
    await run_promtool("test", "rules", "rules_test.yml")


def test_every_alert_says_what_it_means_and_what_to_do() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    assert len(alerts) > 10
    for alert in alerts:
        said = {"summary", "description", "action", "runbook_url"}
        assert set(alert["annotations"]) == said, alert["alert"]
        assert all(alert["annotations"].values()), alert["alert"]


async def test_metrics_follow_the_conventions_of_prometheus(fabric: Monitored) -> None:
    async with aiohttp.ClientSession() as client:
        for url in fabric.urls.values():
            async with client.get(url) as response:
                complaints = await run_promtool("check", "metrics", text=await response.text())
            assert not [line for line in complaints.splitlines() if "duplane" in line]


async def until_shown(prometheus: Prometheus, title: str) -> None:
    """Wait until an expression of a panel has a result. A rate needs two scrapes."""
    expressions = [text for panel, text in panel_expressions() if panel == title]
    expression = " or ".join(f"({text})" for text in expressions)
    expression = expression.replace("$__rate_interval", "1m")
    until = time.monotonic() + WITHIN_S
    while not await prometheus.values(expression):
        assert time.monotonic() < until, f"panel {title!r} shows nothing for {expression}"
        await asyncio.sleep(0.1)


async def test_prometheus_evaluates_every_rule_and_every_panel(
    fabric: Monitored, tmp_path: Path
) -> None:
    targets = [re.sub("http://|/metrics", "", url) for url in fabric.urls.values()]
    async with Prometheus.running(targets, tmp_path) as prometheus:
        await prometheus.until('sum(up{job="duplane"})', [3], WITHIN_S)
        await prometheus.until("sum(duplane:free_slots)", [2], WITHIN_S)
        before = (await prometheus.values('sum(duplane_units_total{role="edge"})'))[0]
        await fabric.converse(unit_count=4)
        counted = 'sum(duplane_units_total{role="edge"})'
        await prometheus.until(counted, [before + 4], WITHIN_S)

        groups = (await prometheus.get("rules"))["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert {rule["name"] for rule in rules} == {name for name, _ in rule_expressions()}
        assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
        assert not [rule for rule in rules if rule.get("lastError")]
        assert not [rule["name"] for rule in rules if rule.get("state") == "firing"]

        for title in dict.fromkeys(title for title, _ in panel_expressions()):
            await until_shown(prometheus, title)
