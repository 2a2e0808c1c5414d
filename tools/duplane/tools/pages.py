"""The verbs that print generated documentation as Markdown."""

from __future__ import annotations

import sys

from duplane.tools.command import app


@app.command
def protocols() -> None:
    """Print the client protocols as Markdown: events, phases, answers, error codes."""
    from duplane.tools.protocol_page import protocol_page

    sys.stdout.write(protocol_page())


@app.command
def settings() -> None:
    """Print the settings of all processes as Markdown."""
    from duplane.tools.settings_page import settings_page

    sys.stdout.write(settings_page())


@app.command
def metrics() -> None:
    """Print the metrics of all processes as Markdown."""
    from duplane.tools.metrics_page import metrics_page

    sys.stdout.write(metrics_page())
