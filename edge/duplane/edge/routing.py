"""Parses the URL and headers of a session, and chooses its dialect and mode."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from urllib.parse import parse_qs, parse_qsl, unquote

from duplane.edge.clock import Moment
from duplane.edge.close import Close, CloseReason
from duplane.edge.dialects.a import DialectA
from duplane.edge.dialects.b import DialectB
from duplane.edge.dialects.b_chat import DialectBChat
from duplane.edge.dialects.c import DialectC
from duplane.edge.dialects.chat import ChatDialect
from duplane.edge.dialects.d import DialectD
from duplane.edge.dialects.duplex import DuplexDialect
from duplane.edge.dialects.e_chat import DialectEChat
from duplane.edge.dialects.h import DialectH
from duplane.edge.dialects.l import DialectL
from duplane.edge.identity import Identity
from duplane.edge.modes import (
    CHAT_MODE,
    DEFAULT_MODE,
    DUPLEX_MODES,
    HALF_DUPLEX_MODE,
    LIVE_MODE,
    MODES,
    REALTIME_CHAT_MODE,
    Mode,
)
from duplane.edge.session.chat_session import ChatSession
from duplane.edge.session.continuity import NO_CONTINUITY, Continuity
from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.session.edge_note import EdgeNote
from duplane.edge.session.half_duplex_session import HalfDuplexSession
from duplane.edge.settings import Limits
from duplane.edge.speech.scorers import ScorerFactory
from duplane.edge.speech.spectral_scorer import SpectralScorer
from duplane.fabric.monitoring.spans import from_headers
from duplane.fabric.settings import MAX_LABEL_LENGTH
from duplane.fabric.v1 import trace_pb2

_MAX_MODE_CHARACTERS = 32
_MAX_CLIENT_ID_CHARACTERS = 128

HTTP_CHAT_PATH = "/api/chat"  # one turn of chat over plain HTTP
COMPLETIONS_PATH = "/v1/chat/completions"  # the same in the form of OpenAI's API
HTTP_CHAT_PATHS = (HTTP_CHAT_PATH, COMPLETIONS_PATH)
_DUPLEX_PREFIX = "/ws/duplex/"
_HALF_DUPLEX_PREFIX = "/ws/half_duplex/"
_HALF_DUPLEX = "half_duplex"  # the only mode of its route
_AUDIO_PREFIX = "adx_"  # begins the id of a session without video

AnySession = DuplexSession | ChatSession


class Route(Enum):
    """The paths of WebSockets."""

    REALTIME = "/v1/realtime"
    DUPLEX = "/ws/duplex/{session_id}"
    CHAT = "/ws/chat"
    HALF_DUPLEX = "/ws/half_duplex/{session_id}"
    LIVE = "/v1/live/sessions"
    AZURE_LIVE = "/openai/v1/live/sessions"  # where clients of Azure OpenAI look for the same
    OPENAI_REALTIME = "/openai/v1/realtime"
    BARE_REALTIME = "/realtime"  # what a client makes of a base URL without a path


LIVE_ROUTES = (Route.LIVE, Route.AZURE_LIVE)
REALTIME_ROUTES = (Route.OPENAI_REALTIME, Route.BARE_REALTIME)
OPENAI_ROUTES = (*LIVE_ROUTES, *REALTIME_ROUTES)
"""The routes of OpenAI's protocols; `/v1/realtime` has one of them, too (`is_openai_realtime`)."""

_OWN_SUBPROTOCOLS = frozenset({"map.realtime", "duplane.realtime"})
_OPENAI_SUBPROTOCOL = "realtime"
_REFUSED_PARAMETERS = ("call_id", "intent")


@dataclass(frozen=True, slots=True)
class Target:
    """What a client requests, from its URL and headers.

    `route` says what is served there: `/v1/realtime` has the protocols of two routes. `client_id`
    is shown to operators and is never trusted. `model` names the model that the client asks for;
    the scheduler decides what the name means. Empty means any model. `url_id` is the id of a half
    duplex session in its URL.
    """

    mode: str
    client_id: str
    route: Route = Route.REALTIME
    model: str = ""
    url_id: str = ""


