"""Reading the paths, queries and headers of clients, including malformed ones."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplane.edge.routing import Route, Target, find_route, parse_target, refused_query
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
        (
            "/ws/half_duplex/hd%201?mode=video&model=a",
            {},
            Target("half_duplex", "hd_1", Route.HALF_DUPLEX, "a", "hd_1"),
        ),
        (
            "/ws/half_duplex/" + "m" * 999,
            {"x-client-id": "c"},
            Target("half_duplex", "c", Route.HALF_DUPLEX, url_id="m" * 128),
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


BEARER = {"authorization": "Bearer K"}


def offers(*names: str) -> dict[str, str]:
    return {"sec-websocket-protocol": ", ".join(names)}


@pytest.mark.parametrize(
    ("path", "headers", "route"),
    [
        ("/v1/live/sessions", {}, Route.LIVE),
        ("/openai/v1/live/sessions", BEARER, Route.AZURE_LIVE),
        ("/openai/v1/realtime?model=m", {}, Route.OPENAI_REALTIME),
        ("/realtime", {}, Route.BARE_REALTIME),
        ("/v1/realtime?mode=audio&model=m", BEARER, Route.REALTIME),
        ("/v1/realtime?mode=&model=m", BEARER, Route.REALTIME),
        ("/v1/realtime?mode=audio", offers("realtime"), Route.REALTIME),
        ("/v1/realtime?model=m", offers("map.realtime", "realtime"), Route.REALTIME),
        ("/v1/realtime?model=m", BEARER | offers("duplane.realtime"), Route.REALTIME),
        ("/v1/realtime", offers("realtime"), Route.OPENAI_REALTIME),
        (
            "/v1/realtime?model=m",
            offers("realtime", "openai-insecure-api-key.K"),
            Route.OPENAI_REALTIME,
        ),
        ("/v1/realtime?model=m", BEARER, Route.OPENAI_REALTIME),
        ("/v1/realtime?model=m", {"authorization": "bearer K"}, Route.OPENAI_REALTIME),
        ("/v1/realtime?call_id=c", BEARER, Route.OPENAI_REALTIME),
        ("/v1/realtime?intent=transcription", BEARER, Route.OPENAI_REALTIME),
        ("/v1/realtime?model=m", {}, Route.REALTIME),
        ("/v1/realtime?model=m", {"authorization": "Basic K"}, Route.REALTIME),
        ("/v1/realtime?model=m", offers("openai-insecure-api-key.K"), Route.REALTIME),
        ("/v1/realtime", BEARER, Route.REALTIME),
        ("/v1/realtime", {}, Route.REALTIME),
    ],
)
def test_the_upgrade_decides_who_speaks_openai(
    path: str, headers: dict[str, str], route: Route
) -> None:
    assert parse_target(path, headers).route is route


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("", ""),
        ("?model=m", ""),
        ("?intent=conversation", ""),
        ("?call_id=", "call_id: "),
        ("?model=m&call_id=c", "call_id: "),
        ("?intent=transcription", "intent: "),
    ],
)
def test_a_query_for_another_protocol_is_refused(query: str, fault: str) -> None:
    refusal = refused_query(f"/v1/realtime{query}")
    assert refusal.startswith(fault)
    assert bool(refusal) is bool(fault)


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
        ("/openai/v1/realtime?model=m", Route.OPENAI_REALTIME),
        ("/realtime", Route.BARE_REALTIME),
        ("/realtime/", None),
        ("/ws/half_duplex/x?y=z", Route.HALF_DUPLEX),
        ("/ws/half_duplex/", None),
        ("/ws/half_duplex/a/b", None),
        ("/ws/duplex/", None),
        ("/ws/duplex", None),
        ("/ws/duplex/a/b", None),
        ("/", None),
    ],
)
def test_a_path_leads_to_its_place_or_nowhere(path: str, route: Route | None) -> None:
    assert find_route(path) is route
