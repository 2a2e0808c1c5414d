"""Writes the Markdown page of the client protocols, from the tables in the code of the edge.

Legal events, phases, answers, codes and bounds come from the classes of the dialects; this module
has only the text around these tables.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

import orjson

from duplane.edge.client_errors import ClientError, ErrorCode
from duplane.edge.clock import Moment
from duplane.edge.close import CLOSE_CODES, REFUSALS, Close, CloseReason
from duplane.edge.dialects.a import DialectA
from duplane.edge.dialects.b import DialectB
from duplane.edge.dialects.b_chat import DialectBChat
from duplane.edge.dialects.c import DialectC
from duplane.edge.dialects.d import DialectD
from duplane.edge.dialects.dialect import ALIVE, Dialect, Phase
from duplane.edge.dialects.first_event import FIRST_EVENTS, needs_init
from duplane.edge.identity import Identity
from duplane.edge.modes import MODES
from duplane.edge.payload.fields import Fields
from duplane.edge.payload.model_settings import (
    CHAT_SETTINGS,
    DUPLEX_SETTINGS,
    Choice,
    Flag,
    Number,
    Setting,
    WholeNumber,
)
from duplane.edge.routing import ENDPOINTS
from duplane.edge.settings import Limits
from duplane.edge.transport.websocket import SUBPROTOCOLS
from duplane.fabric.bounds import CHAT_CONFIG, DUPLEX_CONFIG
from duplane.tools.servers import edge
from pages.protocol_examples import CLIENT, client_event, server_events, shortened
from pages.protocol_fields import USAGE, client_fields, meaning, server_fields
from pages.settings import settings_of

HEAD = """\
# The WebSocket protocols of the edge

