"""One turn of chat as clients ask for it, equal in every dialect but for its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from duplane.edge.dialects.dialect import Turn
from duplane.edge.dialects.fields import Fields, ignored, invalid, missing
from duplane.edge.dialects.frames import decode_picture, read_slice_count
from duplane.edge.dialects.media import WAV_IN_BASE64, decode_audio, decode_file, read_voice
from duplane.edge.settings import Limits
from duplane.fabric.audio import (
    INPUT_RATE_HERTZ,
    pcm_from_samples,
    resample,
    samples_from_pcm,
)
from duplane.fabric.bounds import MAX_STACK_FRAME_COUNT
from duplane.fabric.v1 import session_pb2

_ROLES: Mapping[str, session_pb2.ChatRole] = {
    "system": session_pb2.CHAT_ROLE_SYSTEM,
    "user": session_pb2.CHAT_ROLE_USER,
    "assistant": session_pb2.CHAT_ROLE_ASSISTANT,
}
_LOWEST_RATE_HERTZ, _HIGHEST_RATE_HERTZ = 8_000, 192_000


@dataclass(frozen=True, slots=True)
class ChatDefaults:
    """What holds where a client says nothing; None leaves it to the checkpoint."""

    max_new_token_count: int
    length_penalty: float
    is_spoken: bool
    temperature: float | None = None
    top_p: float | None = None
    use_image_id: bool | None = None


class MediaRoom:
    """What media one history may still hold."""

    def __init__(self, limit_bytes: int) -> None:
        self._left_bytes = limit_bytes
        self.fault = f"brings the media of all messages to more than {limit_bytes} bytes"

    @property
    def sound_s(self) -> float:
        """How long a sound may be that still fits."""
        return self._left_bytes / (4 * INPUT_RATE_HERTZ)

    def take(self, media: bytes, path: str) -> bytes:
        """Count `media` and return it. Raises ClientError when there is no room for it."""
        if len(media) > self._left_bytes:
            raise invalid(path, self.fault)
        self._left_bytes -= len(media)
        return media


def read_turn(fields: Fields, defaults: ChatDefaults, limits: Limits) -> Turn:
    """Read `messages` and all that goes with them. Raises ClientError."""
    request = session_pb2.ChatRequest()
    _read_messages(fields, request, limits)
    config = request.config
    generation, tts, image = (fields.fields(key) for key in ("generation", "tts", "image"))
    _read_generation(generation, config, defaults, limits)
    is_spoken = tts.flag("enabled") if tts else None
    config.generate_audio = defaults.is_spoken if is_spoken is None else is_spoken
    if tts:
        config.tts_voice = read_voice(tts, "ref_audio_data", limits.voice_s)
    if (is_worded := fields.flag("use_tts_template")) is not None:
        config.use_tts_template = is_worded
    slices = read_slice_count(image) if image else None
    if slices is not None:
        config.max_slice_count = slices
    is_numbered = image.flag("use_image_id") if image else None
    if is_numbered is None:
        is_numbered = defaults.use_image_id
    if is_numbered is not None:
        config.use_image_id = is_numbered
    config.is_omni = fields.flag("omni_mode") or False
    config.is_thinking = fields.flag("enable_thinking") or False
    is_streaming = fields.flag("streaming") is not False
    input_id = fields.text("input_id", max_bytes=limits.text_bytes)
    return Turn(request, is_streaming, input_id, ignored(fields, generation, tts, image))


def _read_generation(
    given: Fields | None,
    config: session_pb2.ChatConfig,
    defaults: ChatDefaults,
    limits: Limits,
) -> None:
    config.max_new_token_count = defaults.max_new_token_count
    config.length_penalty = defaults.length_penalty
    if defaults.temperature is not None:
        config.temperature = defaults.temperature
    if defaults.top_p is not None:
        config.top_p = defaults.top_p
    if given is None:
        return
    if (count := given.integer("max_new_tokens", 1, limits.chat_token_count)) is not None:
        config.max_new_token_count = count
    if (top_k := given.integer("top_k", 0, 1_000_000)) is not None:
        config.top_k = top_k
    for name, low, high in (
        ("temperature", 0.0, 2.0),
        ("top_p", 0.0, 1.0),
        ("length_penalty", 0.1, 5.0),
        ("repetition_penalty", 0.1, 10.0),
    ):
        if (value := given.number(name, low, high)) is not None:
            setattr(config, name, value)
    if given.flag("do_sample") is False:
        config.decode_mode = session_pb2.DECODE_MODE_GREEDY


def _read_messages(fields: Fields, request: session_pb2.ChatRequest, limits: Limits) -> None:
    path = fields.path("messages")
    messages = fields.items("messages", limits.chat_message_count)
    if messages is None:
        raise missing(path)
    if not messages:
        raise invalid(path, "must not be empty")
    part_count = text_bytes = 0
    room = MediaRoom(limits.chat_media_bytes)
    for index, item in enumerate(messages):
        message = _object(item, f"{path}[{index}]")
        role = message.required_text("role")
        if role not in _ROLES:
            raise invalid(message.path("role"), f"must be one of {', '.join(_ROLES)}")
        parts = _read_content(message, limits, room)
        part_count += len(parts)
        if part_count > limits.chat_part_count:
            raise invalid(path, f"must have at most {limits.chat_part_count} parts")
        text_bytes += sum(len(part.text.encode()) for part in parts)
        if text_bytes > limits.chat_text_bytes:
            fault = f"brings the text of all messages to more than {limits.chat_text_bytes} bytes"
            raise invalid(message.path("content"), fault)
        request.messages.add(role=_ROLES[role], parts=parts)


def _read_content(message: Fields, limits: Limits, room: MediaRoom) -> list[session_pb2.ChatPart]:
    content = message.get("content")
    if content is None:
        raise missing(message.path("content"))
    if isinstance(content, str):
        text = message.required_text("content", max_bytes=limits.chat_text_bytes)
        return [session_pb2.ChatPart(text=text)]
    if not isinstance(content, list):
        raise invalid(message.path("content"), "must be text or a list of parts")
    items = message.items("content", limits.chat_part_count) or []
    if not items:
        raise invalid(message.path("content"), "must not be empty")
    path = message.path("content")
    return [
        _read_part(_object(item, f"{path}[{at}]"), limits, room) for at, item in enumerate(items)
    ]


def _read_part(part: Fields, limits: Limits, room: MediaRoom) -> session_pb2.ChatPart:
    match part.required_text("type"):
        case "text":
            text = part.required_text("text", max_bytes=limits.chat_text_bytes)
            return session_pb2.ChatPart(text=text)
        case "image":
            picture = decode_picture(part.required_text("data"), part.path("data"), limits)
            return session_pb2.ChatPart(image=room.take(picture, part.path("data")))
        case "audio":
            sound = read_sound(part, limits, room)
            return session_pb2.ChatPart(audio=room.take(sound, part.path("data")))
        case "video":
            frames = part.integer("stack_frames", 1, MAX_STACK_FRAME_COUNT)
            video = room.take(_read_video(part, limits), part.path("data"))
            return session_pb2.ChatPart(video=video, video_stack_frame_count=frames or 1)
        case _:
            raise invalid(part.path("type"), "must be one of text, image, audio, video")


def read_sound(part: Fields, limits: Limits, room: MediaRoom) -> bytes:
    """Return PCM at the rate of the fabric. A WAV file knows its own rate. Raises ClientError.

    Longer than is allowed, or than there is room for, it is refused before it is decoded.
    """
    rate = part.integer("sample_rate", _LOWEST_RATE_HERTZ, _HIGHEST_RATE_HERTZ)
    encoded, path = part.required_text("data"), part.path("data")
    is_file = encoded.startswith(WAV_IN_BASE64)
    given_rate = INPUT_RATE_HERTZ if rate is None or is_file else rate
    is_crowded = room.sound_s < limits.chat_audio_s
    max_s = room.sound_s if is_crowded else limits.chat_audio_s
    too_long = room.fault if is_crowded else ""
    decoded = decode_audio(encoded, path, max_s * given_rate / INPUT_RATE_HERTZ, too_long)
    if given_rate == INPUT_RATE_HERTZ:
        return decoded
    resampled = resample(samples_from_pcm(decoded), given_rate, INPUT_RATE_HERTZ)
    if not resampled.size:
        raise invalid(path, "is too short")
    return pcm_from_samples(resampled)


def _read_video(part: Fields, limits: Limits) -> bytes:
    """Return a video file, unread: which ones can be is the worker's affair."""
    encoded, path = part.required_text("data"), part.path("data")
    video = decode_file(encoded, path, limits.chat_video_bytes)
    if not video:
        raise invalid(path, "is empty")
    return video


def _object(item: object, path: str) -> Fields:
    if not isinstance(item, dict):
        raise invalid(path, "must be an object")
    return Fields(cast("dict[str, object]", item), path)
