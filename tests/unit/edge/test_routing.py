"""Reading the paths, queries and headers of clients, including malformed ones."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplane.edge.routing import Route, Target, find_route, parse_target
from duplane.edge.transport.closing import cut_reason
from duplane.fabric.v1 import lease_pb2


@pytest.mark.parametrize(
    ("path", "headers", "entry"),
    [
        ("/v1/realtime", {}, Target("video", "")),
        ("/v1/realtime?mode=audio", {"x-client-id": "c"}, Target("audio", "c")),
        (
            "/v1/realtime?client_id=q&mode=audio&mode=chat",
            {"x-client-id": "c"},
            Target("audio", "q"),
        ),
        ("/v1/realtime?mode=", {}, Target("video", "")),
        ("/v1/realtime?mode=a%FFb", {}, Target("a\ufffdb", "")),
        ("/v1/realtime?mode=" + "m" * 99, {}, Target("m" * 32, "")),
        ("/v1/realtime?model=a&mode=audio", {}, Target("audio", "", model="a")),
        ("/ws/chat?model=a", {}, Target("chat", "", Route.CHAT, "a")),
        (
            "/ws/duplex/omni_1?model=" + "m" * 999,
            {},
            Target("video", "omni_1", Route.DUPLEX, "m" * 128),
        ),
        ("/ws/chat", {"x-client-id": "c"}, Target("chat", "c", Route.CHAT)),
        ("/v1/live/sessions", {}, Target("audio", "", Route.LIVE)),
        (
            "/openai/v1/live/sessions?model=a&mode=video",
            {"x-client-id": "c"},
            Target("audio", "c", Route.AZURE_LIVE, "a"),
        ),
        ("/ws/duplex/omni_1", {}, Target("video", "omni_1", Route.DUPLEX)),
        ("/ws/duplex/adx_1?mode=video", {}, Target("audio", "adx_1", Route.DUPLEX)),
        ("/ws/duplex/a%2Fb%20c!", {"x-client-id": "c"}, Target("video", "c", Route.DUPLEX)),
        ("/ws/duplex/a%2Fb%20%FF!-_", {}, Target("video", "a_b___-_", Route.DUPLEX)),
        ("/ws/duplex/" + "m" * 999, {}, Target("video", "m" * 128, Route.DUPLEX)),
    ],
)
def test_entry_is_read_from_query_and_headers(
    path: str, headers: dict[str, str], entry: Target
) -> None:
    assert parse_target(path, headers) == entry


ODD = st.text(max_size=200)


@given(ODD, ODD)
def test_whatever_comes_can_be_told_and_passed_on(query: str, header: str) -> None:
    entry = parse_target(f"/v1/realtime?mode={query}&client_id={query}", {"x-client-id": header})
    orjson.dumps(entry.mode)
    lease_pb2.AcquireLeaseRequest(client_id=entry.client_id).SerializeToString()
    assert len(cut_reason(entry.mode * 10).encode()) <= 123


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/realtime", Route.REALTIME),
        ("/v1/realtime?mode=chat", Route.REALTIME),
        ("/v1/realtime/", None),
        ("/ws/duplex/x?y=z", Route.DUPLEX),
        ("/ws/chat?x", Route.CHAT),
        ("/ws/chat/x", None),
        ("/v1/live/sessions", Route.LIVE),
        ("/v1/live/sessions?model=x", Route.LIVE),
        ("/openai/v1/live/sessions", Route.AZURE_LIVE),
        ("/v1/live/sessions/", None),
        ("/v1/live", None),
        ("/ws/duplex/", None),
        ("/ws/duplex", None),
        ("/ws/duplex/a/b", None),
        ("/", None),
    ],
)
def test_a_path_leads_to_its_place_or_nowhere(path: str, route: Route | None) -> None:
    assert find_route(path) is route
