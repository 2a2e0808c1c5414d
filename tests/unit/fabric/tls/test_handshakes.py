"""A server logs once that connections bring no call."""

from __future__ import annotations

import pytest

from duplane.fabric.tls.handshakes import Handshakes


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_clients_that_call_are_not_reported(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    handshakes = Handshakes(clock)
    for number in range(3):
        handshakes.begin()
        handshakes.note_call(f"ipv4:10.0.0.1:{number}")
        handshakes.note_call(f"ipv4:10.0.0.1:{number}")
    clock.now += 60
    handshakes.check()
    assert not caplog.records


def test_refused_clients_are_reported_once_an_hour(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    handshakes = Handshakes(clock)
    handshakes.begin()
    handshakes.begin()
    handshakes.note_call("ipv4:10.0.0.1:1")
    handshakes.check()
    assert not caplog.records, "the other client may still call"
    for _ in range(5):
        clock.now += 60
        handshakes.check()
        handshakes.begin()
    assert [record.getMessage()[:31] for record in caplog.records] == [
        "connections without a call: 1. "
    ]
    clock.now += 3600
    handshakes.check()
    assert "call: 5. Their TLS handshake" in caplog.records[-1].getMessage()
