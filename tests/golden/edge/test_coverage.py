"""The transcripts show everything that is in the specifications, and nothing else."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from fuzz.event_rules import check_event
from support.edge.edge_tables import is_legal, may_answer, may_say, reachable
from support.protocols.specifications import (
    NAMES,
    corpus,
    find,
    is_refused,
    order,
    parts,
    without_effect,
)
from support.protocols.transcript_replay import IDENTITY, Move, PureReplay
from support.protocols.transcripts import json_of

from duplane.edge.clock import Moment
from duplane.edge.dialects.a import DialectA
from duplane.edge.dialects.b import DialectB
from duplane.edge.dialects.b_chat import DialectBChat
from duplane.edge.dialects.c import DialectC
from duplane.edge.dialects.d import DialectD
from duplane.edge.dialects.dialect import LIFECYCLE, Dialect, Lifecycle, Phase
from duplane.edge.dialects.e import DialectE
from duplane.edge.dialects.e_chat import DialectEChat
from duplane.edge.dialects.h import DialectH
from duplane.edge.dialects.l import DialectL
from duplane.edge.routing import ENDPOINTS, parse_target
from duplane.edge.session.chat_session import ChatSession
from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.settings import Limits
from duplane.fabric.v1 import session_pb2
from pages.events import read

DIALECTS = [DialectA, DialectB, DialectBChat, DialectC, DialectD, DialectE, DialectH, DialectL]
OTHER = "anything else"
OPENED = session_pb2.ConverseResponse(opened=session_pb2.Opened())
PIECE = session_pb2.ChatResponse(delta=session_pb2.ChatDelta(text="x", audio=bytes(4)))
DONE = session_pb2.ChatResponse(done=session_pb2.Done())


@pytest.fixture(scope="module")
def replays() -> list[PureReplay]:
    return [replay for name in NAMES for replay in corpus(name).replays]


@pytest.mark.parametrize("name", NAMES)
def test_everything_that_a_specification_names_is_in_a_transcript(name: str) -> None:
    nowhere = {what for what, where in find(name).items() if where is None}
    assert not nowhere, sorted(nowhere)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_depends_on_fields_that_are_listed_as_without_effect(name: str) -> None:
    for path, why in without_effect(name).items():
        assert why
        having = [line for line in corpus(name).taken if path in dict(parts(line.event))]
        assert having, path
        assert not [line.where for line in having if line.depends_on(path)], path


@pytest.mark.parametrize("name", NAMES)
def test_events_have_the_fields_that_are_named_and_no_others(name: str) -> None:
    for replay in corpus(name).replays:
        for move in replay.moves:
            for event in move.told if move.dialect.name == name else ():
                check_event("B chat" if move.dialect is DialectBChat else name, event)


@pytest.mark.parametrize("name", NAMES)
def test_events_come_in_the_order_of_the_specification(name: str) -> None:
    for replay in corpus(name).replays:
        told, is_legal = order(name, replay)
        assert is_legal, (replay.transcript.name, told)


def specified(dialect: type[Dialect]) -> dict[str, dict[str, str]]:
    """Return the specified outcome of each event in each phase."""
    return read(dialect.name)["chat_transitions" if dialect is DialectBChat else "transitions"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_legal_transitions_are_those_of_the_specification(dialect: type[Dialect]) -> None:
    phases = {phase.name for phase in Phase}
    legal = {
        (Phase[phase], kind): Phase[outcome]
        for phase, outcomes in specified(dialect).items()
        for kind, outcome in outcomes.items()
        if outcome in phases
    }
    assert legal == dialect.transitions


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_event_comes_in_every_phase_and_does_what_is_specified(
    dialect: type[Dialect], replays: list[PureReplay]
) -> None:
    """The edge answers an illegal event with one error and does not change its phase."""
    wanted = {(phase, kind) for phase, row in specified(dialect).items() for kind in row}
    kinds = {kind for _, kind in wanted}
    for phase, refused in read(dialect.name).get("never_accepted", {}).items():
        wanted -= {(phase, kind) for kind in refused}
    wanted |= {("CLOSED", kind) for kind in kinds}
    seen: set[tuple[str, str]] = set()
    for replay in replays:
        for move in replay.moves:
            if move.kind is None or spoken(move) is not dialect:
                continue
            kind = move.kind if move.kind in kinds else OTHER
            if did_as_specified(move, kind):
                seen.add((move.before.name, kind))
            elif not is_legal(dialect, move.before, kind):
                pytest.fail(f"{replay.transcript.name}.txt:{move.step.line}: {move}")
    unseen = {f"{kind} in {phase}" for phase, kind in wanted - seen}
    assert not unseen, sorted(unseen)


def spoken(move: Move) -> type[Dialect]:
    """Return the dialect of a move. E has one table for both of its classes."""
    return DialectE if move.dialect is DialectEChat else move.dialect


def did_as_specified(move: Move, kind: str) -> bool:
    """Return whether a client's event led to the specified phase or to the specified error."""
    if move.before is Phase.CLOSED:
        return move.after is Phase.CLOSED and not move.told
    outcome = specified(spoken(move))[move.before.name][kind]
    if outcome in {phase.name for phase in Phase}:
        led_to = Phase[outcome]
        opened = LIFECYCLE.get((led_to, Lifecycle.OPENED))  # LIFECYCLE may change it further
        return move.after in (led_to, opened) and not is_refused(move)
    if len(move.told) != 1 or move.after is not move.before:
        return False
    error = move.told[0].get("error")
    return outcome == (error if isinstance(error, str) else error["code"])


