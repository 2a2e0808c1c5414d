"""Finds out whether processes that a test has ended are gone."""

from __future__ import annotations

from collections.abc import Iterable

import psutil


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that still run.

    A process that has ended stays visible until its parent, or init, has read its exit status.
    """
    return [process for process in processes if _is_alive(process)]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
