"""Mutated messages in any order cause no exception and get only legal answers.

Tens of thousands of messages are sent, the same in every run; `make fuzz` sends others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from fuzz.case_runs import run_cases
from fuzz.cases import DIALECTS, Case, make_case
from fuzz.faults import find_fault, transcript_of, try_case
from fuzz.messages import Message
from fuzz.session_run import SessionRun
from support.protocols.transcript_replay import PureReplay
from support.protocols.transcripts import read_transcript

from duplane.edge.dialects.a import DialectA
from duplane.edge.dialects.dialect import Phase
from duplane.edge.session.session import Session
from duplane.edge.session.unit_assembler import UnitAssembler
from pages.events import events

pytestmark = pytest.mark.slow

NAMES = {"a": "A", "b": "B", "b_chat": "B chat", "c": "C", "d": "D", "e": "E", "h": "H", "l": "L"}
MUTATED_COUNT = 8_000  # messages of each dialect


@pytest.mark.parametrize("dialect", DIALECTS)
def test_mutated_messages_are_answered_legally(dialect: str) -> None:
    tally = run_cases("ci", dialect, mutated_count=MUTATED_COUNT)
    assert not tally.faults, "\n\n".join(map(str, tally.faults))
    assert tally.mutated_count >= MUTATED_COUNT
    missing = events(NAMES[dialect], "server").keys() - tally.answers.keys()
    assert not missing, f"never said, so never checked: {missing}"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_seed_makes_the_same_case_again(dialect: str) -> None:
    assert written(make_case("s/1", dialect)) == written(make_case("s/1", dialect))
    assert written(make_case("s/1", dialect)) != written(make_case("s/2", dialect))


def written(case: Case) -> str:
    return transcript_of(try_case(case)[0])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_case_that_is_written_down_is_a_transcript(dialect: str, tmp_path: Path) -> None:
    for number in range(60):
        case = make_case(f"written/{number}", dialect)
        if case.is_hoarding:  # a transcript cannot say that nobody takes requests
            continue
        file = tmp_path / f"{dialect}_{number}.txt"
        file.write_text(written(case), encoding="utf-8", newline="")
        PureReplay(read_transcript(file)).run()


# --- planted faults are found, and their transcripts are short ---


def found(dialect: str, *, within: int = 3000) -> tuple[str, list[str]]:
    """Return the first fault, and the lines of its transcript that the client sends."""
    for number in range(within):
        if fault := find_fault(make_case(f"planted/{number}", dialect)):
            lines = fault.transcript.splitlines()
            return fault.what, [line for line in lines if line.startswith(("client", "frame"))]
    raise AssertionError("not found")


def test_exception_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    read = DialectA._decode_append

    def careless(self: DialectA, event: Any) -> Any:
        if event.get("audio", object) == 0.5:
            raise ZeroDivisionError
        return read(self, event)

    monkeypatch.setattr(DialectA, "_decode_append", careless)
    what, said = found("a")
    assert what.startswith("ZeroDivisionError")
    assert [orjson.loads(line.partition(" ")[2])["type"] for line in said] == [
        "session.update",
        "input_audio_buffer.append",
    ]


def test_event_with_a_wrong_field_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        DialectA, "_opened_events", lambda *_: [b'{"type":"session.created","session_id":"rt_1"}']
    )
    what, said = found("a")
    assert what == "IllegalError: A: session.created.prompt_length: absent"
    assert len(said) == 1


def test_refusal_that_changes_something_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = Session._refuse

    def forgetful(self: Session[Any], fault: Any, now: Any) -> list[bytes]:
        self.dialect.phase = Phase.START
        return refuse(self, fault, now)

    monkeypatch.setattr(Session, "_refuse", forgetful)
    assert "what is refused had an effect" in found("c")[0]


def test_session_that_is_stuck_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UnitAssembler, "add", lambda *_: ())
    what, said = found("b")
    assert what == "IllegalError: a unit is not answered"
    assert len(said) <= 3


def test_words_after_the_end_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = Session.receive

    def chatty(self: Session[Any], message: bytes, now: Any) -> list[bytes]:
        return [b'{"type":"stopped"}'] if self.closed else receive(self, message, now)

    monkeypatch.setattr(Session, "receive", chatty)
    assert "said after the end" in found("c")[0]


# --- messages that a mutation is unlikely to produce ---

NASTY = [
    b'{"a":' * 100_000,
    b'{"type":"session.update","session":' + b"[" * 1100 + b"]" * 1100 + b"}",
    b'{"type":"session.init","payload":{"seed":' + b"9" * 5000 + b"}}",
    b'{"type":"session.init","type":"session.update"}',
    b'{"type":"session.init","payload":{"defaults":{"defaults":{"defaults":{}}}}}',
    b'{"type":"' + b"\\u0000" * 5000 + b'"}',
    b'{"type":"prepare","session_id":"' + b"/.." * 5000 + b'"}',
    b"\xef\xbb\xbf{}",
]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("message", NASTY, ids=range(len(NASTY)))
def test_one_nasty_message_is_refused_at_once(message: bytes, dialect: str) -> None:
    case = make_case("nasty", dialect)
    run = SessionRun(case)
    run.client(Message(raw=message))
    run.run()
