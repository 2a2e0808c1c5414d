"""All routes of an edge."""

from __future__ import annotations

from duplane.edge.clock import Clock
from duplane.edge.content.assets import load_assets
from duplane.edge.content.voices import VoiceStore
from duplane.edge.credentials.authenticator import CredentialAuthenticator
from duplane.edge.http.chat_routes import ChatRoutes
from duplane.edge.http.client_secret_routes import ClientSecretRoutes
from duplane.edge.http.completion_routes import CompletionRoutes
from duplane.edge.http.content_routes import AppRoutes, AssetRoutes
from duplane.edge.http.erasure_routes import ErasureRoutes
from duplane.edge.http.fabric_routes import FabricRoutes
from duplane.edge.http.http_route import HttpRoute
from duplane.edge.http.model_routes import ModelRoutes
from duplane.edge.http.page_routes import PageRoutes
from duplane.edge.http.queue_routes import QueueRoutes
from duplane.edge.http.recording_routes import RecordingRoutes
from duplane.edge.http.session_end_routes import SessionEndRoutes
from duplane.edge.http.session_routes import SessionRoutes
from duplane.edge.http.voice_routes import VoiceRoutes
from duplane.edge.http.watch_routes import WatchRoutes
from duplane.edge.remote_returns import RemoteReturns
from duplane.edge.session_registry import SessionRegistry
from duplane.edge.settings import EdgeSettings
from duplane.edge.watching.feed import WatchFeed
from duplane.fabric.client import FabricClient
from duplane.fabric.settings import parse_labels


def edge_routes(
    settings: EdgeSettings,
    fabric: FabricClient,
    sessions: SessionRegistry,
    clock: Clock,
    credentials: CredentialAuthenticator,
    watch_feed: WatchFeed,
) -> list[HttpRoute]:
    """Return all routes. Raises ValueError for invalid settings."""
    assets = load_assets(settings.default_voice, settings.presets)
    voices = VoiceStore(settings.ref_audio, settings.limits) if settings.ref_audio else None
    body_s = settings.limits.handshake_s
    returns = RemoteReturns(sessions, fabric, settings.limits, settings.pool, clock)
    return [
        *FabricRoutes(
            fabric,
            lambda: sessions.is_draining,
            lambda: sessions.count,
            lambda: sessions.unmovable_counts().total(),
            sessions.approximate_count,
        ).routes(),
        *QueueRoutes(fabric, body_s).routes(),
        *WatchRoutes(fabric, watch_feed, body_s).routes(),
        *AssetRoutes(
            assets, settings.playback_delay_ms, settings.limits.session_s, settings.recording
        ).routes(),
        *VoiceRoutes(voices, settings.limits).routes(),
        *SessionRoutes(sessions, returns, settings.limits, clock).routes(),
        *SessionEndRoutes(fabric, sessions).routes(),
        *ClientSecretRoutes(
            credentials.ephemeral,
            are_tenants_required=settings.credentials.are_required,
            body_s=body_s,
        ).routes(),
        *ModelRoutes(fabric, settings.pool, parse_labels(settings.needs, "needs")).routes(),
        *ChatRoutes(sessions, settings.limits, clock).routes(),
        *CompletionRoutes(sessions, settings.limits, clock).routes(),
        *AppRoutes(sessions.apps, body_s).routes(),
        *RecordingRoutes(settings.recording, body_s).routes(),
        *ErasureRoutes(settings.recording, sessions).routes(),
        *(PageRoutes().routes() if settings.pages == "on" else ()),
    ]
