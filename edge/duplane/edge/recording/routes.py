"""The paths of recorded sessions; for operators only: recordings are people's voices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import orjson
from aiohttp import web

from duplane.edge.recording.answers import (
    Json,
    session_archive,
    session_asset,
    session_list,
    session_meta,
    session_recording,
)
from duplane.edge.recording.settings import RecordingSettings

_NOT_FOUND = "no such recording"


def recording_routes(
    settings: RecordingSettings | None, require_operator: Callable[[web.Request], None]
) -> list[web.RouteDef]:
    """Return the routes below /api/sessions; without recording there are no sessions.

    `require_operator` raises for whoever may not ask.
    """
    root = settings.directory if settings else None

    def route(path: str, answer: Callable[[str, str], Awaitable[web.StreamResponse]]):
        async def handle(request: web.Request) -> web.StreamResponse:
            require_operator(request)
            name, asset = request.match_info["session"], request.match_info.get("asset", "")
            told = await answer(name, asset)
            told.force_close()
            return told

        return web.get(path, handle)

    async def listed(request: web.Request) -> web.Response:
        require_operator(request)
        told = await _json(lambda: session_list(root) if root else {"total": 0, "sessions": []})
        told.force_close()
        return told

    async def meta(name: str, _: str) -> web.Response:
        return await _json(lambda: session_meta(root, name) if root else None)

    async def recording(name: str, _: str) -> web.Response:
        return await _json(lambda: session_recording(root, name) if root else None)

    async def asset(name: str, path: str) -> web.StreamResponse:
        found = await asyncio.to_thread(session_asset, root, name, path) if root else None
        if found is None:
            raise web.HTTPNotFound(text=_NOT_FOUND)
        return web.FileResponse(found.path, headers={"Content-Type": found.content_type})

    async def download(name: str, _: str) -> web.Response:
        archive = session_archive(root, name) if root else None
        if archive is None:
            raise web.HTTPNotFound(text=_NOT_FOUND)
        file_name = f'attachment; filename="{name}.zip"'
        return web.Response(
            body=_in_thread(archive),
            content_type="application/zip",
            headers={"Content-Disposition": file_name},
        )

    return [
        web.get("/api/sessions", listed),
        route("/api/sessions/{session}", meta),
        route("/api/sessions/{session}/recording", recording),
        route("/api/sessions/{session}/assets/{asset:.*}", asset),
        route("/api/sessions/{session}/download", download),
    ]


async def _json(answer: Callable[[], Json | None]) -> web.Response:
    """Read and render in a thread: a timeline can be long."""

    def render() -> bytes | None:
        told = answer()
        return None if told is None else orjson.dumps(told)

    body = await asyncio.to_thread(render)
    if body is None:
        raise web.HTTPNotFound(text=_NOT_FOUND)
    return web.Response(body=body, content_type="application/json")


async def _in_thread(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece
