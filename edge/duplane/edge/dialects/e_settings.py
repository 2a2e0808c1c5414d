"""The session object of dialect E: the settings of a client, and the values that are in effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from duplane.edge.dialects.e_items import Item
from duplane.edge.dialects.openai_settings import (
    DEFAULT_PROMPT,
    DEFAULT_VOICE,
    HISTORY,
    Voice,
    read_voice_name,
)
from duplane.edge.dialects.openai_sound import DEFAULT_FORMAT, format_fields, read_format
from duplane.edge.payload.fields import Fields, invalid
from duplane.edge.payload.sound_format import SoundFormat
from duplane.edge.settings import Limits
from duplane.fabric.v1 import session_pb2

_PCM_RATES_HERTZ = frozenset({24_000})
_EAGERNESS = ("auto", "low", "medium", "high")
_MAX_OUTPUT_TOKENS = 4096
UNLIMITED = "inf"
_MAX_MODALITIES = 8
SEMANTIC_VAD = "semantic_vad"  # the model decides about turns
SERVER_VAD = "server_vad"  # the edge also tells when the user speaks
_MAX_DETECTION_MS = 10_000
_MANUAL = "none"  # `turn_detection` is null

AUDIO, TEXT = ("audio",), ("text",)


@dataclass(frozen=True, slots=True)
class TurnDetection:
    """Who decides when the user's turn begins and ends."""

    kind: str = SEMANTIC_VAD
    eagerness: str = "auto"
    # Of SERVER_VAD:
    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    is_interrupting: bool = True  # speech of the user ends a response

    @property
    def is_manual(self) -> bool:
        """Whether the client decides: it commits its sound, and asks for each response."""
        return self.kind == _MANUAL

    def to_json(self) -> dict[str, object] | None:
        """Return the object that describes it; None if the client decides.

        A duplex model always answers, and always listens while it speaks.
        """
        if self.is_manual:
            return None
        if self.kind == SERVER_VAD:
            return {
                "type": self.kind,
                "threshold": self.threshold,
                "prefix_padding_ms": self.prefix_padding_ms,
                "silence_duration_ms": self.silence_duration_ms,
                "create_response": True,
                "interrupt_response": self.is_interrupting,
            }
        always = {"create_response": True, "interrupt_response": True}
        return {"type": self.kind, "eagerness": self.eagerness, **always}


MANUAL = TurnDetection(_MANUAL)


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """What a `session.update` changes. None stands for a field that it does not name."""

    instructions: str | None = None
    modalities: tuple[str, ...] | None = None
    input_sound: SoundFormat | None = None
    output_sound: SoundFormat | None = None
    turn_detection: TurnDetection | None = None
    voice: Voice | None = None
    max_output_tokens: int | str | None = None


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """The settings in effect."""

    model: str = ""
    instructions: str = DEFAULT_PROMPT
    modalities: tuple[str, ...] = AUDIO
    input_sound: SoundFormat = DEFAULT_FORMAT
    output_sound: SoundFormat = DEFAULT_FORMAT
    turn_detection: TurnDetection = TurnDetection()
    voice: Voice = DEFAULT_VOICE
    max_output_tokens: int | str = UNLIMITED

    def changed(
        self, change: SettingsChange, fixed: frozenset[str] = frozenset()
    ) -> SessionSettings:
        """Return these settings after a change of all fields that are not `fixed`."""
        named = {
            field.name: value
            for field in dataclasses.fields(change)
            if (value := getattr(change, field.name)) is not None and field.name not in fixed
        }
        return dataclasses.replace(self, **named)

    def to_json(self) -> dict[str, object]:
        """Return the session object, without the fields that do not depend on settings.

        What the model cannot do is shown as absent.
        """
        return {
            "model": self.model,
            "output_modalities": self.modalities,
            "instructions": self.instructions,
            "audio": {
                "input": {
                    "format": sound_fields(self.input_sound),
                    "transcription": None,
                    "noise_reduction": None,
                    "turn_detection": self.turn_detection.to_json(),
                },
                "output": {
                    "format": sound_fields(self.output_sound),
                    "voice": self.voice.to_json(),
                    "speed": 1.0,
                },
            },
            "tools": [],
            "tool_choice": "auto",
            "max_output_tokens": self.max_output_tokens,
            "tracing": None,
            "truncation": "auto",
            "prompt": None,
        }

    def to_open(self, items: Sequence[Item], limits: Limits) -> session_pb2.Open:
        """Return the settings of a conversation with these items as text in its prompt."""
        config = session_pb2.DuplexConfig(context_window=session_pb2.CONTEXT_WINDOW_BASIC)
        if self.modalities == TEXT:
            config.generate_audio = False
        prompt = with_history(self.instructions, items, limits.instructions_bytes)
        return session_pb2.Open(system_prompt=prompt, config=config)


