"""Every path that an edge answers, put together."""

from __future__ import annotations

from aiohttp import web

from duplane.edge.assets import load_assets
from duplane.edge.clock import Clock
from duplane.edge.http.app_routes import AppAnswers
from duplane.edge.http.chat_routes import ChatAnswers
from duplane.edge.http.fabric_routes import FabricAnswers
from duplane.edge.http.operators import operator_check
from duplane.edge.http.queue_routes import QueueAnswers
from duplane.edge.http.recording_routes import RecordingAnswers
from duplane.edge.http.start_routes import StartAnswers
from duplane.edge.http.voice_routes import VoiceAnswers
from duplane.edge.sessions import Sessions
from duplane.edge.settings import EdgeSettings
from duplane.edge.voices import Voices
from duplane.fabric.client import FabricClient


def edge_routes(
    settings: EdgeSettings, fabric: FabricClient, sessions: Sessions, clock: Clock
) -> list[web.RouteDef]:
    """Return all routes. Raises ValueError for settings that cannot be used."""
    require_operator = operator_check(settings.admin_token, settings.trusted_proxies)
    assets = load_assets(settings.default_voice, settings.presets)
    voices = Voices(settings.ref_audio, settings.limits) if settings.ref_audio else None
    body_s = settings.limits.handshake_s
    return [
        *FabricAnswers(fabric, lambda: sessions.is_draining, lambda: sessions.count).routes(),
        *QueueAnswers(fabric, require_operator, body_s).routes(),
        *StartAnswers(assets, settings.playback_delay_ms).routes(),
        *VoiceAnswers(voices, require_operator, settings.limits).routes(),
        *ChatAnswers(sessions, settings.limits, clock).routes(),
        *AppAnswers(sessions.apps, require_operator, body_s).routes(),
        *RecordingAnswers(settings.recording, require_operator, body_s).routes(),
    ]
