"""Receives a file of a multipart form block by block, so that memory never holds the whole file."""

from __future__ import annotations

import asyncio
from pathlib import Path

from aiohttp import BodyPartReader, MultipartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from duplane.edge.http.messages import Json
from duplane.edge.recording.attachments import UPLOADS, TooLargeError, Upload
from duplane.edge.recording.settings import RecordingSettings

_BLOCK_BYTES = 256 * 1024
_FORM_BYTES = 64 * 1024  # around the file
_FIELD = "file"
_MAX_PARTS = 8


async def receive_upload(
    request: web.Request, directory: Path, settings: RecordingSettings
) -> Json:
    """Store the file in a recording and return its name within the recording.

    Raises HTTPException, and OSError of the disk.
    """
    max_bytes = settings.upload_bytes
    too_large = web.HTTPRequestEntityTooLarge(
        max_bytes, request.content_length or 0, text=f"file: must be at most {max_bytes} bytes"
    )
    if (request.content_length or 0) > max_bytes + _FORM_BYTES:
        raise too_large
    try:
        async with asyncio.timeout(settings.upload_s):
            reader = _form(request)
            part = await _file_part(reader)
            name = UPLOADS.get(_content_type(part))
            if name is None:
                raise web.HTTPBadRequest(text=f"file: must be one of {', '.join(UPLOADS)}")
            return await _store(reader, part, Upload(directory, name, max_bytes), name)
    except TooLargeError:
        raise too_large from None
    except TimeoutError:
        raise web.HTTPRequestTimeout(text="the request took too long") from None
    except (ValueError, HttpProcessingError):
        raise web.HTTPBadRequest(text="the body is no multipart form") from None


def _form(request: web.Request) -> MultipartReader:
    if request.content_type != "multipart/form-data":
        raise _missing()
    return MultipartReader(request.headers, request.content)


async def _file_part(reader: MultipartReader) -> BodyPartReader:
    for _ in range(_MAX_PARTS):
        part = await reader.next()
        if part is None:
            break
        if isinstance(part, BodyPartReader) and part.name == _FIELD:
            return part
    raise _missing()


def _missing() -> web.HTTPUnprocessableEntity:
    return web.HTTPUnprocessableEntity(text=f"{_FIELD}: required, in a multipart form")


def _content_type(part: BodyPartReader) -> str:
    return part.headers.get("Content-Type", "").partition(";")[0].strip().lower()


async def _store(reader: MultipartReader, part: BodyPartReader, upload: Upload, name: str) -> Json:
    try:
        while block := await part.read_chunk(_BLOCK_BYTES):
            await asyncio.to_thread(upload.write, block)
        await reader.next()  # raises if the file is cut off
        if not upload.size_bytes:
            raise web.HTTPBadRequest(text=f"{_FIELD}: is empty")
        await asyncio.to_thread(upload.commit)
    finally:
        await asyncio.shield(asyncio.to_thread(upload.close))
    return {"status": "ok", "path": name, "size_bytes": upload.size_bytes}
