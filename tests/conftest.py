"""Marks tests by their path: tests that `make unit` leaves out, and tests that may run twice.

The tests in `RERUN` use sockets, processes or the clock of the machine, with time limits. A loaded
machine can miss such a limit. So these tests run a second time if they fail. The summary of the run
then contains `1 rerun`: find the cause.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable, Iterable, Iterator

import hypothesis
import pytest
import uvloop
from support.monitoring.log_state import restored_logging
from support.paths import TESTS

# No deadline for an example of hypothesis, because the machine may be loaded. `pytest-timeout`
# bounds the whole test.
hypothesis.settings.register_profile(
    "duplane", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("duplane")

SLOW = (
    "contract/test_stubs.py",
    "unit/edge/dialects/test_fuzz.py",
    "unit/scheduler/test_history.py",
    "unit/test_declared_packages.py",
    "unit/tools/bench/test_model.py",
    "unit/tools/checkpoint/test_default.py",
    "unit/tools/checkpoint/test_random.py",
    "unit/tools/checkpoint/test_tools.py",
    "unit/tools/test_gpu_scripts.py",
    "unit/tools/test_up.py",
    "unit/worker/models/minicpm_o/test_checkpoint.py",
    "unit/worker/models/minicpm_o/tts/test_talker.py",
    "unit/worker/models/minicpm_o/vision/test_preprocessing.py",
    "unit/worker/models/minicpm_o/vocoder/test_vocoder.py",
    "unit/worker/models/minicpm_o/vocoder/test_voice.py",
)

RERUN = (
    "cluster",
    "fabric",
    "golden/edge/test_transcripts.py",
    "unit/edge/recording",
    "unit/fabric/monitoring/test_logs.py",
    "unit/fabric/test_process_exit.py",
    "unit/support",
    "unit/tools/bench/test_leases.py",
    "unit/tools/load",
    "unit/tools/test_gpu_scripts.py",
    "unit/tools/test_install.py",
    "unit/tools/test_up.py",
    "unit/worker/engine/test_scripted_model.py",
)


def pytest_configure() -> None:
    """Let SIGINT interrupt the tests and their child processes.

    A shell may start the tests in the background with SIGINT ignored; child processes inherit this.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run async tests on the event loop of the product: its timers may fire early."""
    return {"uvloop": uvloop.new_event_loop}


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    slow = {TESTS / name for name in SLOW}
    for item in items:
        if any(item.path.is_relative_to(TESTS / folder) for folder in RERUN):
            item.add_marker(pytest.mark.flaky(reruns=1))
        if item.path in slow:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Exclude all modules from garbage collections.

    Each service that a test runs begins with a full collection. With the modules of torch, this
    would take a quarter of a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def collections_of_objects_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let garbage collections examine the objects of all tests.

    A service that a test runs in this process would exclude the objects that exist when the
    service is ready.
    """
    monkeypatch.setattr(gc, "freeze", lambda: None)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Undo a test's changes to the loggers: later tests in the process depend on their levels."""
    with restored_logging():
        yield
