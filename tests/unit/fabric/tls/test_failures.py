"""Failures of TLS are recognised by the texts of gRPC, and logged once."""

from __future__ import annotations

import pytest

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.tls.failures import TlsFailures, tls_failure

REFUSED_HERE = (
    "UNAVAILABLE: failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:8010: Tls"
    " handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: CERTIFICATE_VERIFY_FAILED"
)
OTHER_NAME = (
    "UNAVAILABLE: last error: UNKNOWN: ipv4:10.0.0.1:8010: Custom verification check failed with"
    " error: UNAUTHENTICATED: Hostname Verification Check failed."
)
CLOSED = "UNAVAILABLE: Socket closed"
NOT_THERE = "UNAVAILABLE: failed to connect to all addresses; last error: Connection refused"


def test_only_refused_certificates_are_failures_of_tls() -> None:
    for is_new in (False, True):
        assert tls_failure(REFUSED_HERE, is_new=is_new)
        assert tls_failure(OTHER_NAME, is_new=is_new)
        assert not tls_failure(NOT_THERE, is_new=is_new)
    assert tls_failure(CLOSED, is_new=True)
    assert not tls_failure(CLOSED, is_new=False), "a worker that ends has not refused anybody"


def test_process_without_tls_is_told_of_the_flag_that_it_may_lack() -> None:
    assert "--fabric-tls" in tls_failure(CLOSED, is_new=True, has_tls=False)
    assert not tls_failure(CLOSED, is_new=False, has_tls=False)
    assert not tls_failure(NOT_THERE, is_new=True, has_tls=False)


def test_each_peer_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    failures = TlsFailures()
    closed = FabricError(Reason.UNAVAILABLE, CLOSED, is_foreign=True)
    for peer in ("worker a:1", "worker a:1", "worker b:1"):
        failures.note(peer, closed, is_new=True)
    own = FabricError(Reason.UNAVAILABLE, CLOSED)
    failures.note("worker c:1", own, is_new=True)
    assert [one.getMessage().partition(":")[0] for one in caplog.records] == [
        "TLS to worker a",
        "TLS to worker b",
    ]
