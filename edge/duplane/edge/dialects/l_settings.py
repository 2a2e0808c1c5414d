"""The `session` of L's `session.start`: its settings, and what the client is told of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from duplane.edge.dialects.actions import Configure
from duplane.edge.dialects.openai_settings import (
    DEFAULT_PROMPT,
    DEFAULT_VOICE,
    HISTORY,
    Voice,
    read_voice_name,
)
from duplane.edge.dialects.openai_sound import DEFAULT_FORMAT, format_fields, read_format
from duplane.edge.payload.fields import Fields, invalid, missing
from duplane.edge.payload.sound_format import SoundFormat
from duplane.edge.settings import Limits
from duplane.fabric.v1 import session_pb2

_PCM_RATES_HERTZ = frozenset({16_000, 24_000})
_ROLES = ("developer", "user", "assistant")
_MAX_ITEMS = 128  # OpenAI's own bound


@dataclass(frozen=True, slots=True)
class Configuration(Configure):
    """The settings of a session of L.

    `sound` is the format of both directions, and `resource` the part of the session's description
    that the client has chosen.
    """

    sound: SoundFormat = DEFAULT_FORMAT
    resource: tuple[tuple[str, object], ...] = ()


def read_configuration(
    session: Fields, limits: Limits, kind: str, input_id: str | None
) -> Configuration:
    """Return the settings in the object `session` of the event `kind`. Raises ClientError.

    Fields for abilities that the model lacks are ignored: the description of the session shows
    them as absent.
    """
    model = session.required_text("model", limits.text_bytes)
    instructions = session.text("instructions", limits.instructions_bytes)
    audio = session.fields("audio") or Fields({}, session.path("audio"))
    form = audio.fields("format")
    sound = DEFAULT_FORMAT if form is None else read_format(form, _PCM_RATES_HERTZ)
    voice = _read_voice(audio, limits)
    resource: dict[str, object] = {
        "model": model,
        "audio": {"format": format_fields(sound), "output": {"voice": voice.to_json()}},
    }
    if instructions is not None:
        resource["instructions"] = instructions
    settings = session_pb2.Open(
        system_prompt=_prompt(session, instructions or "", limits),
        config=session_pb2.DuplexConfig(context_window=session_pb2.CONTEXT_WINDOW_BASIC),
    )
    return Configuration(
        settings,
        paths={"system_prompt": session.path("instructions")},
        kind=kind,
        input_id=input_id,
        sound=sound,
        resource=tuple(resource.items()),
    )


def _read_voice(audio: Fields, limits: Limits) -> Voice:
    output = audio.fields("output")
    if output is None or output.first("voice") is None:
        return DEFAULT_VOICE
    return read_voice_name(output, limits)


def _prompt(session: Fields, instructions: str, limits: Limits) -> str:
    """Return the system prompt: the instructions, and the messages before the session as text."""
    parts = [instructions if instructions.strip() else DEFAULT_PROMPT]
    if messages := _read_messages(session):
        parts += ["", HISTORY, *messages]
    prompt = "\n".join(parts)
    if len(prompt.encode()) > limits.instructions_bytes:
        fault = f"must be at most {limits.instructions_bytes} bytes, together with instructions"
        raise invalid(session.path("input"), fault)
    return prompt


def _read_messages(session: Fields) -> list[str]:
    lines: list[str] = []
    for number, item in enumerate(session.items("input", _MAX_ITEMS) or ()):
        message = _object(item, f"{session.path('input')}[{number}]")
        role = message.required_text("role", 64)
        if role not in _ROLES:
            raise invalid(message.path("role"), f"must be one of {', '.join(_ROLES)}")
        parts = message.items("content", _MAX_ITEMS)
        if parts is None:
            raise missing(message.path("content"))
        texts = [
            _object(part, f"{message.path('content')}[{at}]").get("text", str, required=True)
            for at, part in enumerate(parts)
        ]
        lines.append(f"{role}: {''.join(texts)}")
    return lines


def _object(value: object, path: str) -> Fields:
    if not isinstance(value, dict):
        raise invalid(path, "must be an object")
    return Fields(cast("dict[str, object]", value), path)