`make protocols` generates this page from the tables of the edge; a test keeps it up to date. The
examples are events that the dialects rendered, with long texts cut (`…`). The protocols are those
of [MiniCPM-o-Demo](https://github.com/OpenBMB/MiniCPM-o-Demo) and its documentation.
`tests/specifications` lists each event and field of the protocols, and the transcripts in
`tests/transcripts` show all of these. There are two complete clients of one page each:
[realtime_client.py](../tools/examples/realtime_client.py) in Python (dialect A) and
[realtime_client.mjs](../tools/examples/realtime_client.mjs) in JavaScript (dialect B).

Every event is one WebSocket text message: a JSON object in UTF-8. Clients send audio as base64 of
float32 samples (little endian, mono, 16 kHz) or of a WAV file, and get float32 at 24 kHz, whatever
the rates of the model are. A client may send audio in pieces of any length. The model chooses the
duration of a unit; a unit of MiniCPM-o is one second (16000 samples), and every unit of its speech
has at least one second of audio, except the last unit of a turn, which may be shorter or empty.
Pictures are JPEG, PNG, WEBP, GIF (the first frame) or BMP files. `null` counts as absent.

In a chat the edge sends the text of an answer in parts of up to ten tokens, not token by token,
because the device decodes ten tokens of each conversation in one step. A character that consists of
several tokens is sent when all of them are decoded.

The edge answers an invalid event with one `error` that names the invalid field; the session does
not change. In D, which has only one event, the session ends. After a frame that is not JSON text
the edge closes the connection with code 1003, and after a text frame that is not UTF-8 with 1007.

A session is in one of these phases:
"""

SUBPROTOCOL_RULE = """\
Of the subprotocols that a client offers, the edge selects the first one of {} (`realtime` is
reserved). A value that contains a key, such as `map-api-key.KEY`, `duplane.bearer.KEY` or
`openai-insecure-api-key.KEY`, is never selected, logged or recorded. Without a selected name the
session runs too, but browsers close it: a page that offers a key also offers `map.realtime`.
"""
PHASES: Mapping[Phase, str] = {
    Phase.START: "the client has sent no settings; it may still be waiting for a slot",
    Phase.OPENING: "the edge has accepted the settings; the conversation is not ready yet",
    Phase.ACTIVE: "the session accepts units or turns",
    Phase.PAUSED: "the client has paused the session",
    Phase.CLOSED: "the session has ended; the edge answers nothing",
}
DIALECTS: Mapping[str, type[Dialect]] = {
    "A": DialectA,
    "B": DialectB,
    "B, chat": DialectBChat,
    "C": DialectC,
    "D": DialectD,
}
NOTES: Mapping[str, str] = {
    "A": "The edge cuts audio of any length into units of the model; each unit has one reply.",
    "B": "The edge sends the speech of a unit as `text`, then `audio`; a `listen` with the turn's"
    " id ends the turn. If an append completes no unit, the edge answers immediately: with"
    " `listen`, or inside a turn with an empty `text`. When a client closes the session,"
    " `session.closed` repeats the client's reason, cut to 256 bytes.",
    "B, chat": "Each turn acquires a slot and may wait for it; `response.done` ends the turn.",
    "C": "The edge answers every accepted `audio_chunk` with one `result` or one `error`, in the"
    " order of the chunks. The text of an `error` is one line.",
    "D": "The client sends one event, which has no type; here it is called `request`. The edge"
    " ignores later messages. An `error` has one line of text, and the session then ends.",
}
ENDS: Mapping[CloseReason, str] = {
    CloseReason.CLIENT: "the client asks for it",
    CloseReason.TIMEOUT: "a time limit of the session, or no event for too long",
    CloseReason.CONTEXT_FULL: "the context is full",
    CloseReason.SHUTDOWN: "the edge or the worker shuts down",
    CloseReason.FAILED: "the worker is lost or cannot continue",
    CloseReason.SERVICE_UNAVAILABLE: (
        "no scheduler answers, no worker serves such sessions, or there are too many sessions"
    ),
    CloseReason.QUEUE_FULL: "the queue is full",
    CloseReason.WORKER_BUSY: (
        "no slot becomes free in time, or an operator removes the ticket from the queue"
    ),
    CloseReason.WORKER_CONNECT_FAILED: "the edge cannot reach the granted worker",
    CloseReason.MODE_REFUSED: "the mode is unknown",
    CloseReason.REQUEST_REFUSED: "the request is invalid",
    CloseReason.ANSWERED: "the request is answered",
    CloseReason.UNREADABLE: "the client sends a frame that is not JSON text",
    CloseReason.TOO_BIG: "the client sends a message above the size limit",
    CloseReason.TOO_SLOW: "the client does not read",
    CloseReason.GONE: "the connection of the client is lost",
}
CODES: Mapping[ErrorCode, str] = {
    ErrorCode.NOT_READY: "the session is not ready for this event yet",
    ErrorCode.UNKNOWN_EVENT: "the type is unknown, or allowed only once",
    ErrorCode.MISSING_FIELD: "a required field is absent",
    ErrorCode.INVALID_PAYLOAD: "a value is invalid",
    ErrorCode.SERVICE_UNAVAILABLE: "the fabric cannot serve the session now",
    ErrorCode.QUEUE_FULL: "the queue is full",
    ErrorCode.WORKER_BUSY: "no slot became free in time",
    ErrorCode.WORKER_CONNECT_FAILED: "the edge cannot reach the granted worker",
    ErrorCode.INFERENCE_ERROR: "one unit or turn failed; the next one may succeed",
}
# Close reasons that occur only in some dialects.
_ENDS_OF: Mapping[CloseReason, tuple[type[Dialect], ...]] = {
    CloseReason.CLIENT: (DialectA, DialectB, DialectBChat, DialectC),
    CloseReason.CONTEXT_FULL: (DialectA, DialectB, DialectC),
    CloseReason.REQUEST_REFUSED: (DialectD,),
    CloseReason.ANSWERED: (DialectD,),
    CloseReason.MODE_REFUSED: (DialectA,),
}
_OTHER = "anything else"
_NOW = Moment(0.0, 0)


def protocol_page() -> str:
    """Return the page."""
    lines = [HEAD, *_phases(), *_places(), *_dialects(), *_settings(), *_codes(), *_limits()]
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    ruled = [head, ["---"] * len(head), *rows]
    return [*(f"| {' | '.join(row)} |" for row in ruled), ""]


def _code(text: object) -> str:
    return f"`{text}`"


def _phases() -> list[str]:
    return _table(["phase", ""], [[phase.name, PHASES[phase]] for phase in Phase])


def _places() -> Iterator[str]:
    yield "## The URL of each dialect\n"
    names = {dialect: name for name, dialect in DIALECTS.items()}
    yield from _table(
        ["URL", "mode", "dialect", "time limit", "pictures"],
        [
            [
                _code(route.value),
                name,
                names[place.dialect] if place.dialect else "A or B",
                f"{place.mode.session_s:g} s" if place.mode.session_s < 1e9 else "none",
                "yes" if place.mode.takes_frames or place.mode.request_type == "chat" else "no",
            ]
            for (route, name), place in ENDPOINTS.items()
        ],
    )
    yield (
        "The query parameter `mode` chooses the mode of `/v1/realtime`. Every URL may have more"
        " parameters: `model=NAME` asks for workers of that model; `client_id=NAME` names the"
        " client for operators; `traceparent=TEXT` (W3C Trace Context) makes the session a part of"
        " the client's trace, like the header of that name.\n"
    )
    yield SUBPROTOCOL_RULE.format(" and ".join(f"`{name}`" for name in SUBPROTOCOLS))
    yield (
        "On `/v1/realtime` the first event whose type is in the next table selects the dialect."
        " Before this event, the edge answers every event as in dialect A.\n"
    )
    yield from _table(
        ["first event", "dialect", ""],
        [
            [_code(kind), dialect.name, "implies empty settings" if needs_init(kind) else ""]
            for kind, dialect in FIRST_EVENTS.items()
        ],
    )


def _dialects() -> Iterator[str]:
    for name, dialect in DIALECTS.items():
        yield f"## Dialect {name}\n"
        yield f"{NOTES[name]}\n"
        yield from _transitions(dialect)
        yield from _table(
            ["client sends", "answered by"],
            [
                [_code(kind), ", ".join(map(_code, answers)) or "nothing"]
                for kind, answers in dialect.replies.items()
            ],
        )
        yield from _table(
            ["edge sends", "in"],
            [
                [_code(kind), _names(phases, _phases_of(dialect))]
                for kind, phases in dialect.server_events.items()
            ],
        )
        yield from _ends(dialect)
        yield from _client_events(name)
        yield from _server_events(name, dialect)
        if name == "B":
            yield "### Dialect B: the parts of `usage` and `chunk_usage`\n"
            rows = [[_code(path), *meaning(name, "usage", path)] for path in USAGE]
            yield from _table(["field", "type", ""], rows)


def _client_events(name: str) -> Iterator[str]:
    for kind in CLIENT[name]:
        yield f"### Dialect {name}: the client sends `{kind}`\n"
        yield from _fields(name, kind, client_fields(name)[kind])
        yield from _example(client_event(name, kind))


def _server_events(name: str, dialect: type[Dialect]) -> Iterator[str]:
    for kind in dialect.server_events:
        yield f"### Dialect {name}: the edge sends `{kind}`\n"
        yield from _fields(name, kind, server_fields(name)[kind])
        yield from _example(server_events(name)[kind])


def _fields(name: str, kind: str, paths: tuple[str, str]) -> Iterator[str]:
    required, optional = (group.split() for group in paths)
    if not (required or optional):
        return
    rows = [
        [_code(path), "yes" if path in required else "no", *meaning(name[0], kind, path)]
        for path in (*required, *optional)
    ]
    yield from _table(["field", "always", "type", ""], rows)


def _example(event: dict[str, object]) -> Iterator[str]:
    yield f"```json\n{orjson.dumps(shortened(event)).decode()}\n```\n"


def _settings() -> Iterator[str]:
    yield "## Settings of the model\n"
    yield (
        "These are fields of `session.voice_config` (A), `payload.config` (B) and `config` (C). The"
        " checkpoint sets their defaults.\n"
    )
    yield from _setting_rows(DUPLEX_SETTINGS, DUPLEX_CONFIG)
    yield "These are fields of `generation` in a turn of chat (B, D):\n"
    yield from _setting_rows(CHAT_SETTINGS, CHAT_CONFIG)


def _setting_rows(
    settings: Mapping[str, Setting], bounds: Mapping[str, tuple[float, float]]
) -> list[str]:
    rows: list[list[str]] = []
    for name, setting in settings.items():
        match setting:
            case Flag():
                kind, values = "boolean", "true, false"
            case Choice():
                kind = "string"
                values = ", ".join(map(_code, setting.choices))
            case WholeNumber() | Number():
                low, high = bounds[setting.field]
                kind = "integer" if isinstance(setting, WholeNumber) else "number"
                values = f"{low:g} to {high:,.15g}"
        rows.append([_code(name), kind, values])
    return _table(["setting", "type", "values"], rows)


def _phases_of(dialect: type[Dialect]) -> list[Phase]:
    """Return the phases that a session of this dialect can be in before its end."""
    led_to = {Phase.START, Phase.ACTIVE, *dialect.transitions.values()}
    return [phase for phase in Phase if phase in led_to & ALIVE]


def _names(phases: frozenset[Phase], known: Sequence[Phase]) -> str:
    if phases.issuperset(known):
        return "any phase"
    return ", ".join(phase.name for phase in known if phase in phases)


def _transitions(dialect: type[Dialect]) -> list[str]:
    """Return a table of events and phases: each cell is the next phase, or the refusal."""
    phases = _phases_of(dialect)
    others = [] if dialect is DialectD else [_OTHER]
    return _table(
        ["client sends in", *(phase.name for phase in phases)],
        [
            [
                kind if kind == _OTHER else _code(kind),
                *(_outcome(dialect, phase, kind) for phase in phases),
            ]
            for kind in [*dialect.replies, *others]
        ],
    )


def _outcome(dialect: type[Dialect], phase: Phase, kind: str) -> str:
    after = dialect.transitions.get((phase, kind))
    if after is not None:
        return f"**{after.name}**"
    try:
        _begun(dialect, phase).decode(Fields({"type": kind}))
    except ClientError as refusal:
        return refusal.message.replace(_OTHER, "…") if dialect is DialectC else _code(refusal.code)
    raise AssertionError(f"{kind} is not legal in {phase} and was accepted")


def _begun(dialect: type[Dialect], phase: Phase) -> Dialect:
    client = dialect(Identity("sess_", "rt_"), Limits(), MODES["audio"])
    client.phase = phase
    return client


def ends_of(dialect: type[Dialect]) -> list[CloseReason]:
    """Return the ways in which a session of this dialect can end."""
    return [end for end in CLOSE_CODES if dialect in _ENDS_OF.get(end, (dialect,))]


def _ends(dialect: type[Dialect]) -> list[str]:
    return _table(
        ["how it ends", "last event", "close code"],
        [[ENDS[end], _told(dialect, end), _close_code(dialect, end)] for end in ends_of(dialect)],
    )


def _close_code(dialect: type[Dialect], end: CloseReason) -> str:
    if end is CloseReason.GONE:
        return ""
    return str(_begun(dialect, Phase.ACTIVE).close_code(Close(end)))


def _told(dialect: type[Dialect], end: CloseReason) -> str:
    if end in (CloseReason.TOO_BIG, CloseReason.TOO_SLOW, CloseReason.GONE):
        return ""
    events = _begun(dialect, Phase.ACTIVE).ended(Close(end, "…"), _NOW)
    return ", ".join(_summary(orjson.loads(event)) for event in events)


def _summary(event: dict[str, object]) -> str:
    error = event.get("error")
    if isinstance(error, dict):
        return f"`error` `{error['code']}`"
    detail = error or event.get("reason")
    return f"`{event['type']}` {_code(detail) if detail else ''}".strip()


def _codes() -> Iterator[str]:
    yield "## Error codes of A and B\n"
    closing = {
        code: CLOSE_CODES[end]
        for end, code in REFUSALS.items()
        if end is not CloseReason.MODE_REFUSED
    }
    yield from _table(
        ["code", "type", "meaning", "closes"],
        [
            [_code(code), _code(code.fault), CODES[code], str(closing.get(code, "no"))]
            for code in ErrorCode
        ],
    )


def _limits() -> Iterator[str]:
    yield "## Bounds\n\nEach bound is a flag and an environment variable of `duplane edge`; the"
    yield "table gives its default.\n"
    defaults = {bound.name: bound.default for bound in dataclasses.fields(Limits)}
    yield from _table(
        ["flag", "default", ""],
        [
            [f"`{setting.flag}`", _amount(setting.name, defaults[setting.name]), setting.help]
            for setting in settings_of(edge)
            if setting.name in defaults
        ],
    )


def _amount(name: str, value: object) -> str:
    if not isinstance(value, int | float):
        return ""
    if name.endswith("_bytes") and value < 1024:
        return f"{value} bytes"
    if name.endswith("_bytes"):
        is_whole = value % (1024 * 1024) == 0
        return f"{value // (1024 * 1024)} MiB" if is_whole else f"{value // 1024} KiB"
    is_duration = name.endswith("_s") and not name.endswith("_per_s")
    return f"{value:g} s" if is_duration else f"{value:,g}" if value < 1e6 else f"{value:,}"


if __name__ == "__main__":
    sys.stdout.write(protocol_page())
