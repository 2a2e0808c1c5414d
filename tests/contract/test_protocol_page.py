"""The page about the protocols agrees with the tables and lists every close reason."""

from __future__ import annotations

import tomllib

import pytest
from fuzz.event_rules import check_event
from support.paths import ROOT
from support.protocols.specifications import NAMES, parts
from support.protocols.transcript_replay import PureReplay
from support.protocols.transcripts import all_transcripts

from duplane.edge.client_errors import ErrorCode
from duplane.edge.close import CloseReason
from duplane.edge.dialects.e import DialectE
from duplane.edge.dialects.e_chat import DialectEChat
from duplane.edge.dialects.openai_errors import ERRORS
from duplane.edge.session.move_table import TRANSITIONS, MoveEvent, MovePhase
from pages.events import FOLDER, events
from pages.moves import EVENTS, PHASES
from pages.protocol_examples import CLIENT, client_event, server_events
from pages.protocols import DIALECTS, ends_of, protocol_page

PAGE = ROOT / "edge/PROTOCOLS.md"


def test_committed_page_is_fresh() -> None:
    assert PAGE.read_text() == protocol_page(), "run `make protocols`"


def test_page_names_every_event_and_code() -> None:
    page = protocol_page()
    for dialect in DIALECTS.values():
        for kind in (*dialect.replies, *dialect.server_events):
            assert f"`{kind}`" in page
    for code in set(ErrorCode) - {ErrorCode.CREDENTIAL_ENDED}:  # only OpenAI's protocols tell it
        assert f"`{code}`" in page
    for _, name in ERRORS.values():
        assert f"`{name}`" in page


def test_page_names_every_phase_and_event_of_a_move() -> None:
    assert set(PHASES) == set(MovePhase)
    assert set(EVENTS) == set(MoveEvent)
    page = protocol_page()
    for (phase, event), after in TRANSITIONS.items():
        begin = f"| {phase.name} | {PHASES[phase]} |"
        (row,) = (line for line in page.splitlines() if line.startswith(begin))
        assert f"{event.name} **{after.name}**" in row


def test_every_end_of_a_transcript_is_one_that_the_page_names() -> None:
    seen: set[tuple[str, CloseReason]] = set()
    for transcript in all_transcripts():
        replay = PureReplay(transcript)
        replay.run()
        assert replay.session.closed
        spoken = type(replay.session.dialect)
        dialect = DialectE if spoken is DialectEChat else spoken  # the page has both as one
        seen.add((dialect.__name__, replay.session.closed.reason))
    named = {(d.__name__, end) for d in DIALECTS.values() for end in ends_of(d)}
    assert seen <= named
    unseen = {end for _, end in named} - {end for _, end in seen}
    # These reasons need a client that does not read (see tests/fabric), or a key that is revoked
    # (see tests/attacks).
    assert unseen == {CloseReason.TOO_SLOW, CloseReason.CREDENTIAL_ENDED}


@pytest.mark.parametrize("name", DIALECTS)
def test_the_specifications_have_every_event_of_the_dialect(name: str) -> None:
    dialect = DIALECTS[name]
    assert events(name, "client").keys() == dialect.replies.keys()
    assert events(name, "server").keys() == dialect.server_events.keys()


@pytest.mark.parametrize("name", DIALECTS)
def test_the_examples_of_the_page_are_events_of_the_dialect(name: str) -> None:
    dialect = DIALECTS[name]
    assert CLIENT[name].keys() == dialect.replies.keys()
    assert server_events(name).keys() == dialect.server_events.keys()
    for event in server_events(name).values():
        check_event(name, event)
    for kind in CLIENT[name]:
        fields = events(name, "client")[kind].fields
        has = {path for path, _ in parts(client_event(name, kind))} - {"type"}
        assert has - {"input.messages[]", "messages[]"} <= fields.keys(), kind


def test_every_description_of_a_field_is_used() -> None:
    used = {
        key
        for name in DIALECTS
        for side in ("client", "server")
        for kind, event in events(name, side).items()
        for path in event.fields
        for key in (f"{kind} {path}", *(path[at:] for at in range(len(path))))
    }
    for name in ("fields", *NAMES):
        table = tomllib.loads((FOLDER / f"{name.lower()}.toml").read_text())
        described = table if name == "fields" else table["fields"]
        assert described.keys() <= used, described.keys() - used
