"""The phases of a session: what may come when, and how long silence may last."""

from __future__ import annotations

import pytest

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import session_pb2
from duplane.worker.phases import Phase, Phases
from duplane.worker.settings import SessionLimits

Request = session_pb2.ConverseRequest
LIMITS = SessionLimits(
    claim_timeout_s=1, open_timeout_s=2, idle_timeout_s=3, pause_timeout_s=4, max_pause_s=50
)
CLAIM = Request(claim=session_pb2.Claim())
OPEN = Request(open=session_pb2.Open())
UNIT = Request(unit=session_pb2.Unit())
PAUSE = Request(pause=session_pb2.Pause())
RESUME = Request(resume=session_pb2.Resume())
CLOSE = Request(close=session_pb2.Close())
ALL = (CLAIM, OPEN, UNIT, PAUSE, RESUME, CLOSE, Request())

WAYS = {
    Phase.UNCLAIMED: (),
    Phase.CLAIMED: (CLAIM,),
    Phase.RUNNING: (CLAIM, OPEN),
    Phase.PAUSED: (CLAIM, OPEN, PAUSE),
}
LEGAL = {
    Phase.UNCLAIMED: {CLAIM.SerializeToString()},
    Phase.CLAIMED: {r.SerializeToString() for r in (OPEN, CLOSE)},
    Phase.RUNNING: {r.SerializeToString() for r in (UNIT, PAUSE, RESUME, CLOSE)},
    Phase.PAUSED: {r.SerializeToString() for r in (UNIT, PAUSE, RESUME, CLOSE)},
}


def phases_in(phase: Phase) -> Phases:
    phases = Phases(LIMITS, 0.0)
    for request in WAYS[phase]:
        phases.receive(request, 0.0)
    assert phases.phase is phase
    return phases


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("request_", ALL, ids=lambda r: r.WhichOneof("message") or "nothing")
def test_a_message_out_of_place_changes_nothing(phase: Phase, request_: Request) -> None:
    phases = phases_in(phase)
    deadline_s = phases.deadline_s
    if request_.SerializeToString() in LEGAL[phase] and request_.WhichOneof("message"):
        phases.receive(request_, 1.0)
        return
    with pytest.raises(FabricError) as caught:
        phases.receive(request_, 1.0)
    assert caught.value.reason is Reason.OUT_OF_ORDER
    assert (phases.phase, phases.deadline_s) == (phase, deadline_s)


def test_each_phase_has_its_own_patience() -> None:
    assert phases_in(Phase.UNCLAIMED).deadline_s == 1
    assert phases_in(Phase.CLAIMED).deadline_s == 2
    assert phases_in(Phase.RUNNING).deadline_s == 3
    assert phases_in(Phase.PAUSED).deadline_s == 4


def test_every_message_of_a_running_session_starts_the_clock_again() -> None:
    phases = phases_in(Phase.RUNNING)
    phases.receive(UNIT, 10.0)
    assert phases.deadline_s == 13


def test_units_do_not_prolong_a_pause() -> None:
    phases = phases_in(Phase.PAUSED)
    phases.receive(UNIT, 3.0)
    assert phases.deadline_s == 4


@pytest.mark.parametrize(("asked_s", "given_s"), [(7, 7), (1000, 50), (-5, 0)])
def test_a_pause_lasts_as_long_as_asked_within_bounds(asked_s: int, given_s: int) -> None:
    phases = phases_in(Phase.RUNNING)
    pause = session_pb2.Pause()
    pause.timeout.FromSeconds(asked_s)
    phases.receive(Request(pause=pause), 100.0)
    assert phases.deadline_s == 100 + given_s


@pytest.mark.parametrize("phase", [Phase.UNCLAIMED, Phase.CLAIMED])
def test_silence_before_open_is_a_failure(phase: Phase) -> None:
    with pytest.raises(FabricError) as caught:
        phases_in(phase).expire()
    assert caught.value.reason is Reason.OPEN_TIMEOUT


def test_silence_after_open_is_an_end() -> None:
    idle = phases_in(Phase.RUNNING).expire()
    assert idle.reason == session_pb2.CLOSE_REASON_IDLE_TIMEOUT
    paused = phases_in(Phase.PAUSED).expire()
    assert paused.reason == session_pb2.CLOSE_REASON_PAUSE_TIMEOUT