# The settings that do not change any more once the client has sent sound, and once the model has
# its prompt.
FIXED_BY_SOUND = frozenset({"input_sound", "output_sound"})
FIXED_BY_OPENING = FIXED_BY_SOUND | {"instructions", "modalities", "voice"}


def sound_fields(sound: SoundFormat) -> dict[str, object]:
    """Return the object that describes a format. In this protocol only PCM has a rate."""
    fields = format_fields(sound)
    return fields if fields["type"] == "audio/pcm" else {"type": fields["type"]}


def read_change(session: Fields, limits: Limits) -> SettingsChange:
    """Return what the object `session` of a `session.update` changes. Raises ClientError.

    A setting without effect is no error: clients end their session after an error.
    """
    if session.get("type", str) not in (None, "realtime"):
        raise invalid(session.path("type"), "must be realtime")
    audio = session.fields("audio")
    given = audio.fields("input") if audio else None
    output = audio.fields("output") if audio else None
    return SettingsChange(
        instructions=session.text("instructions", limits.instructions_bytes),
        modalities=read_modalities(session),
        input_sound=_read_sound(given),
        output_sound=_read_sound(output),
        turn_detection=_read_turn_detection(given),
        voice=read_voice_name(output, limits) if output and output.first("voice") else None,
        max_output_tokens=read_max_output_tokens(session),
    )


def read_modalities(fields: Fields) -> tuple[str, ...] | None:
    """Return what a response has: sound with its text, or text only."""
    names = fields.items("output_modalities", _MAX_MODALITIES)
    if names is None:
        return None
    if not names or any(name not in ("audio", "text") for name in names):
        raise invalid(fields.path("output_modalities"), 'must be ["audio"] or ["text"]')
    return AUDIO if "audio" in names else TEXT


def read_max_output_tokens(fields: Fields) -> int | str | None:
    """Return the bound of a response; `inf` if there is none."""
    if fields.get("max_output_tokens", object) == UNLIMITED:
        return UNLIMITED
    return fields.integer("max_output_tokens", 1, _MAX_OUTPUT_TOKENS)


def _read_sound(fields: Fields | None) -> SoundFormat | None:
    form = fields.fields("format") if fields else None
    return read_format(form, _PCM_RATES_HERTZ) if form else None


def _read_turn_detection(fields: Fields | None) -> TurnDetection | None:
    """Return the detection of turns that a client asks for; None if it names none.

    Unless the client decides about turns itself, the model does.
    """
    if fields is None or "turn_detection" not in fields.whole:
        return None
    detection = fields.fields("turn_detection")
    if detection is None:
        return MANUAL
    kind = detection.required_text("type", 64)
    if kind == SERVER_VAD:
        return _read_server_vad(detection)
    if kind != SEMANTIC_VAD:
        raise invalid(detection.path("type"), "must be server_vad or semantic_vad")
    eagerness = detection.get("eagerness", str) or "auto"
    if eagerness not in _EAGERNESS:
        raise invalid(detection.path("eagerness"), f"must be one of {', '.join(_EAGERNESS)}")
    return TurnDetection(eagerness=eagerness)


def _read_server_vad(detection: Fields) -> TurnDetection:
    usual = TurnDetection()
    threshold = detection.number("threshold", 0, 1)
    prefix_ms = detection.integer("prefix_padding_ms", 0, _MAX_DETECTION_MS)
    silence_ms = detection.integer("silence_duration_ms", 0, _MAX_DETECTION_MS)
    return TurnDetection(
        SERVER_VAD,
        threshold=usual.threshold if threshold is None else threshold,
        prefix_padding_ms=usual.prefix_padding_ms if prefix_ms is None else prefix_ms,
        silence_duration_ms=usual.silence_duration_ms if silence_ms is None else silence_ms,
        is_interrupting=detection.get("interrupt_response", bool) is not False,
    )


def with_history(instructions: str, items: Sequence[Item], max_bytes: int) -> str:
    """Return a prompt with the texts of messages. The oldest are left out above `max_bytes`."""
    prompt = instructions if instructions.strip() else DEFAULT_PROMPT
    lines: list[str] = []
    left = max_bytes - len(f"{prompt}\n\n{HISTORY}".encode())
    for item in reversed(items):
        line = f"{item.role}: {item.text}"
        left -= len(line.encode()) + 1
        if left < 0:
            break
        if item.role and item.text:
            lines.append(line)
    return "\n".join([prompt, "", HISTORY, *reversed(lines)]) if lines else prompt
