"""The settings of dialect H: what a client may say in `prepare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from duplane.edge.dialects.actions import Configure
from duplane.edge.dialects.resumption import refuse_resumable
from duplane.edge.payload.fields import Fields, ignored, invalid
from duplane.edge.payload.media import read_voice
from duplane.edge.payload.model_settings import read_chat_config
from duplane.edge.settings import Limits
from duplane.edge.speech.speech_detector import DetectorSettings
from duplane.fabric.v1 import session_pb2

# The defaults of the reference's code, on which clients without these settings rely. Its
# documentation has others (0.8, 800 and 180), and its page sends all settings.
DEFAULT_THRESHOLD = 0.7
DEFAULT_MIN_SPEECH_MS = 128.0
DEFAULT_MIN_SILENCE_MS = 500.0
DEFAULT_PAD_MS = 30.0
DEFAULT_MAX_NEW_TOKENS = 256
DEFAULT_LENGTH_PENALTY = 1.1
DEFAULT_TIMEOUT_S = 300.0

_MAX_SPEECH_MS = 10_000.0
_MAX_SILENCE_MS = 30_000.0
_MAX_PAD_MS = 5_000.0
_MAX_TIMEOUT_S = 86_400.0
_MAX_PARTS = 64


@dataclass(frozen=True, slots=True)
class HalfDuplexSettings(Configure):
    """The settings of a half duplex session: those of its turns, and how speech is recognised.

    `system` is the first message of each turn; it has no parts if the client gave none.
    """

    system: session_pb2.ChatMessage = field(default_factory=session_pb2.ChatMessage)
    config: session_pb2.ChatConfig = field(default_factory=session_pb2.ChatConfig)
    detector: DetectorSettings = field(default_factory=DetectorSettings)
    timeout_s: float = DEFAULT_TIMEOUT_S


def read_prepare(event: Fields, limits: Limits, kind: str) -> HalfDuplexSettings:
    """Read `prepare`. Raises ClientError."""
    refuse_resumable(event)
    parts = _read_system_content(event, limits)
    if parts is None:
        parts = _read_prompt(event, limits)
        paths = {"config.tts_voice": "ref_audio_base64"}
    else:
        paths = {"config.tts_voice": "system_content"}
    media_bytes = sum(len(part.audio) for part in parts)
    if 2 * media_bytes > limits.chat_media_bytes:
        raise invalid("system_content", "has too much sound: no room is left for the conversation")
    chat = session_pb2.ChatConfig(
        max_new_token_count=DEFAULT_MAX_NEW_TOKENS,
        length_penalty=DEFAULT_LENGTH_PENALTY,
        tts_voice=next((part.audio for part in parts if part.audio), b""),
    )
    is_spoken = True
    detector, timeout_s = DetectorSettings(), DEFAULT_TIMEOUT_S
    config = event.fields("config")
    vad, generation, tts, session = (
        config.fields(key) if config else None for key in ("vad", "generation", "tts", "session")
    )
    if generation:
        paths |= read_chat_config(generation, chat, limits.chat_token_count)
    if tts:
        is_spoken = tts.get("enabled", bool) is not False
        if voice := read_voice(tts, "ref_audio_data", limits.voice_s):
            chat.tts_voice = voice
            paths["config.tts_voice"] = tts.path("ref_audio_data")
    detector = _read_detector(vad)
    if session and (given_s := session.number("timeout_s", 1.0, _MAX_TIMEOUT_S)) is not None:
        timeout_s = given_s
    chat.generate_audio = chat.use_tts_template = is_spoken
    return HalfDuplexSettings(
        session_pb2.Open(),
        ignored=ignored(event, config, vad, generation, tts, session),
        paths=paths,
        kind=kind,
        system=session_pb2.ChatMessage(role=session_pb2.CHAT_ROLE_SYSTEM, parts=parts),
        config=chat,
        detector=detector,
        timeout_s=timeout_s,
    )


def _read_system_content(event: Fields, limits: Limits) -> Sequence[session_pb2.ChatPart] | None:
    items = event.items("system_content", _MAX_PARTS)
    if items is None:
        return None
    parts: list[session_pb2.ChatPart] = []
    text_bytes = 0
    for at, item in enumerate(items):
        path = f"{event.path('system_content')}[{at}]"
        if not isinstance(item, dict):
            raise invalid(path, "must be an object")
        part = Fields(cast("dict[str, object]", item), path)
        match part.get("type", str, required=True):
            case "text":
                text = part.text("text", limits.instructions_bytes) or ""
                text_bytes += len(text.encode())
                new = session_pb2.ChatPart(text=text)
            case "audio":
                new = session_pb2.ChatPart(audio=read_voice(part, "data", limits.voice_s))
            case _:
                raise invalid(part.path("type"), "must be one of text, audio")
        if new.text or new.audio:  # the reference's page sends its parts also if they are empty
            parts.append(new)
    if text_bytes > limits.instructions_bytes:
        fault = f"must have at most {limits.instructions_bytes} bytes of text"
        raise invalid(event.path("system_content"), fault)
    return parts


def _read_prompt(event: Fields, limits: Limits) -> Sequence[session_pb2.ChatPart]:
    parts: list[session_pb2.ChatPart] = []
    if prompt := event.text("system_prompt", limits.instructions_bytes):
        parts.append(session_pb2.ChatPart(text=prompt))
    if voice := read_voice(event, "ref_audio_base64", limits.voice_s):
        parts.append(session_pb2.ChatPart(audio=voice))
    return parts


def _read_detector(vad: Fields | None) -> DetectorSettings:
    def number(key: str, high: float, default: float) -> float:
        given = vad.number(key, 0.0, high) if vad else None
        return default if given is None else given

    pad_ms = number("speech_pad_ms", _MAX_PAD_MS, DEFAULT_PAD_MS)
    return DetectorSettings(
        threshold=number("threshold", 1.0, DEFAULT_THRESHOLD),
        min_speech_ms=number("min_speech_duration_ms", _MAX_SPEECH_MS, DEFAULT_MIN_SPEECH_MS),
        min_silence_ms=number("min_silence_duration_ms", _MAX_SILENCE_MS, DEFAULT_MIN_SILENCE_MS),
        prefix_ms=pad_ms,
        suffix_ms=pad_ms,
    )
