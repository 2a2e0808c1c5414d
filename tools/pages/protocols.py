"""Writes the Markdown page of the client protocols.

Legal events, phases, answers, codes and bounds come from the classes of the dialects, and fields
from `tests/specifications`; this module adds the texts of `protocol_texts`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

import orjson

from duplane.edge.client_errors import RESUME_CODES, ClientError, ErrorCode
from duplane.edge.clock import Moment
from duplane.edge.close import CLOSE_CODES, REFUSALS, RETURNS, Close, CloseReason
from duplane.edge.dialects.a import DialectA
from duplane.edge.dialects.b import DialectB
from duplane.edge.dialects.b_chat import DialectBChat
from duplane.edge.dialects.c import DialectC
from duplane.edge.dialects.d import DialectD
from duplane.edge.dialects.dialect import ALIVE, Dialect, Phase
from duplane.edge.dialects.e import DialectE
from duplane.edge.dialects.e_chat import DialectEChat
from duplane.edge.dialects.first_event import FIRST_EVENTS, needs_init
from duplane.edge.dialects.h import DialectH
from duplane.edge.dialects.l import UNSUPPORTED, DialectL
from duplane.edge.dialects.openai_errors import (
    CONTEXT_TOO_LONG,
    ERRORS,
    RESPONSE_ACTIVE,
    RESPONSE_NOT_ACTIVE,
    SERVER_ERROR,
    SERVER_SHUTDOWN,
    SESSION_EXPIRED,
    UNKNOWN_ITEM,
)
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
from duplane.edge.transport.websocket import OPENAI_SUBPROTOCOLS, SUBPROTOCOLS
from duplane.fabric.bounds import CHAT_CONFIG, DUPLEX_CONFIG
from duplane.tools.servers import edge
from pages.decisions import decision_section
from pages.events import Event, events, is_part
from pages.moves import move_section
from pages.protocol_examples import CLIENT, client_event, server_events, shortened
from pages.protocol_texts import CODES, ENDS, HEAD, NOTES, PHASES, REALTIME_RULE, SUBPROTOCOL_RULE
from pages.resumption import resumption_section
from pages.settings import settings_of

DIALECTS: Mapping[str, type[Dialect]] = {
    "A": DialectA,
    "B": DialectB,
    "B chat": DialectBChat,
    "C": DialectC,
    "D": DialectD,
    "E": DialectE,
    "H": DialectH,
    "L": DialectL,
}
# Close reasons that occur only in some dialects.
_ENDS_OF: Mapping[CloseReason, tuple[type[Dialect], ...]] = {
    CloseReason.CLIENT: (DialectA, DialectB, DialectBChat, DialectC, DialectH, DialectL),
    CloseReason.CONTEXT_FULL: (DialectA, DialectB, DialectC, DialectE, DialectL),
    CloseReason.REQUEST_REFUSED: (DialectD,),
    CloseReason.ANSWERED: (DialectD,),
    CloseReason.MODE_REFUSED: (DialectA,),
    # See the section about clients that return.
    **dict.fromkeys(RETURNS, ()),
}
_REFUSED_BY_E = (RESPONSE_ACTIVE, RESPONSE_NOT_ACTIVE, UNKNOWN_ITEM)
_ENDS_OF_E = (SESSION_EXPIRED, CONTEXT_TOO_LONG, SERVER_SHUTDOWN, SERVER_ERROR)
_SUBPROTOCOLS = (SUBPROTOCOLS, OPENAI_SUBPROTOCOLS)
_OTHER = "anything else"
_FLAT = (DialectC, DialectH)  # their errors have no codes
_NOW = Moment(0.0, 0)


def protocol_page() -> str:
    """Return the page."""
    lines = [HEAD, *_phases(), *_places(), *_dialects(), *_settings(), *_codes(), *_limits()]
    return "\n".join([*lines, *resumption_section(), *decision_section(DIALECTS), *move_section()])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    ruled = [head, ["---"] * len(head), *rows]
    return [*(f"| {' | '.join(row)} |" for row in ruled), ""]


def _code(text: object) -> str:
    return f"`{text}`"


def _phases() -> list[str]:
    return _table(["phase", ""], [[phase.name, PHASES[phase]] for phase in Phase])


def _places() -> Iterator[str]:
    yield "## The URL of each dialect\n"
    titles: dict[type[Dialect], str] = {each: _title(name) for name, each in DIALECTS.items()}
    titles[DialectEChat] = titles[DialectE]
    yield from _table(
        ["URL", "mode", "dialect", "time limit", "pictures"],
        [
            [
                _code(route.value),
                name,
                titles[place.dialect] if place.dialect else "A or B",
                f"{place.mode.session_s:g} s" if place.mode.session_s < 1e9 else "none",
                "yes" if place.mode.takes_frames or place.mode.request_type == "chat" else "no",
            ]
            for (route, name), place in ENDPOINTS.items()
        ],
    )
    yield (
        "The query parameter `mode` chooses the mode of `/v1/realtime`. Every URL may have more"
        " parameters: `client_id=NAME` names the client for operators; `traceparent=TEXT` (W3C"
        " Trace Context) makes the session a part of the client's trace, like the header of that"
        " name; `model=NAME` asks for a model. If a worker has a model of this name, the session"
        " gets this model. Otherwise, if all workers serve one model, it gets that one. Otherwise"
        " it is refused with `service_unavailable` and the names of the models. The first answer"
        " of a session names its model (`model`), if the scheduler has said it.\n"
    )
    names = (" and ".join(f"`{name}`" for name in each) for each in _SUBPROTOCOLS)
    yield SUBPROTOCOL_RULE.format(*names)
    yield REALTIME_RULE
    yield (
        "In A and B the first event whose type is in the next table selects the dialect."
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
        yield f"## Dialect {_title(name)}\n"
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
        if dialect is DialectL:
            yield from _unsupported()
        yield from _client_events(name)
        yield from _server_events(name, dialect)
        if name == "B":
            yield "### Dialect B: the parts of `usage` and `chunk_usage`\n"
            usage = events(name, "server")["session.closed"].fields.values()
            yield from _table(
                ["field", "type", ""],
                [
                    [_code(field.path.removeprefix("usage.")), _type(field.type), field.meaning]
                    for field in usage
                    if is_part(name, field.path)
                ],
            )


def _unsupported() -> Iterator[str]:
    names = ", ".join(map(_code, sorted(UNSUPPORTED)))
    yield f"The edge answers these events with an `error`, whose code is `unsupported`: {names}.\n"


def _client_events(name: str) -> Iterator[str]:
    for kind in CLIENT[name]:
        yield f"### Dialect {_title(name)}: the client sends `{kind}`\n"
        yield from _fields(name, events(name, "client")[kind])
        yield from _example(client_event(name, kind))


def _server_events(name: str, dialect: type[Dialect]) -> Iterator[str]:
    for kind in dialect.server_events:
        yield f"### Dialect {_title(name)}: the edge sends `{kind}`\n"
        yield from _fields(name, events(name, "server")[kind])
        yield from _example(server_events(name)[kind])


def _title(name: str) -> str:
    return name.replace(" ", ", ")


def _fields(name: str, event: Event) -> list[str]:
    rows = [
        [
            _code(field.path),
            "yes" if event.always_has(field.path) else "no",
            _type(field.type),
            field.meaning,
        ]
        for field in event.fields.values()
        if not (field.path.endswith("[]") or is_part(name, field.path))
    ]
    return _table(["field", "always", "type", ""], rows) if rows else []


def _type(name: str) -> str:
    return name.replace("sound", "string")


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
        return refusal.message.replace(_OTHER, "…") if dialect in _FLAT else _code(refusal.code)
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
        if end not in (CloseReason.MODE_REFUSED, CloseReason.CREDENTIAL_ENDED)
    }
    yield from _table(
        ["code", "type", "meaning", "closes"],
        [
            [_code(code), _code(code.fault), CODES[code], str(closing.get(code, "no"))]
            for code in ErrorCode
            if code not in (ErrorCode.UNSUPPORTED, ErrorCode.CREDENTIAL_ENDED, *RESUME_CODES)
        ],
    )
    yield "## Error codes of E and L\n"
    closing[ErrorCode.CREDENTIAL_ENDED] = CLOSE_CODES[CloseReason.CREDENTIAL_ENDED]
    yield from _table(
        ["code", "type", "meaning", "closes"],
        [
            [_code(name), _code(kind), CODES[code], str(closing.get(code, "no"))]
            for code, (kind, name) in ERRORS.items()
        ],
    )
    yield (
        "E has some more codes. The session continues after"
        f" {', '.join(_code(code) for _, code in _REFUSED_BY_E)}. It ends after"
        f" {', '.join(_code(code) for _, code in _ENDS_OF_E)}.\n"
    )
    yield (
        "In L, `context_full` and `server_error` also come before `session.closed`, if the context"
        " is full or the worker is lost.\n"
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
