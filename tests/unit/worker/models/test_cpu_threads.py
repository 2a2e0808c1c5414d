"""The number of CPU threads: it depends on the cores, the CPU quota and the size of the model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from duplane.worker.models.cpu_threads import choose_threads, usable_cores


@pytest.mark.parametrize(
    ("parameter_count", "cores", "threads"),
    [
        (3_000_000, 16, 1),
        (500_000_000, 1, 1),
        (500_000_000, 2, 2),
        (500_000_000, 8, 7),
        (500_000_000, 96, 16),
    ],
)
def test_threads_follow_the_model_and_the_cores(
    parameter_count: int, cores: int, threads: int
) -> None:
    assert choose_threads(parameter_count, cores) == threads


@pytest.fixture
def eight_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory like /sys that describes four cores with two hardware threads each."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for number in range(8):
        topology = tmp_path / f"cpu{number}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    return tmp_path


def test_hardware_threads_of_one_core_count_once(eight_cpus: Path) -> None:
    assert usable_cores(eight_cpus, eight_cpus / "none") == 4


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 4), ("200000 100000", 2), ("50000 100000", 1), ("900000 100000", 4)],
)
def test_a_cpu_quota_lowers_the_cores(eight_cpus: Path, quota: str, cores: int) -> None:
    (eight_cpus / "cpu.max").write_text(f"{quota}\n")
    assert usable_cores(eight_cpus, eight_cpus / "cpu.max") == cores


def test_a_system_that_tells_no_affinity_has_all_its_hardware_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    assert usable_cores() == 10
