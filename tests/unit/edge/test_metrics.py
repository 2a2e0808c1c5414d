"""The edge's metrics count the units of a session."""

from __future__ import annotations

from typing import Any

import pytest
from support.monitoring.metrics import Scrape, read

from duplane.edge.clock import Moment
from duplane.edge.metrics import OUTCOMES, EdgeMetrics, SessionMetrics
from duplane.edge.session.effects import EndMove
from duplane.edge.session.move_table import MoveCause, MoveOutcome
from duplane.fabric.durations import to_duration
from duplane.fabric.model import ModelFormat
from duplane.fabric.v1 import session_pb2

BEGAN_S = 1_714_200_000.0
SECOND = bytes(4 * 24_000)


class Session:
    """A session that receives one unit per second, or one in each `unit_s`."""

    def __init__(self) -> None:
        self.edge = EdgeMetrics(lambda: (), playback_delay_s=0.25)
        self.units = SessionMetrics(self.edge, "sess_1")
        self.sent_count = 0
        self.unit_s = 1.0
        self.clock_step_s = 0.0  # by how much the wall clock was set since the beginning

    def send(self, count: int = 1) -> None:
        for _ in range(count):
            at_s = self.sent_count * self.unit_s
            self.units.sent.append((self.sent_count, at_s, at_s))
            self.sent_count += 1

    def answer(
        self, sequence: int, after_s: float, audio: bytes | None = None, **fields: Any
    ) -> None:
        delta = session_pb2.Delta(sequence=sequence, **fields)
        if audio is None:
            delta.listen.SetInParent()
        else:
            delta.speech.audio = audio
        at_s = sequence * self.unit_s + after_s
        moment = Moment(at_s, int((BEGAN_S + self.clock_step_s + at_s) * 1e9))
        self.units.answered(delta, moment)

    def read(self) -> Scrape:
        return read(self.edge.registry)

    def outcomes(self) -> dict[str, float]:
        name = "duplane_units_total"
        counts = {
            outcome: self.read().value(name, role="edge", outcome=outcome) for outcome in OUTCOMES
        }
        return {outcome: count for outcome, count in counts.items() if count}


@pytest.fixture
def session() -> Session:
    return Session()


def test_unit_is_timed_from_its_receipt_to_its_answer(session: Session) -> None:
    session.send(2)
    session.answer(0, after_s=0.25)
    session.answer(1, after_s=0.5, audio=SECOND)
    assert session.outcomes() == {"listen": 1, "speech": 1}
    name, seen = "duplane_unit_duration_seconds_sum", session.read()
    assert seen.value(name, role="edge", outcome="listen") == pytest.approx(0.25, abs=1e-6)
    assert seen.value(name, role="edge", outcome="speech") == pytest.approx(0.5, abs=1e-6)
    assert seen.value("duplane_unit_deadlines_missed_total", role="edge") == 0


def test_unit_that_takes_longer_than_its_second_misses_its_deadline(session: Session) -> None:
    session.send(2)
    session.answer(0, after_s=0.99)
    session.answer(1, after_s=1.01)
    assert session.read().value("duplane_unit_deadlines_missed_total", role="edge") == 1


def test_short_unit_is_late_after_its_own_duration(session: Session) -> None:
    session.unit_s = 0.08
    session.units.use_model(ModelFormat(unit_ns=80_000_000))
    session.send(2)
    session.answer(0, after_s=0.07)
    session.answer(1, after_s=0.09)
    assert session.read().value("duplane_unit_deadlines_missed_total", role="edge") == 1