def test_no_phase_is_left_but_as_the_tables_have_it(replays: list[PureReplay]) -> None:
    for replay in replays:
        for move in replay.moves:
            allowed = reachable(move.dialect, move.before, move.kind)
            assert move.after in allowed, (replay.transcript.name, move)


def test_everything_is_told_in_its_phase_and_in_answer_to_its_event(
    replays: list[PureReplay],
) -> None:
    told: set[tuple[str, str]] = set()
    for replay in replays:
        for move in replay.moves:
            for event in move.told:
                kind, where = event["type"], (replay.transcript.name, move.step.line)
                assert may_say(move.dialect, move.before, move.kind, kind), (where, kind)
                told.add((spoken(move).__name__, kind))
                if move.kind is not None:
                    assert may_answer(move.dialect, move.kind, kind), (where, kind)
    assert told >= {(d.__name__, kind) for d in DIALECTS for kind in d.server_events}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_legal_event_has_its_answers_declared(dialect: type[Dialect]) -> None:
    assert set(dialect.replies) == {kind for _, kind in dialect.transitions}
    answers = {answer for answers in dialect.replies.values() for answer in answers}
    assert answers <= set(dialect.server_events)


@pytest.mark.parametrize("name", NAMES)
def test_every_default_is_what_an_absent_field_means(name: str) -> None:
    for default in read(name)["defaults"]:
        bare = outcome_of(default, {})
        for path, value in default["fields"].items():
            assert outcome_of(default, {path: value}) == bare, (default["event"], path, value)


def outcome_of(default: dict[str, Any], given: dict[str, Any]) -> list[Any]:
    """Return all results of an event in which the given fields are also set."""
    entry, now = parse_target(default["path"], {}), Moment(36_077.123, 0)
    session = ENDPOINTS[entry.route, entry.mode].new_session(IDENTITY, Limits(), now)
    session.granted(60.0, now)
    for message in default.get("before", ()):
        session.receive(message.encode(), now)
    if isinstance(session, DuplexSession):
        session.take(now)
        if default.get("before"):
            session.responded(OPENED, now)
    event = json_of(default["event"])
    for path, value in given.items():
        put(event, path.split("."), value)
    told = [orjson.loads(one) for one in session.receive(orjson.dumps(event), now)]
    assert not any(one["type"] == "error" for one in told), told
    if isinstance(session, ChatSession):
        request = session.next_turn(now)
        return [request, *(len(session.responded(answer, now)) for answer in (PIECE, DONE))]
    outgoing = session.take(now)
    asked = outgoing and outgoing.request
    if asked and asked.HasField("unit") and not asked.unit.HasField("max_slice_count"):
        asked.unit.max_slice_count = 1  # the contract's default
    return [told, asked]


def put(event: Any, path: list[str], value: Any) -> None:
    *place, last = path
    for name in place:
        event = event[int(name)] if isinstance(event, list) else event.setdefault(name, {})
    event[last] = value
