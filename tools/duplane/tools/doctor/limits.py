"""Checks the limits of the host and the time to stop, and settings that contradict each other."""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Iterator

from duplane.edge.settings import EdgeSettings
from duplane.fabric.addresses import parse_address
from duplane.scheduler.settings import SchedulerSettings
from duplane.tools.doctor.findings import HOST, Finding, error, ok, warning
from duplane.worker.settings import WorkerSettings

Settings = EdgeSettings | SchedulerSettings | WorkerSettings
FILES, CLOCK, STOP, CONTRADICTION = "open files", "clock", "time to stop", "contradiction"
_FEWEST_FILES = 4096  # of a scheduler or worker: connections of edges and workers, and its own
_EDGE_FILES = 512  # of an edge, beside the connections of clients
_MARGIN_S = 3.0  # to load off what is not bounded by a setting, such as the last log lines
_CLEANUP_S = 14.0  # of a worker after its drain: last messages, and the end of its device thread
_TIMEX_BYTES = 512  # more than the kernel's structure has on any architecture
_NOT_SYNCHRONISED = 5  # TIME_ERROR of adjtimex


def open_files(settings: Settings, hard_limit: int | None = None) -> Finding:
    """Compare the limit of open files with the connections that the process may have."""
    if hard_limit is None:
        hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    flag, needed = HOST, _FEWEST_FILES
    if isinstance(settings, EdgeSettings):
        flag = "--connection-count"
        needed = settings.limits.connection_count + _EDGE_FILES
    if hard_limit == resource.RLIM_INFINITY or hard_limit >= needed:
        return ok(FILES, flag, f"{needed} may be needed")
    return warning(
        FILES,
        flag,
        f"{needed} may be needed, the system allows {hard_limit}; raise the limit (`ulimit -Hn`,"
        " LimitNOFILE= of systemd)",
    )


def clock(state: int | None = None) -> Finding:
    """Tell whether the kernel says that the clock of this host is synchronised."""
    found = _clock_state() if state is None else state
    if found == _NOT_SYNCHRONISED:
        return warning(
            CLOCK,
            HOST,
            "the clock of this host is not synchronised; certificates, tokens and the minutes of"
            " tenants need the right time: run chrony or systemd-timesyncd",
        )
    known = "is synchronised" if found >= 0 else "cannot be checked on this system"
    return ok(CLOCK, HOST, f"the clock of this host {known}")


def _clock_state() -> int:
    """Return the answer of adjtimex, which changes nothing here; -1 where it is missing."""
    if not sys.platform.startswith("linux"):
        return -1
    return int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)))


def time_to_stop(settings: Settings, grace_s: float | None) -> Finding:
    """Compare the time after which the process is killed with the time that it may need to stop."""
    if isinstance(settings, EdgeSettings):
        flag = "--drain-s"
        needed_s = settings.limits.drain_s + 2 * settings.limits.close_s + _MARGIN_S
    elif isinstance(settings, WorkerSettings):
        flag = "--drain-timeout-s"
        needed_s = settings.drain_timeout_s + _CLEANUP_S + _MARGIN_S
    else:
        flag = "--stop-timeout-s"
        needed_s = settings.stop_timeout_s + _MARGIN_S
    if grace_s is None:
        return ok(STOP, flag, f"the process may need {needed_s:.0f} s; compare with --grace-s")
    if grace_s < needed_s:
        return error(
            STOP,
            flag,
            f"the process may need {needed_s:.0f} s and is killed after {grace_s:.0f} s: sessions"
            " are cut off; give it more time, or lower the flag",
        )
    return ok(STOP, flag, f"the process may need {needed_s:.0f} s of {grace_s:.0f} s")


def contradictions(settings: Settings) -> Iterator[Finding]:
    """Yield settings that work against each other, though each alone may be used."""
    yield from _ports(settings)
    if isinstance(settings, EdgeSettings):
        yield from _of_edge(settings)
    elif isinstance(settings, WorkerSettings):
        yield from _of_worker(settings)


def _ports(settings: Settings) -> Iterator[Finding]:
    named = {"--listen": settings.listen}
    named |= {
        "--metrics-listen": settings.metrics_listen,
        "--health-listen": settings.health_listen,
    }
    if isinstance(settings, EdgeSettings):
        named["--operator-listen"] = settings.operator_listen
    seen: dict[int, str] = {}
    for flag, listen in named.items():
        port = parse_address(listen, min_port=0).port if listen else 0
        if port and port in seen:
            message = f"it has the port {port}, as {seen[port]}; only one can listen there"
            yield error(CONTRADICTION, flag, message)
        seen.setdefault(port, flag)


def _of_edge(settings: EdgeSettings) -> Iterator[Finding]:
    limits = settings.limits
    if limits.session_count > limits.connection_count:
        yield warning(
            CONTRADICTION,
            "--session-count",
            f"{limits.session_count} sessions are never reached: --connection-count is"
            f" {limits.connection_count}, and each session has a connection",
        )
    if limits.client_session_count > limits.client_connection_count:
        yield warning(
            CONTRADICTION,
            "--client-session-count",
            f"{limits.client_session_count} sessions are never reached:"
            f" --client-connection-count is {limits.client_connection_count}",
        )
    if settings.continuity == "worker" and limits.overdue_s >= limits.failover_s:
        yield error(
            CONTRADICTION,
            "--failover-s",
            f"a session fails after {limits.failover_s:g} s, before --overdue-s"
            f" ({limits.overdue_s:g} s) prepares another worker",
        )
    if limits.journal_bytes > limits.journal_total_bytes:
        yield warning(
            CONTRADICTION,
            "--journal-bytes",
            "one journal may be larger than all together (--journal-total-bytes)",
        )
    if settings.behind_tls_proxy and not settings.trusted_proxies:
        yield warning(
            CONTRADICTION,
            "--trusted-proxies",
            "with --behind-tls-proxy all clients of an unnamed proxy count as one address",
        )


def _of_worker(settings: WorkerSettings) -> Iterator[Finding]:
    if settings.stuck_after_s >= settings.hung_after_s:
        yield error(
            CONTRADICTION,
            "--stuck-after-s",
            f"the worker ends itself after --hung-after-s ({settings.hung_after_s:g} s), before it"
            f" is NOT_SERVING ({settings.stuck_after_s:g} s)",
        )
    reached = parse_address(settings.advertise or settings.listen, min_port=0)
    remote = [one for one in settings.schedulers if not parse_address(one).is_loopback]
    if remote and reached.is_loopback:
        yield error(
            CONTRADICTION,
            "--advertise",
            f"edges on other hosts cannot reach {reached.host}, but the scheduler is {remote[0]}",
        )
