"""The routes for web clients: client settings, the default voice, presets and apps."""

from __future__ import annotations

import logging

import orjson
from aiohttp import web

from duplane.edge.access import Level, Scope
from duplane.edge.content.apps import Apps
from duplane.edge.content.assets import Assets
from duplane.edge.http.http_route import HttpRoute
from duplane.edge.http.messages import json_answer, read_body, read_object
from duplane.edge.modes import MODES
from duplane.edge.recording.settings import RecordingSettings

_log = logging.getLogger(__name__)
_MAX_BODY_BYTES = 4 * 1024


class AssetRoutes:
    """Serves assets that were read and rendered when the edge started.

    A voice can have megabytes, so all responses share the bytes of one voice, even responses to
    slow clients.
    """

    def __init__(
        self,
        assets: Assets,
        playback_delay_ms: int,
        session_s: float | None,
        recording: RecordingSettings | None,
    ) -> None:
        self._defaults = {
            "playback_delay_ms": playback_delay_ms,
            "session_s": {name: session_s or mode.session_s for name, mode in MODES.items()},
            "records": recording.consent if recording else None,
        }
        self._voice = orjson.dumps(assets.default_voice)
        self._presets_json = orjson.dumps(assets.presets)
        self._preset_audio_json = {
            key: orjson.dumps(audio) for key, audio in assets.preset_audio.items()
        }

    def routes(self) -> list[HttpRoute]:
        """Return the routes."""
        return [
            HttpRoute("GET", "/api/frontend_defaults", self._frontend_defaults, Level.CLIENT),
            HttpRoute("GET", "/api/default_ref_audio", self._default_voice, Level.CLIENT),
            HttpRoute("GET", "/api/presets", self._presets, Level.CLIENT),
            HttpRoute(
                "GET", "/api/presets/{mode}/{preset}/audio", self._preset_audio, Level.CLIENT
            ),
        ]

    async def _frontend_defaults(self, _: web.Request) -> web.Response:
        return json_answer(self._defaults)

    async def _default_voice(self, _: web.Request) -> web.Response:
        return json_answer(self._voice)

    async def _presets(self, _: web.Request) -> web.Response:
        return json_answer(self._presets_json)

    async def _preset_audio(self, request: web.Request) -> web.Response:
        mode, preset = request.match_info["mode"], request.match_info["preset"]
        audio = self._preset_audio_json.get((mode, preset))
        if audio is None:
            raise web.HTTPNotFound(text=f"Preset not found: {mode}/{preset}")
        return json_answer(audio)


class AppRoutes:
    """Lists and switches apps. `body_s` limits the time to receive a request's body."""

    def __init__(self, apps: Apps, body_s: float) -> None:
        self._apps = apps
        self._body_s = body_s

    def routes(self) -> list[HttpRoute]:
        """Return the routes."""
        return [
            HttpRoute("GET", "/api/apps", self._list, Level.CLIENT),
            HttpRoute("GET", "/api/admin/apps", self._full_list, Level.MONITOR),
            HttpRoute("PUT", "/api/admin/apps/{app}", self._switch, Level.OPERATOR, Scope.DRAIN),
        ]

    async def _list(self, _: web.Request) -> web.Response:
        return json_answer(self._apps.public_list())

    async def _full_list(self, _: web.Request) -> web.Response:
        return json_answer(self._apps.full_list())

    async def _switch(self, request: web.Request) -> web.Response:
        """Switch one app on or off; running sessions continue."""
        app_id = request.match_info["app"]
        fields = read_object(await read_body(request, _MAX_BODY_BYTES, self._body_s))
        is_on = fields.get("enabled")
        if not isinstance(is_on, bool):
            raise web.HTTPUnprocessableEntity(text="enabled: must be true or false")
        try:
            app = self._apps.switch(app_id, is_on=is_on)
        except KeyError:
            raise web.HTTPNotFound(text=f"Unknown app: {app_id}") from None
        _log.info("app %s is switched %s", app_id, "on" if is_on else "off")
        return json_answer({"success": True, "app": app})