def find_route(path: str) -> Route | None:
    """Return the route of a path, which may have a query. None if no WebSocket is served there."""
    plain_path = path.partition("?")[0]
    for route in (Route.REALTIME, Route.CHAT, *OPENAI_ROUTES):
        if plain_path == route.value:
            return route
    if _url_id(plain_path, _HALF_DUPLEX_PREFIX):
        return Route.HALF_DUPLEX
    return Route.DUPLEX if _url_id(plain_path, _DUPLEX_PREFIX) else None


def _url_id(path: str, prefix: str) -> str:
    """Return the session id that follows `prefix` in a path, and "" for other paths.

    Characters that are unsafe in a file name are replaced.
    """
    name = path.removeprefix(prefix)
    if name == path or "/" in name:
        return ""
    return re.sub(r"[^A-Za-z0-9_-]", "_", unquote(name))


def parse_target(path: str, headers: Mapping[str, str]) -> Target:
    """Parse a path with its query. The names of `headers` are in lower case."""
    plain_path, _, query_text = path.partition("?")
    query = parse_qs(query_text)
    client_id = query.get("client_id", [headers.get("x-client-id", "")])[0]
    model = query.get("model", [""])[0][:MAX_LABEL_LENGTH]
    if plain_path in (Route.CHAT.value, *HTTP_CHAT_PATHS):
        return Target("chat", client_id[:_MAX_CLIENT_ID_CHARACTERS], Route.CHAT, model)
    if url_id := _url_id(plain_path, _DUPLEX_PREFIX):
        mode = "audio" if url_id.startswith(_AUDIO_PREFIX) else "video"
        name = (client_id or url_id)[:_MAX_CLIENT_ID_CHARACTERS]
        return Target(mode, name, Route.DUPLEX, model)
    if url_id := _url_id(plain_path, _HALF_DUPLEX_PREFIX)[:_MAX_CLIENT_ID_CHARACTERS]:
        name = (client_id or url_id)[:_MAX_CLIENT_ID_CHARACTERS]
        return Target(_HALF_DUPLEX, name, Route.HALF_DUPLEX, model, url_id)
    client_id = client_id[:_MAX_CLIENT_ID_CHARACTERS]
    for route in OPENAI_ROUTES:
        if plain_path == route.value:
            return Target("audio", client_id, route, model)
    if is_openai_realtime(query_text, headers):
        return Target("audio", client_id, Route.OPENAI_REALTIME, model)
    mode = query.get("mode", [DEFAULT_MODE])[0]
    return Target(mode[:_MAX_MODE_CHARACTERS], client_id, model=model)


def is_openai_realtime(query_text: str, headers: Mapping[str, str]) -> bool:
    """Return whether a client of `/v1/realtime` speaks OpenAI's protocol (E), and not A or B.

    E begins with an event of the server, so the upgrade must tell. A `mode` or a subprotocol of A
    and B decides for them. Otherwise OpenAI's subprotocol decides for E, and so do a `model` and a
    bearer token together: every client of OpenAI has both, unless it asks for what is refused
    (`refused_query`).
    """
    query = parse_qs(query_text, keep_blank_values=True)
    offered = headers.get("sec-websocket-protocol", "").split(",")
    subprotocols = {name.strip() for name in offered}
    if "mode" in query or subprotocols & _OWN_SUBPROTOCOLS:
        return False
    scheme = headers.get("authorization", "").strip().partition(" ")[0]
    has_bearer = scheme.lower() == "bearer"
    is_asking = not query.keys().isdisjoint(("model", *_REFUSED_PARAMETERS))
    return _OPENAI_SUBPROTOCOL in subprotocols or (has_bearer and is_asking)


def refused_query(path: str) -> str:
    """Return why a client of OpenAI's Realtime protocol is refused for its query; "" if it is not.

    What it asks for would begin with other events.
    """
    query = parse_qs(path.partition("?")[2], keep_blank_values=True)
    if "call_id" in query:
        return "call_id: calls by WebRTC and SIP are not supported"
    if query.get("intent", [""])[0] not in ("", "realtime", "conversation"):
        return "intent: only conversations are supported"
    return ""


