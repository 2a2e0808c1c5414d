"""The processes of a training end with the process that started them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

END_S = 60
SCRIPT = """
import signal
from multiprocessing import get_context

from training.listener.processes import end_with_parent


def train():
    end_with_parent()
    print("trains", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    process = get_context("spawn").Process(target=train)
    process.start()
    process.join()
"""


def test_process_ends_with_its_killed_parent(tmp_path: Path) -> None:
    """The pipe ends only when the last process that can write to it has ended."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "trains\n"
        parent.kill()
        rest, _ = parent.communicate(timeout=END_S)
    assert not rest