def test_client_plays_speech_at_the_rate_of_its_model(session: Session) -> None:
    session.unit_s = 0.08
    session.units.use_model(ModelFormat(unit_ns=80_000_000, output_rate_hertz=12_000))
    session.send(20)
    for sequence in range(20):  # 0.08 s of speech per 0.08 s, and a client that buffers 0.25 s
        session.answer(sequence, 0.01, bytes(4 * 960))
    assert session.read().value("duplane_playout_underruns_total") == 0
    session.send(1)
    session.answer(20, 0.35, bytes(4 * 960))
    assert session.read().value("duplane_playout_underruns_total") == 1


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_unit_is_timed_although_the_wall_clock_is_set_meanwhile(
    session: Session, step_s: float
) -> None:
    session.send()
    session.clock_step_s = step_s
    session.answer(0, after_s=0.25)
    name, seen = "duplane_unit_duration_seconds_sum", session.read()
    assert seen.value(name, role="edge", outcome="listen") == pytest.approx(0.25)
    assert seen.value("duplane_unit_deadlines_missed_total", role="edge") == 0


def test_units_before_an_answered_one_were_dropped(session: Session) -> None:
    session.send(4)
    session.answer(2, after_s=0.1)
    assert session.outcomes() == {"dropped": 2, "listen": 1}
    session.units.end()
    assert session.outcomes() == {"dropped": 2, "listen": 1, "unanswered": 1}


def test_units_that_were_never_sent_are_dropped_once(session: Session) -> None:
    session.send(2)
    session.units.dropped(3)
    session.answer(0, after_s=0.1)
    session.answer(1, after_s=0.1)
    assert session.outcomes() == {"dropped": 3, "listen": 2}
    session.units.dropped(2)
    session.units.end()
    assert session.outcomes() == {"dropped": 5, "listen": 2}


def test_failed_unit_is_counted_and_not_timed(session: Session) -> None:
    session.send()
    session.units.answered(session_pb2.Failed(sequence=0), Moment(0.0, int(BEGAN_S * 1e9)))
    assert session.outcomes() == {"failed": 1}
    assert session.read().total("duplane_unit_duration_seconds_count") == 0


def test_gap_within_a_turn_longer_than_its_sound_is_an_underrun(session: Session) -> None:
    session.send(6)
    session.answer(0, 0.1, SECOND)
    session.answer(1, 0.1, SECOND)
    session.answer(2, 0.9, SECOND, end_of_turn=True)
    session.answer(3, 0.9)
    session.answer(4, 0.9, SECOND)
    session.answer(5, 0.9)
    seen = session.read()
    assert seen.value("duplane_speech_gap_seconds_count") == 2
    assert seen.value("duplane_speech_gap_seconds_sum") == pytest.approx(2.8)
    assert seen.value("duplane_playout_underruns_total") == 1
    assert seen.value("duplane_playout_stalled_seconds_total") == pytest.approx(0.55)


def test_late_unit_is_kept_with_the_stage_that_took_the_longest(session: Session) -> None:
    session.units.worker_id = "w"
    session.send(2)
    session.answer(0, 0.5)
    times = session_pb2.StageTimes(decode=to_duration(0.9), audio=to_duration(0.2))
    session.answer(1, 1.25, stage_times=times)
    [late] = session.edge.figures.late_units(0, 9)
    assert (late.session_id, late.worker_id, late.sequence) == ("sess_1", "w", 1)
    assert (late.taken_ms, late.stage, late.stage_ms) == (1250.0, "decode", 900.0)


def test_unit_that_waits_for_a_move_is_late_because_of_the_move(session: Session) -> None:
    session.send(2)
    session.answer(0, 0.5)
    end = EndMove(MoveCause.WORKER_LOST, MoveOutcome.MOVED, 1.5, 0.1, "first", "second")
    session.units.moved(end, Moment(3.0, int((BEGAN_S + 3.0) * 1e9)))
    session.answer(1, 2.25)
    [late] = session.edge.figures.late_units(0, 9)
    assert (late.stage, late.stage_ms) == ("move", 1500.0)
    [move] = session.edge.figures.moves(0, 9)
    assert (move.from_worker_id, move.to_worker_id, move.silent_ms) == ("first", "second", 1500.0)


def test_memory_of_a_session_without_answers_is_bounded(session: Session) -> None:
    session.send(5000)
    assert len(session.units.sent) == 1024
