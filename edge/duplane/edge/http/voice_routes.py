"""The routes of uploaded reference voices.

A client downloads a voice and sends it when it opens a session.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from duplane.edge.access import Level, Scope, caller_of
from duplane.edge.client_errors import ClientError
from duplane.edge.content.voices import StoredVoice, VoicesFullError, VoiceStore
from duplane.edge.http.fabric_routes import now
from duplane.edge.http.http_route import HttpRoute
from duplane.edge.http.messages import Json, json_answer, read_body, read_object
from duplane.edge.payload.media import decode_base64
from duplane.edge.settings import Limits
from duplane.fabric.audio import AudioError

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class VoiceRoutes:
    """Lists, stores and deletes voices; without `voices` the list is empty and uploads fail."""

    def __init__(self, voices: VoiceStore | None, limits: Limits) -> None:
        self._voices = voices
        self._limits = limits
        self._decoding = asyncio.Lock()  # one at a time, because decoding takes memory

    def routes(self) -> list[HttpRoute]:
        """Return the routes."""
        every, one = "/api/assets/ref_audio", "/api/assets/ref_audio/{voice}"
        return [
            HttpRoute("GET", every, self._list, Level.CLIENT),
            HttpRoute("POST", every, self._upload, Level.OPERATOR, Scope.VOICES),
            HttpRoute("GET", one, self._read, Level.OPERATOR, Scope.VOICES),
            HttpRoute("DELETE", one, self._delete, Level.OPERATOR, Scope.VOICES),
        ]

    async def _list(self, request: web.Request) -> web.Response:
        """Answer with the voices that the sender may use: all for operators, none for others.

        Pages of the reference ask for this list when they load, so others get an empty list.
        """
        may_read = Scope.VOICES in caller_of(request).scopes
        listed = await _in_thread(self._voices.listed) if self._voices and may_read else ()
        return json_answer({"total": len(listed), "ref_audios": listed})

    async def _read(self, request: web.Request) -> web.Response:
        voices = self._voices
        voice_id = request.match_info["voice"]
        content = await _in_thread(lambda: voices.read(voice_id)) if voices else None
        if content is None:
            raise _not_found(voice_id)
        return json_answer(content)

    async def _upload(self, request: web.Request) -> web.Response:
        voices = self._require_voices()
        body = await read_body(request, self._limits.ref_audio_bytes, self._limits.init_s)

        def add() -> StoredVoice:
            name, audio_file = _read_upload(read_object(body), self._limits)
            return voices.add(name, audio_file, now())

        try:
            async with self._decoding:
                voice = await _in_thread(add)
        except AudioError as error:
            raise web.HTTPBadRequest(text=f"audio_base64: {error}") from None
        except VoicesFullError as error:
            raise web.HTTPInsufficientStorage(
                text=f"no room for reference audio: {error}"
            ) from None
        message = f"Uploaded successfully, duration={voice.duration_ms}ms"
        return json_answer({**_row(voice), "message": message})

    async def _delete(self, request: web.Request) -> web.Response:
        voices = self._require_voices()
        voice_id = request.match_info["voice"]
        removed = await _in_thread(lambda: voices.remove(voice_id))
        if removed is None:
            raise _not_found(voice_id)
        return json_answer({**_row(removed), "message": "Deleted"})

    def _require_voices(self) -> VoiceStore:
        if self._voices is None:
            raise web.HTTPNotFound(text="this edge stores no reference audio: see --ref-audio")
        return self._voices


def _read_upload(fields: Json, limits: Limits) -> tuple[str, bytes]:
    """Return the name and the audio file of an upload. Raises HTTPException."""
    for field in ("name", "audio_base64"):
        if not isinstance(fields.get(field), str):
            raise web.HTTPUnprocessableEntity(text=f"{field}: must be a string")
    name = str(fields["name"]).strip()
    if not name or len(name.encode()) > limits.text_bytes:
        raise web.HTTPUnprocessableEntity(text=f"name: must be 1 to {limits.text_bytes} bytes")
    try:
        return name, decode_base64(str(fields["audio_base64"]), "audio_base64")
    except ClientError as error:
        raise web.HTTPBadRequest(text=error.message) from None


def _row(voice: StoredVoice) -> Json:
    return {"success": True, "id": voice.id, "name": voice.name}


def _not_found(voice_id: str) -> web.HTTPNotFound:
    return web.HTTPNotFound(text=f"Ref audio not found: {voice_id}")


async def _in_thread(work: Callable[[], _Result]) -> _Result:
    """Run `work`, which uses the disk, in a thread. Raises HTTPException if it fails."""
    try:
        return await asyncio.to_thread(work)
    except OSError as error:
        _log.warning("reference audio: %s", error.strerror or error)
        raise web.HTTPInternalServerError(text="reference audio cannot be read or stored") from None
