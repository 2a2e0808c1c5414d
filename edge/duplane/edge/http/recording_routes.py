"""The routes of recorded sessions. They are for operators only, because voices are private."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import orjson
from aiohttp import web

from duplane.edge.access import Handler, Level, Scope
from duplane.edge.http.http_route import HttpRoute
from duplane.edge.http.messages import Json, closing, json_answer, read_body, read_object
from duplane.edge.http.uploads import receive_upload
from duplane.edge.recording.attachments import MAX_COMMENT_CHARACTERS, read_comment, write_comment
from duplane.edge.recording.queries import (
    find_recording,
    read_range,
    session_archive,
    session_asset,
    session_list,
    session_meta,
    session_recording,
)
from duplane.edge.recording.settings import RecordingSettings

_MAX_COMMENT_BODY_BYTES = 64 * 1024
RecordingHandler = Callable[[web.Request, RecordingSettings], Awaitable[web.StreamResponse]]


class RecordingRoutes:
    """Serves recordings; none if `settings` is None.

    `body_s` limits the time to receive a short body.
    """

    def __init__(self, settings: RecordingSettings | None, body_s: float) -> None:
        self._settings = settings
        self._body_s = body_s

    def routes(self) -> list[HttpRoute]:
        """Return the routes."""
        below = "/api/sessions/{session}"
        return [
            _route("GET", "/api/sessions", self._list),
            _route("GET", below, self._found(_meta)),
            _route("GET", f"{below}/recording", self._found(_recording)),
            _route("GET", f"{below}/assets/{{asset:.*}}", self._found(_asset)),
            _route("GET", f"{below}/download", self._found(_download)),
            _route("POST", f"{below}/upload-recording", self._found(_upload), takes_form=True),
            _route("GET", f"{below}/comment", self._found(_comment)),
            _route("POST", f"{below}/comment", self._found(self._set_comment)),
        ]

    async def _list(self, _: web.Request) -> web.StreamResponse:
        root = self._settings.directory if self._settings else None
        return await _rendered(lambda: session_list(root) if root else {"total": 0, "sessions": []})

    def _found(self, handler: RecordingHandler) -> Handler:
        """Return a handler that answers 404 if there is no such recording."""

        async def handle(request: web.Request) -> web.StreamResponse:
            if self._settings is None:
                raise _not_found()
            try:
                return await handler(request, self._settings)
            except FileNotFoundError:  # the recording was deleted meanwhile
                raise _not_found() from None

        return handle

    async def _set_comment(
        self, request: web.Request, settings: RecordingSettings
    ) -> web.StreamResponse:
        directory = await _directory(request, settings)
        body = await read_body(request, _MAX_COMMENT_BODY_BYTES, self._body_s)
        comment = read_object(body).get("comment")
        if not isinstance(comment, str | None):
            raise web.HTTPBadRequest(text="comment: must be a string")
        comment = (comment or "").strip()
        if len(comment) > MAX_COMMENT_CHARACTERS:
            text = f"comment: must be at most {MAX_COMMENT_CHARACTERS} characters"
            raise web.HTTPRequestEntityTooLarge(MAX_COMMENT_CHARACTERS, len(comment), text=text)
        await asyncio.to_thread(write_comment, directory, comment)
        return json_answer({"status": "ok", "len": len(comment)})


def _route(method: str, path: str, handler: Handler, *, takes_form: bool = False) -> HttpRoute:
    return HttpRoute(method, path, handler, Level.OPERATOR, Scope.RECORDINGS, takes_form)


async def _comment(request: web.Request, settings: RecordingSettings) -> web.StreamResponse:
    directory = await _directory(request, settings)
    return json_answer({"comment": await asyncio.to_thread(read_comment, directory)})


async def _upload(request: web.Request, settings: RecordingSettings) -> web.StreamResponse:
    directory = await _directory(request, settings)
    return json_answer(await receive_upload(request, directory, settings))


async def _meta(request: web.Request, settings: RecordingSettings) -> web.StreamResponse:
    return await _rendered(lambda: session_meta(settings.directory, _name(request)))


async def _recording(request: web.Request, settings: RecordingSettings) -> web.StreamResponse:
    blocks = await asyncio.to_thread(session_recording, settings.directory, _name(request))
    if blocks is None:
        raise _not_found()
    return closing(web.Response(body=_in_thread(blocks), content_type="application/json"))


async def _asset(request: web.Request, settings: RecordingSettings) -> web.StreamResponse:
    path = request.match_info["asset"]
    found = await asyncio.to_thread(session_asset, settings.directory, _name(request), path)
    if found is None:
        raise _not_found()
    size = (await asyncio.to_thread(found.path.stat)).st_size
    span = _requested_range(request, size)
    headers = {
        "Content-Type": found.content_type,
        "Content-Length": str(len(span)),
        "Accept-Ranges": "bytes",
        # A browser must not guess another type for an uploaded file.
        "X-Content-Type-Options": "nosniff",
    }
    if is_part := "Range" in request.headers:
        headers["Content-Range"] = f"bytes {span.start}-{span.stop - 1}/{size}"
    # The answer is not sent with sendfile, which bypasses the buffer that the write timeout
    # watches.
    body = _in_thread(read_range(found.path, span))
    return closing(web.Response(status=206 if is_part else 200, body=body, headers=headers))


def _requested_range(request: web.Request, size: int) -> range:
    """Return the requested range of a file's bytes. Raises HTTPException: 416."""
    try:
        start, stop, _ = request.http_range.indices(size)
    except ValueError:
        start, stop = size, size
    if start >= stop and "Range" in request.headers:
        raise web.HTTPRequestRangeNotSatisfiable(text=f"the file has {size} bytes")
    return range(start, stop)


async def _download(request: web.Request, settings: RecordingSettings) -> web.StreamResponse:
    name = _name(request)
    archive = await asyncio.to_thread(session_archive, settings.directory, name)
    if archive is None:
        raise _not_found()
    file_name = f'attachment; filename="{name}.zip"'
    answer = web.Response(
        body=_in_thread(archive),
        content_type="application/zip",
        headers={"Content-Disposition": file_name},
    )
    return closing(answer)


def _name(request: web.Request) -> str:
    return request.match_info["session"]


async def _directory(request: web.Request, settings: RecordingSettings) -> Path:
    directory = await asyncio.to_thread(find_recording, settings.directory, _name(request))
    if directory is None:
        raise _not_found()
    return directory


def _not_found() -> web.HTTPNotFound:
    return web.HTTPNotFound(text="no such recording")


async def _rendered(answer: Callable[[], Json | None]) -> web.Response:
    """Read and render an answer in a thread, because there can be many recordings."""

    def render() -> bytes | None:
        content = answer()
        return None if content is None else orjson.dumps(content)

    body = await asyncio.to_thread(render)
    if body is None:
        raise _not_found()
    return json_answer(body)


async def _in_thread(blocks: Iterator[bytes]) -> AsyncIterator[bytes]:
    while (block := await asyncio.to_thread(next, blocks, None)) is not None:
        yield block
