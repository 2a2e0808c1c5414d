"""A run of `duplane bench fabric` gets a verdict whatever happens to the watched processes."""

from __future__ import annotations

import os
import subprocess
import sys

from duplane.tools.bench.load.reports import LoadFigures
from duplane.tools.bench.load.run import _Run
from duplane.tools.bench.load.watch import Watch, Watched
from duplane.tools.bench.options import FabricBench


def test_process_that_ended_before_the_first_look_has_no_cost() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    own = [os.getpid()]
    watch = Watch({"worker": lambda: [process.pid], "edge": lambda: own, "generators": lambda: own})
    process.communicate(b"\n")
    watch.look()
    row = _Run(FabricBench(), "B", 1)._judge(LoadFigures(), watch, 0.0, None)
    assert list(row.processes) == ["edge"]
    assert "worker ended" in row.problems


def test_process_that_is_started_again_is_watched_with_its_former_cpu_time() -> None:
    ids = [os.getpid()]
    watched = Watched("worker", lambda: ids)
    watched.look()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        ids[:] = [process.pid]
        watched.look()
        process.communicate(b"\n")
    watched.look()
    assert watched.has_ended
    before, after = watched.samples
    assert after.cpu_s >= before.cpu_s > 0
    assert after.rss_bytes < before.rss_bytes
