"""The routes with which operators erase recordings: one, or all of one person."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from duplane.edge.access import Level, Scope
from duplane.edge.http.http_route import HttpRoute
from duplane.edge.http.messages import json_answer
from duplane.edge.recording.erasure import AmbiguousSubjectError, erase_recording, erase_subject
from duplane.edge.recording.settings import RecordingSettings
from duplane.edge.session_registry import SessionRegistry
from duplane.fabric.monitoring.logs import AUDIT

_log = logging.getLogger(__name__)
_audit = logging.getLogger(AUDIT)
_Result = TypeVar("_Result")


class ErasureRoutes:
    """Erases recordings; none if `settings` is None."""

    def __init__(self, settings: RecordingSettings | None, sessions: SessionRegistry) -> None:
        self._settings = settings
        self._sessions = sessions

    def routes(self) -> list[HttpRoute]:
        """Return the routes."""
        rights = (Level.OPERATOR, Scope.RECORDINGS)
        one = "/api/sessions/{session}/recording"
        return [
            HttpRoute("DELETE", "/api/sessions", self._erase_subject, *rights),
            HttpRoute("DELETE", one, self._erase_recording, *rights),
        ]

    async def _erase_recording(self, request: web.Request) -> web.Response:
        """Delete one recording. If its session still runs, the session continues unrecorded."""
        name = request.match_info["session"]
        settings = self._settings
        if settings is None or not await self._erased(
            lambda: erase_recording(settings.directory, name)
        ):
            raise web.HTTPNotFound(text="no such recording")
        return json_answer({"success": True})

    async def _erase_subject(self, request: web.Request) -> web.Response:
        """Delete all recordings of one person, also those of running sessions."""
        subjects, tenants = request.query.getall("subject", []), request.query.getall("tenant", [])
        if len(subjects) != 1 or not subjects[0]:
            raise web.HTTPBadRequest(text="subject: must be one id of a user")
        if len(tenants) > 1:
            raise web.HTTPBadRequest(text="tenant: must be given once at most")
        settings, subject = self._settings, subjects[0]
        tenant = tenants[0] if tenants else None
        try:
            erased = (
                await self._erased(lambda: erase_subject(settings.directory, subject, tenant))
                if settings
                else ()
            )
        except AmbiguousSubjectError:
            raise web.HTTPConflict(
                text="tenant: several tenants have a user with this id; name one"
            ) from None
        _audit.info("subject=sha256:%s erased=%d", _digest(subject), len(erased))
        return json_answer({"success": True, "erased": list(erased)})

    async def _erased(self, erase: Callable[[], _Result]) -> _Result:
        """Erase in a thread, when all recordings that have begun are on disk."""
        try:
            if self._sessions.recorder:
                await self._sessions.recorder.written()
            return await asyncio.to_thread(erase)
        except (OSError, TimeoutError) as error:
            _log.error("recordings cannot be erased: %s", str(error) or "the disk is too slow")
            text = "some recordings cannot be deleted; the log says why"
            raise web.HTTPInternalServerError(text=text) from None


def _digest(subject: str) -> str:
    """Return a text that proves which person was meant only to those who know the person's id."""
    return hashlib.sha256(subject.encode()).hexdigest()[:16]