def parse_trace(path: str, headers: Mapping[str, str]) -> trace_pb2.TraceContext:
    """Return the client's trace, from the headers or the query: browsers cannot set headers."""
    trace = from_headers(headers)
    query = path.partition("?")[2]
    return trace if trace.traceparent else from_headers(dict(parse_qsl(query)))


def max_message_bytes(target: Target, limits: Limits) -> int:
    """Return the bound of one message of a client."""
    if target.mode == "chat":  # a message has the history of the chat
        return limits.chat_message_bytes
    is_openai = target.route in OPENAI_ROUTES
    return limits.openai_message_bytes if is_openai else limits.message_bytes


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The dialect and mode of a URL. Dialect None means that the client's first event decides."""

    dialect: type[DuplexDialect] | type[ChatDialect] | None
    mode: Mode

    def new_session(
        self,
        identity: Identity,
        limits: Limits,
        now: Moment,
        continuity: Continuity = NO_CONTINUITY,
        scorers: ScorerFactory = SpectralScorer,
    ) -> AnySession:
        """Return a new session. A duplex session moves between workers if `continuity` allows.

        A session that looks for speech in the client's sound does so with `scorers`.
        """
        if self.dialect is None:
            first = DialectA(identity, limits, self.mode)
            return DuplexSession(first, limits, now, continuity, detects_dialect=True)
        dialect = self.dialect(identity, limits, self.mode)
        if isinstance(dialect, DialectEChat):
            dialect.new_scorer = scorers
        if isinstance(dialect, DialectH):
            return HalfDuplexSession(dialect, limits, now, scorers)
        if isinstance(dialect, ChatDialect):
            return ChatSession(dialect, limits, now, continuity)
        return DuplexSession(dialect, limits, now, continuity)


_RESUMABLE: Mapping[str, tuple[type[DuplexDialect], Mapping[str, Mode]]] = {
    "A": (DialectA, MODES),
    "B": (DialectB, MODES),
    "C": (DialectC, DUPLEX_MODES),
}


def restored_session(
    note: EdgeNote, limits: Limits, now: Moment, continuity: Continuity = NO_CONTINUITY
) -> DuplexSession:
    """Return a session for one that another edge has begun: `restore` it. Raises ValueError."""
    dialect, modes = _RESUMABLE.get(note.dialect, (DialectA, {}))
    if note.mode not in modes:
        raise ValueError(f"no session of dialect {note.dialect} has the mode {note.mode}")
    return DuplexSession(dialect(note.identity, limits, modes[note.mode]), limits, now, continuity)


ENDPOINTS: Mapping[tuple[Route, str], Endpoint] = {
    **{(Route.REALTIME, name): Endpoint(None, mode) for name, mode in MODES.items()},
    (Route.REALTIME, "chat"): Endpoint(DialectBChat, CHAT_MODE),
    **{(Route.DUPLEX, name): Endpoint(DialectC, mode) for name, mode in DUPLEX_MODES.items()},
    (Route.CHAT, "chat"): Endpoint(DialectD, CHAT_MODE),
    (Route.HALF_DUPLEX, _HALF_DUPLEX): Endpoint(DialectH, HALF_DUPLEX_MODE),
    **{(route, "audio"): Endpoint(DialectL, LIVE_MODE) for route in LIVE_ROUTES},
    **{(route, "audio"): Endpoint(DialectEChat, REALTIME_CHAT_MODE) for route in REALTIME_ROUTES},
}

# The dialect in which a route refuses a session.
REFUSAL_DIALECTS: Mapping[Route, type[DuplexDialect] | type[ChatDialect]] = {
    Route.REALTIME: DialectA,
    Route.DUPLEX: DialectC,
    Route.CHAT: DialectD,
    Route.HALF_DUPLEX: DialectH,
    **dict.fromkeys(LIVE_ROUTES, DialectL),
    **dict.fromkeys(REALTIME_ROUTES, DialectEChat),
}


def unsupported_mode(mode: str) -> Close:
    """Return the close for a connection that asks for a mode that its route does not have."""
    return Close(CloseReason.MODE_REFUSED, f"Unsupported realtime mode: {mode}")
