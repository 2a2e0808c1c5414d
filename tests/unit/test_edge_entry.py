"""The query and headers a client comes with, however odd."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplane.edge.entry import Entry, Route, close_reason, read_entry, route_of
from duplane.fabric.v1 import lease_pb2


@pytest.mark.parametrize(
    ("path", "headers", "entry"),
    [
        ("/v1/realtime", {}, Entry("video", "")),
        ("/v1/realtime?mode=audio", {"x-client-id": "c"}, Entry("audio", "c")),
        (
            "/v1/realtime?client_id=q&mode=audio&mode=chat",
            {"x-client-id": "c"},
            Entry("audio", "q"),
        ),
        ("/v1/realtime?mode=", {}, Entry("video", "")),
        ("/v1/realtime?mode=a%FFb", {}, Entry("a\ufffdb", "")),
        ("/v1/realtime?mode=" + "m" * 99, {}, Entry("m" * 32, "")),
        ("/ws/chat", {"x-client-id": "c"}, Entry("chat", "c", Route.CHAT)),
        ("/ws/duplex/omni_1", {}, Entry("video", "omni_1", Route.DUPLEX)),
        ("/ws/duplex/adx_1?mode=video", {}, Entry("audio", "adx_1", Route.DUPLEX)),
        ("/ws/duplex/a%2Fb%20c!", {"x-client-id": "c"}, Entry("video", "c", Route.DUPLEX)),
        ("/ws/duplex/a%2Fb%20%FF!-_", {}, Entry("video", "a_b___-_", Route.DUPLEX)),
        ("/ws/duplex/" + "m" * 999, {}, Entry("video", "m" * 128, Route.DUPLEX)),
    ],
)
def test_entry_is_read_from_query_and_headers(
    path: str, headers: dict[str, str], entry: Entry
) -> None:
    assert read_entry(path, headers) == entry


ODD = st.text(max_size=200)


@given(ODD, ODD)
def test_whatever_comes_can_be_told_and_passed_on(query: str, header: str) -> None:
    entry = read_entry(f"/v1/realtime?mode={query}&client_id={query}", {"x-client-id": header})
    orjson.dumps(entry.mode)
    lease_pb2.AcquireLeaseRequest(client_id=entry.client_id).SerializeToString()
    assert len(close_reason(entry.mode * 10).encode()) <= 123


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/realtime", Route.REALTIME),
        ("/v1/realtime?mode=chat", Route.REALTIME),
        ("/v1/realtime/", None),
        ("/ws/duplex/x?y=z", Route.DUPLEX),
        ("/ws/chat?x", Route.CHAT),
        ("/ws/chat/x", None),
        ("/ws/duplex/", None),
        ("/ws/duplex", None),
        ("/ws/duplex/a/b", None),
        ("/", None),
    ],
)
def test_a_path_leads_to_its_place_or_nowhere(path: str, route: Route | None) -> None:
    assert route_of(path) is route
