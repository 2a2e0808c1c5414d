"""The transcripts leave out nothing that the specifications name, and say nothing beyond."""

from __future__ import annotations

import pytest
import specifications
from edge_replay import PureReplay
from edge_tables import is_legal, may_answer, may_say, reachable
from edge_transcripts import all_transcripts
from specifications import NAMES, corpus, fields_of, find, order, parts, read

from duplane.edge.dialects.a import DialectA
from duplane.edge.dialects.b import DialectB
from duplane.edge.dialects.b_chat import DialectBChat
from duplane.edge.dialects.c import DialectC
from duplane.edge.dialects.d import DialectD
from duplane.edge.dialects.dialect import Dialect, Phase

DIALECTS = [DialectA, DialectB, DialectBChat, DialectC, DialectD]
OTHER = "anything else"


@pytest.fixture(scope="module")
def replays() -> list[PureReplay]:
    replays = [PureReplay(transcript) for transcript in all_transcripts()]
    for replay in replays:
        replay.run()
    return replays


@pytest.mark.parametrize("name", NAMES)
def test_everything_that_a_specification_names_is_in_a_transcript(name: str) -> None:
    nowhere = {what for what, where in find(name).items() if where is None}
    assert not nowhere, sorted(nowhere)


@pytest.mark.parametrize("name", NAMES)
def test_events_have_the_fields_that_are_named_and_no_others(name: str) -> None:
    specification = read(name)
    for replay in corpus(name).replays:
        for move in replay.moves:
            for event in move.told if move.dialect.name == name else ():
                required, optional = fields_of(specification, "server", event["type"])
                has = {path for path, _ in parts(event)} - {"type"}
                assert required <= has, (replay.transcript.name, event["type"], required - has)
                beyond = has - required - optional
                assert not beyond, (replay.transcript.name, event["type"], beyond)


@pytest.mark.parametrize("name", NAMES)
def test_events_come_in_the_order_of_the_specification(name: str) -> None:
    for replay in corpus(name).replays:
        told, is_legal = order(name, replay)
        assert is_legal, (replay.transcript.name, told)


def kinds_of(dialect: type[Dialect]) -> set[str]:
    others = set[str]() if dialect is DialectD else {OTHER}
    return {kind for _, kind in dialect.transitions} | others


def phases_of(dialect: type[Dialect]) -> set[Phase]:
    return {Phase.START, Phase.CLOSED, *dialect.transitions.values()} | (
        {Phase.ACTIVE} if Phase.OPENING in dialect.transitions.values() else set()
    )


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_event_comes_in_every_phase(
    dialect: type[Dialect], replays: list[PureReplay]
) -> None:
    """Legal or not: what is not is answered by one error, and changes nothing."""
    kinds = kinds_of(dialect)
    seen: set[tuple[Phase, str]] = set()
    for replay in replays:
        for move in replay.moves:
            if move.kind is None or move.dialect is not dialect:
                continue
            kind = move.kind if move.kind in kinds else OTHER
            seen.add((move.before, kind))
            where = f"{replay.transcript.name}, line {move.step.line}"
            if is_legal(dialect, move.before, kind):
                continue
            assert move.before is move.after, where
            errors = [told["type"] for told in move.told]
            assert errors == ([] if move.before is Phase.CLOSED else ["error"]), where
    wanted = {(phase, kind) for phase in phases_of(dialect) for kind in kinds}
    unseen = {f"{kind} in {phase.name}" for phase, kind in wanted - seen}
    assert not unseen, sorted(unseen)


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
                told.add((move.dialect.__name__, kind))
                if move.kind is not None:
                    assert may_answer(move.dialect, move.kind, kind), (where, kind)
    assert told >= {(d.__name__, kind) for d in DIALECTS for kind in d.server_events}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_legal_event_has_its_answers_declared(dialect: type[Dialect]) -> None:
    assert set(dialect.answers) == {kind for _, kind in dialect.transitions}
    answers = {answer for answers in dialect.answers.values() for answer in answers}
    assert answers <= set(dialect.server_events)


@pytest.mark.parametrize("name", NAMES)
def test_every_default_is_what_an_absent_field_means(name: str) -> None:
    for default in read(name)["defaults"]:
        bare = specifications.outcome_of(default, {})
        for path, value in default["fields"].items():
            given = specifications.outcome_of(default, {path: value})
            assert given == bare, (default["event"], path, value)
