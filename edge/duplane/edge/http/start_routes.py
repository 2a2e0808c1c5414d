"""The paths that clients start from: settings of web clients, a default voice, presets."""

from __future__ import annotations

import orjson
from aiohttp import web

from duplane.edge.assets import Assets
from duplane.edge.http.messages import json_answer


class StartAnswers:
    """What an operator offers, read and rendered once when the edge starts.

    Voices are megabytes: all who ask for one share its bytes, also those who never read them.
    """

    def __init__(self, assets: Assets, playback_delay_ms: int) -> None:
        self._playback_delay_ms = playback_delay_ms
        self._voice = orjson.dumps(assets.default_voice) if assets.default_voice else None
        self._listed = orjson.dumps(assets.presets)
        self._sounds = {name: orjson.dumps(sound) for name, sound in assets.preset_audio.items()}

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get("/api/frontend_defaults", self._frontend_defaults),
            web.get("/api/default_ref_audio", self._default_voice),
            web.get("/api/presets", self._presets),
            web.get("/api/presets/{mode}/{preset}/audio", self._preset_audio),
        ]

    async def _frontend_defaults(self, _: web.Request) -> web.Response:
        return json_answer({"playback_delay_ms": self._playback_delay_ms})

    async def _default_voice(self, _: web.Request) -> web.Response:
        if self._voice is None:
            raise web.HTTPNotFound(text="No default ref audio configured")
        return json_answer(self._voice)

    async def _presets(self, _: web.Request) -> web.Response:
        return json_answer(self._listed)

    async def _preset_audio(self, request: web.Request) -> web.Response:
        mode, preset = request.match_info["mode"], request.match_info["preset"]
        sound = self._sounds.get((mode, preset))
        if sound is None:
            raise web.HTTPNotFound(text=f"Preset not found: {mode}/{preset}")
        return json_answer(sound)
