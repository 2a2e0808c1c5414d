"""The page about the protocols is what the tables say, and leaves out no way to end."""

from __future__ import annotations

from pathlib import Path

from edge_replay import PureReplay
from edge_transcripts import all_transcripts

from duplane.edge.ends import End
from duplane.edge.faults import ErrorCode
from duplane.tools.protocol_page import DIALECTS, ends_of, protocol_page

PAGE = Path(__file__).resolve().parents[2] / "edge/PROTOCOLS.md"


def test_committed_page_is_fresh() -> None:
    assert PAGE.read_text() == protocol_page(), "run `make protocols`"


def test_page_names_every_event_and_code() -> None:
    page = protocol_page()
    for dialect in DIALECTS.values():
        for kind in (*dialect.answers, *dialect.server_events):
            assert f"`{kind}`" in page
    for code in ErrorCode:
        assert f"`{code}`" in page


def test_every_end_of_a_transcript_is_one_that_the_page_names() -> None:
    seen: set[tuple[str, End]] = set()
    for transcript in all_transcripts():
        replay = PureReplay(transcript)
        replay.run()
        assert replay.session.farewell
        seen.add((type(replay.session.dialect).__name__, replay.session.farewell.end))
    named = {(d.__name__, end) for d in DIALECTS.values() for end in ends_of(d)}
    assert seen <= named
    unseen = {end for _, end in named} - {end for _, end in seen}
    assert unseen == {End.TOO_SLOW}  # takes a client that does not read; tests/fabric has one
