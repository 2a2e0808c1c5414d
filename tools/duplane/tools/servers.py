"""The verbs that run one process of the fabric: edge, scheduler, worker."""

from __future__ import annotations

from duplane.edge.settings import EdgeSettings
from duplane.fabric import process
from duplane.fabric.monitoring.logs import configure_logging
from duplane.scheduler.settings import SchedulerSettings
from duplane.tools.command import app
from duplane.worker.settings import WorkerSettings


@app.command
def edge(settings: EdgeSettings = EdgeSettings()) -> int:
    """Run one edge: it serves clients over WebSocket and HTTP.

    edge/PROTOCOLS.md describes the protocols that an edge speaks.
    """
    from duplane.edge.server import serve

    configure_logging("edge", settings.log_level, settings.log_format)
    return process.run(lambda shutdown: serve(settings, shutdown))


@app.command
def scheduler(settings: SchedulerSettings = SchedulerSettings()) -> int:
    """Run one scheduler: it assigns sessions to the slots of workers."""
    from duplane.scheduler.service import serve

    configure_logging("scheduler", settings.log_level, settings.log_format)
    return process.run(lambda shutdown: serve(settings, shutdown))


@app.command
def worker(settings: WorkerSettings) -> int:
    """Run one worker: one model on one device, with many conversations."""
    from duplane.worker.sandbox import forbid_inspection
    from duplane.worker.service import serve

    configure_logging("worker", settings.log_level, settings.log_format)
    forbid_inspection()
    return process.run(lambda shutdown: serve(settings, shutdown))
