"""Operators switch kinds of session off and on at one edge."""

from __future__ import annotations

from typing import Any

import pytest
from support.edge.live_edge import begin, closed, end, exchange, live_edge, receive, send

PATHS = {
    "turnbased": ["/ws/chat", "/v1/realtime?mode=chat"],
    "half_duplex_audio": ["/ws/half_duplex/hd_1"],
    "omni": ["/v1/realtime?mode=video", "/v1/realtime", "/ws/duplex/omni_1"],
    "audio_duplex": ["/v1/realtime?mode=audio", "/ws/duplex/adx_1"],
}
NAMES = {
    "turnbased": "Turn-based Chat",
    "half_duplex_audio": "Half-Duplex Audio",
    "omni": "Omni Full-Duplex",
    "audio_duplex": "Audio Full-Duplex",
}
ROUTES = {app_id: f"/{app_id}" for app_id in NAMES} | {"half_duplex_audio": "/half_duplex"}


def row(app_id: str, **more: Any) -> dict[str, Any]:
    return {"app_id": app_id, "name": NAMES[app_id], "route": ROUTES[app_id], **more}


async def test_all_that_is_served_is_on_at_first() -> None:
    async with live_edge() as edge, edge.asked() as http:
        assert await http.get("/api/apps") == {"apps": [row(app_id) for app_id in PATHS]}
        told = await http.get("/api/admin/apps")
        assert told == {"apps": [row(each, enabled=each in PATHS) for each in NAMES]}


@pytest.mark.parametrize("app_id", PATHS)
async def test_an_app_that_is_off_takes_no_session_until_it_is_on_again(app_id: str) -> None:
    async with live_edge() as edge, edge.asked() as http:
        path = f"/api/admin/apps/{app_id}"
        told = await http.ask("PUT", path, json={"enabled": False})
        assert told == (200, {"success": True, "app": row(app_id, enabled=False)})
        on = [row(each) for each in PATHS if each != app_id]
        assert await http.get("/api/apps") == {"apps": on}
        for where in PATHS[app_id]:
            async with edge.connect_to(where) as client:
                told = await receive(client)
                assert told["type"] == "error"
                assert f"{NAMES[app_id]} is currently disabled" in str(told["error"])
                await closed(client, 1008)
                assert client.close_reason == f"{NAMES[app_id]} is currently disabled"
        assert edge.fabric.acquisitions.empty()
        others = (where for each in PATHS if each != app_id for where in PATHS[each])
        for where in [*others, *PATHS[app_id]]:
            if where == PATHS[app_id][0]:
                await http.ask("PUT", path, json={"enabled": True})
            async with edge.connect_to(where) as client:
                if where == "/ws/chat":
                    await send(client, {"messages": [{"role": "user", "content": "Hi"}]})
                assert (await receive(client))["type"] != "error", where
        assert [each["app_id"] for each in (await http.get("/api/apps"))["apps"]] == [*PATHS]


async def test_sessions_that_run_go_on() -> None:
    async with live_edge() as edge, edge.asked() as http, edge.connect() as client:
        await begin(client)
        await http.ask("PUT", "/api/admin/apps/audio_duplex", json={"enabled": False})
        await exchange(client)
        await end(client)


async def test_what_cannot_be_switched_is_refused() -> None:
    async with live_edge() as edge, edge.asked() as http:
        for body in ("", "{", "[]", "{}", '{"enabled":1}', '{"enabled":null}', b"{" * 5000):
            code, told = await http.ask("PUT", "/api/admin/apps/omni", data=body)
            assert code in (400, 413, 422)
            assert told["detail"]
        code, told = await http.ask("PUT", "/api/admin/apps/none", json={"enabled": False})
        assert (code, told) == (404, {"detail": "Unknown app: none"})
        assert (await http.ask("PUT", "/api/admin/apps", json={"enabled": False}))[0] == 405


async def test_only_operators_switch_apps() -> None:
    async with live_edge(admin_token="secret") as edge, edge.asked() as http:
        path = "/api/admin/apps/omni"
        assert (await http.ask("PUT", path, json={"enabled": False}))[0] == 403
        assert (await http.ask("GET", "/api/admin/apps"))[0] == 403
        assert len((await http.get("/api/apps"))["apps"]) == 4
        token = {"Authorization": "Bearer secret"}
        assert (await http.ask("PUT", path, json={"enabled": False}, headers=token))[0] == 200
        async with edge.connect() as client:  # this kind belongs to another app
            await begin(client)
            await end(client)
