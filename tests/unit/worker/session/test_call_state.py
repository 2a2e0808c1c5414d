"""The state machine of a call: the allowed messages and the timeouts of each state."""

from __future__ import annotations

import pytest

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import session_pb2
from duplane.worker.session.call_state import CallState, CallStateMachine
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
REBUILD = Request(rebuild=session_pb2.Rebuild(is_last=True))
ALL = (CLAIM, OPEN, REBUILD, UNIT, PAUSE, RESUME, CLOSE, Request())

WAYS = {
    CallState.UNCLAIMED: (),
    CallState.CLAIMED: (CLAIM,),
    CallState.OPENED: (CLAIM, OPEN),
    CallState.REBUILDING: (CLAIM, OPEN, REBUILD),
    CallState.RUNNING: (CLAIM, OPEN, UNIT),
    CallState.PAUSED: (CLAIM, OPEN, PAUSE),
}
LEGAL = {
    CallState.UNCLAIMED: {CLAIM.SerializeToString()},
    CallState.CLAIMED: {r.SerializeToString() for r in (OPEN, CLOSE)},
    CallState.OPENED: {r.SerializeToString() for r in (REBUILD, UNIT, PAUSE, RESUME, CLOSE)},
    CallState.REBUILDING: {r.SerializeToString() for r in (REBUILD, CLOSE)},
    CallState.RUNNING: {r.SerializeToString() for r in (UNIT, PAUSE, RESUME, CLOSE)},
    CallState.PAUSED: {r.SerializeToString() for r in (UNIT, PAUSE, RESUME, CLOSE)},
}


def machine_in(state: CallState) -> CallStateMachine:
    machine = CallStateMachine(LIMITS, 0.0)
    for request in WAYS[state]:
        machine.receive(request, 0.0)
    assert machine.state is state
    return machine


@pytest.mark.parametrize("state", CallState)
@pytest.mark.parametrize("request_", ALL, ids=lambda r: r.WhichOneof("message") or "nothing")
def test_a_message_out_of_place_changes_nothing(state: CallState, request_: Request) -> None:
    machine = machine_in(state)
    deadline_s = machine.deadline_s
    if request_.SerializeToString() in LEGAL[state] and request_.WhichOneof("message"):
        machine.receive(request_, 1.0)
        return
    with pytest.raises(FabricError) as caught:
        machine.receive(request_, 1.0)
    assert caught.value.reason is Reason.OUT_OF_ORDER
    assert (machine.state, machine.deadline_s) == (state, deadline_s)


def test_each_state_has_its_own_timeout() -> None:
    assert machine_in(CallState.UNCLAIMED).deadline_s == 1
    assert machine_in(CallState.CLAIMED).deadline_s == 2
    assert machine_in(CallState.OPENED).deadline_s == 3
    assert machine_in(CallState.REBUILDING).deadline_s == 3
    assert machine_in(CallState.RUNNING).deadline_s == 3
    assert machine_in(CallState.PAUSED).deadline_s == 4


def test_every_message_of_a_running_session_starts_the_clock_again() -> None:
    machine = machine_in(CallState.RUNNING)
    machine.receive(UNIT, 10.0)
    assert machine.deadline_s == 13


def test_units_may_come_after_the_last_past_units() -> None:
    machine = machine_in(CallState.REBUILDING)
    machine.rebuilt(10.0, is_last=False)
    assert (machine.state, machine.deadline_s) == (CallState.REBUILDING, 13)
    machine.rebuilt(20.0, is_last=True)
    assert (machine.state, machine.deadline_s) == (CallState.RUNNING, 23)


def test_units_do_not_prolong_a_pause() -> None:
    machine = machine_in(CallState.PAUSED)
    machine.receive(UNIT, 3.0)
    assert machine.deadline_s == 4


@pytest.mark.parametrize(("asked_s", "given_s"), [(7, 7), (1000, 50), (-5, 0)])
def test_a_pause_lasts_as_long_as_asked_within_bounds(asked_s: int, given_s: int) -> None:
    machine = machine_in(CallState.RUNNING)
    pause = session_pb2.Pause()
    pause.timeout.FromSeconds(asked_s)
    machine.receive(Request(pause=pause), 100.0)
    assert machine.deadline_s == 100 + given_s


@pytest.mark.parametrize("state", [CallState.UNCLAIMED, CallState.CLAIMED])
def test_silence_before_open_is_a_failure(state: CallState) -> None:
    with pytest.raises(FabricError) as caught:
        machine_in(state).expire()
    assert caught.value.reason is Reason.OPEN_TIMEOUT


def test_silence_after_open_is_an_end() -> None:
    idle = machine_in(CallState.RUNNING).expire()
    assert idle.reason == session_pb2.CLOSE_REASON_IDLE_TIMEOUT
    paused = machine_in(CallState.PAUSED).expire()
    assert paused.reason == session_pb2.CLOSE_REASON_PAUSE_TIMEOUT
