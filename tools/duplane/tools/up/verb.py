"""`duplane up`: the whole fabric on one machine."""

from __future__ import annotations

from duplane.fabric.monitoring.logs import configure_logging
from duplane.tools.command import app
from duplane.tools.up.fabric import UpSettings, serve_up


@app.command
def up(settings: UpSettings = UpSettings()) -> int:
    """Start scheduler, workers and edge on this machine, as separate supervised processes.

    Prints one ready line with the URLs. The first Ctrl-C lets running sessions end, the second
    stops immediately. A process that dies is started again. All other settings of the processes are
    read from their environment variables and from the config file.
    """
    configure_logging("up", settings.log_level, settings.log_format)
    return serve_up(settings)
