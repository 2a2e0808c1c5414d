"""The flags of `duplane edge`, made from the fields of its settings: names, types and defaults are
those of the fields; here is only what they are for."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from duplane.edge.settings import EdgeSettings, Limits

SETTINGS: Mapping[str, str] = {
    "pool": "The queue that sessions wait in. Default: the unnamed.",
    "reuse_port": "Share the port with other edges on this machine; the kernel deals clients out.",
    "tls_cert": "Serve wss:// and https:// with this chain (PEM). Read again when it changes, and"
    " on SIGHUP; sessions go on.",
    "tls_key": "The key of --tls-cert (PEM, no password).",
    "trusted_proxies": "Proxies whose X-Forwarded-For and X-Real-IP are believed:"
    " addresses and networks, separated by commas.",
    "admin_token": "What changes things or reads recordings by HTTP must send as"
    " Authorization: Bearer. Default: only who asks localhost from this machine. Set it where a"
    " proxy runs on this machine: its clients can look the same.",
    "default_voice": "A sound file, offered to clients at /api/default_ref_audio.",
    "presets": "A directory of MODE/*.json, offered to clients at /api/presets.",
    "ref_audio": "A directory that operators upload reference voices to, by /api/assets/ref_audio."
    " Several edges may share it. Default: none are kept.",
    "playback_delay_ms": "What web clients are told to buffer.",
}
LIMITS: Mapping[str, str] = {
    "message_bytes": "One message; above it the connection closes with 1009.",
    "instructions_bytes": "The instructions of a session.",
    "voice_s": "A reference voice.",
    "append_s": "The audio in one message.",
    "frame_count": "Pictures in one append, and in the unit that they are gathered for.",
    "picture_bytes": "One picture.",
    "picture_pixels": "One picture, once decoded.",
    "chat_message_bytes": "One message, where chats are; above it the connection closes with 1009.",
    "chat_message_count": "Messages in the history of a chat.",
    "chat_part_count": "Parts of all messages of a history.",
    "chat_text_bytes": "Text of all messages of a history.",
    "chat_audio_s": "Audio in one part of a history.",
    "chat_video_bytes": "A video file in a history.",
    "chat_media_bytes": "Pictures, videos and decoded audio of all messages of a history.",
    "chat_token_count": "Tokens that one turn of chat may ask for.",
    "ref_audio_bytes": "One upload of a reference voice.",
    "ref_audio_s": "An uploaded reference voice.",
    "ref_audio_count": "Uploaded reference voices.",
    "ref_audio_total_bytes": "Uploaded reference voices together.",
    "pending_turn_count": "Turns of a chat that wait while one runs.",
    "pause_s": "The longest pause that a client may ask for.",
    "turn_s": "Wait for a worker to go on with a turn of chat.",
    "turn_attempt_count": "Slots that are tried for a turn of chat.",
    "early_unit_count": "Units kept before a conversation is ready; the newest win.",
    "pending_unit_count": "Units kept while a worker takes none; the newest win.",
    "units_per_s": "Units of one session to its worker, with five seconds' worth at once; what is"
    " faster waits, and the newest win.",
    "read_share": "Of one core, for what one client sends; what is more is read more slowly.",
    "scheduler_s": "Wait for a scheduler to answer.",
    "queue_s": "Wait in the queue.",
    "queue_update_s": "Between two updates of an unchanged place.",
    "json_depth": "Lists and objects within one another in one message.",
    "json_value_count": "Values in one message, counted by its commas and brackets.",
    "handshake_s": "For TLS, then for the head of a request, then for its body.",
    "init_s": "Wait for a session's settings, and for the body of a long request.",
    "open_s": "Wait for a worker to begin a conversation.",
    "idle_s": "Wait for audio in a running session.",
    "session_s": "A whole session. Default: as its mode has it.",
    "answer_bytes": "Text and sound of an answer of a chat that is not streamed; above it the turn"
    " ends with an error.",
    "outbox_bytes": "Events that a client does not read; above it is closed with 1008.",
    "send_s": "Wait for a client that reads nothing of what waits for it; then it is cut.",
    "linger_s": "For a client to close by itself once its time or context is over.",
    "close_s": "Wait for a client to close.",
    "ping_s": "Silence until a client is pinged, then wait for it; then it is cut.",
    "http_s": "A long HTTP answer, until it is read to its end.",
    "connection_count": "Connections of this edge, of any kind; more are cut.",
    "client_connection_count": "Connections of one client address (IPv6: of one /64); more are cut."
    " A proxy that is trusted may have as many as it likes.",
    "session_count": "Sessions of this edge; more are refused with 1013.",
    "client_session_count": "Sessions of one client address (IPv6: of one /64); more are refused"
    " with 1013. Behind a proxy that is not trusted everybody is one client.",
    "drain_s": "For running sessions to end at shutdown.",
}


def edge_settings(values: Mapping[str, Any], **settings: Any) -> EdgeSettings:
    """Make settings of flag values and of `settings`. Raises ValueError."""
    given: dict[str, Any] = {name: values[name] for name in SETTINGS}
    given["trusted_proxies"] = tuple(name for name in values["trusted_proxies"].split(",") if name)
    limits = Limits(**{name: values[name] for name in LIMITS})
    return EdgeSettings(**given, limits=limits, **settings)


def with_edge_flags(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the flags above, in place of its `**values`."""

    @functools.wraps(verb)
    def flagged(**values: Any) -> None:
        verb(**values)

    kept = [
        parameter
        for parameter in inspect.signature(verb, eval_str=True).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    made = [*_parameters(EdgeSettings, SETTINGS), *_parameters(Limits, LIMITS, "Limits")]
    signature = inspect.Signature(
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*kept, *made)]
    )
    flagged.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue] - see inspect
    flagged.__annotations__ = {
        name: parameter.annotation for name, parameter in signature.parameters.items()
    }
    return flagged


def _parameters(
    settings: type, about: Mapping[str, str], panel: str | None = None
) -> list[inspect.Parameter]:
    hints = get_type_hints(settings)
    defaults = {field.name: field.default for field in dataclasses.fields(settings)}
    made: list[inspect.Parameter] = []
    for name, help_text in about.items():
        kind, default = hints[name], defaults[name]
        if name == "trusted_proxies":
            kind, default = str, ""
        option: Any = typer.Option(
            f"--{name.replace('_', '-')}",
            envvar=f"DUPLANE_{name.upper()}",
            help=help_text,
            rich_help_panel=panel,
            **_bounds(kind),
        )
        annotation = Annotated[kind, option]
        parameter = inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )
        made.append(parameter)
    return made


def _bounds(kind: object) -> dict[str, Any]:
    if kind in (int, float, float | None):
        return {"min": 0}
    if kind == Path | None:
        return {"exists": True}
    return {}
