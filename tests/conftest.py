"""Settings and fixtures of all tests."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator

import hypothesis
import pytest
import uvloop
from support.monitoring.log_state import restored_logging

import duplane.tools.library_environment  # noqa: F401  (before gRPC, as in the product)

pytest_plugins = ["support.reruns", "support.slow_files"]

# No deadline for an example of hypothesis, because the machine may be loaded. `pytest-timeout`
# bounds the whole test. With `CI` set, the examples depend on the tests alone: a change is judged
# by the same examples each time. Without it, each run searches with new ones.
hypothesis.settings.register_profile(
    "duplane",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("duplane")


def pytest_configure() -> None:
    """Let SIGINT interrupt the tests and their child processes.

    A shell may start the tests in the background with SIGINT ignored; child processes inherit this.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run async tests on the event loop of the product: its timers may fire early."""
    return {"uvloop": uvloop.new_event_loop}


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
def one_thread_of_torch() -> None:
    """Compute on one thread: a worker that a test runs in this process may have chosen more.

    Several processes run tests. With two threads each, they need four times the CPU time, because
    threads of torch wait for each other without sleeping.
    """
    torch = sys.modules.get("torch")  # most tests do not need it, and its import takes a second
    if torch and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Undo a test's changes to the loggers: later tests in the process depend on their levels."""
    with restored_logging():
        yield
