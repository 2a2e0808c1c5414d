"""The page about the protocols agrees with the tables and lists every close reason."""

from __future__ import annotations

import pytest
from support.paths import ROOT
from support.protocols.specifications import parts, read
from support.protocols.transcript_replay import PureReplay
from support.protocols.transcripts import all_transcripts

from duplane.edge.client_errors import ErrorCode
from duplane.edge.close import CloseReason
from pages.protocol_examples import CLIENT, client_event, server_events
from pages.protocol_fields import client_fields, server_fields
from pages.protocols import DIALECTS, ends_of, protocol_page

PAGE = ROOT / "edge/PROTOCOLS.md"


def test_committed_page_is_fresh() -> None:
    assert PAGE.read_text() == protocol_page(), "run `make protocols`"


def test_page_names_every_event_and_code() -> None:
    page = protocol_page()
    for dialect in DIALECTS.values():
        for kind in (*dialect.replies, *dialect.server_events):
            assert f"`{kind}`" in page
    for code in ErrorCode:
        assert f"`{code}`" in page


def test_every_end_of_a_transcript_is_one_that_the_page_names() -> None:
    seen: set[tuple[str, CloseReason]] = set()
    for transcript in all_transcripts():
        replay = PureReplay(transcript)
        replay.run()
        assert replay.session.closed
        seen.add((type(replay.session.dialect).__name__, replay.session.closed.reason))
    named = {(d.__name__, end) for d in DIALECTS.values() for end in ends_of(d)}
    assert seen <= named
    unseen = {end for _, end in named} - {end for _, end in seen}
    # This reason needs a client that does not read: see tests/fabric.
    assert unseen == {CloseReason.TOO_SLOW}


@pytest.mark.parametrize("name", DIALECTS)
def test_the_page_has_every_field_of_the_specifications_and_no_other(name: str) -> None:
    specification = read(name[0])
    for side, described in (("client", client_fields(name)), ("server", server_fields(name))):
        assert described.keys() == specification[side].keys()
        for kind, (required, optional) in described.items():
            named = specification[side][kind]
            for group, paths in (("required", required), ("optional", optional)):
                listed = {path for path in named.get(group, ()) if not path.endswith("[]")}
                assert set(paths.split()) == listed, (side, kind)


@pytest.mark.parametrize("name", DIALECTS)
def test_the_examples_of_the_page_are_events_of_the_dialect(name: str) -> None:
    dialect = DIALECTS[name]
    assert CLIENT[name].keys() == dialect.replies.keys()
    assert server_events(name).keys() == dialect.server_events.keys()
    for kind, event in server_events(name).items():
        required, optional = (paths.split() for paths in server_fields(name)[kind])
        has = {path for path, _ in parts(event)} - {"type"}
        assert set(required) <= has, kind
        roots = {"usage", "chunk_usage"}  # the page describes the parts of these two in one place
        inner = {path for path in has if path.partition(".")[0] in roots}
        assert has - inner <= {*required, *optional}, kind
    for kind in CLIENT[name]:
        required, optional = (paths.split() for paths in client_fields(name)[kind])
        has = {path for path, _ in parts(client_event(name, kind))} - {"type"}
        assert has - {"input.messages[]", "messages[]"} <= {*required, *optional}, kind
