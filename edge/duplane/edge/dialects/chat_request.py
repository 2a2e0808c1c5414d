"""The request of one turn of chat: the same in every dialect except for its defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from duplane.edge.dialects.actions import Turn
from duplane.edge.payload.fields import Fields, ignored, invalid, missing
from duplane.edge.payload.media import WAV_IN_BASE64, decode_audio, decode_file, read_voice
from duplane.edge.payload.model_settings import read_chat_config
from duplane.edge.payload.pictures import decode_picture, read_slice_count
from duplane.edge.payload.rates import INPUT_RATE_HERTZ
from duplane.edge.settings import Limits
from duplane.fabric.audio import SAMPLE_BYTES, resample_pcm
from duplane.fabric.bounds import MAX_STACK_FRAME_COUNT
from duplane.fabric.v1 import session_pb2

ROLES: Mapping[str, session_pb2.ChatRole] = {
    "system": session_pb2.CHAT_ROLE_SYSTEM,
    "user": session_pb2.CHAT_ROLE_USER,
    "assistant": session_pb2.CHAT_ROLE_ASSISTANT,
}
_TTS_MODES = ("default", "audio_assistant", "omni", "audio_roleplay", "voice_cloning")
_LOWEST_RATE_HERTZ, _HIGHEST_RATE_HERTZ = 8_000, 192_000


@dataclass(frozen=True, slots=True)
class ChatDefaults:
    """The defaults of absent fields in one dialect; None means the checkpoint's default."""

    max_new_token_count: int
    length_penalty: float
    generates_audio: bool
    temperature: float | None = None
    top_p: float | None = None
    use_image_id: bool | None = None


class MediaBudget:
    """The bytes of media that a request may still contain, after the messages read so far."""

    def __init__(self, limit_bytes: int) -> None:
        self._left_bytes = limit_bytes
        self.fault = f"brings the media of all messages to more than {limit_bytes} bytes"

    @property
    def sound_s(self) -> float:
        """The duration of the longest sound that the budget allows."""
        # Every sound of a history is kept at the rate of the dialects.
        return self._left_bytes / (SAMPLE_BYTES * INPUT_RATE_HERTZ)

    def spend(self, media: bytes, path: str) -> bytes:
        """Subtract the size of `media`; return `media`. Raises ClientError if it is too large."""
        if len(media) > self._left_bytes:
            raise invalid(path, self.fault)
        self._left_bytes -= len(media)
        return media


PartReader = Callable[[Fields, Limits, MediaBudget], session_pb2.ChatPart]


def read_turn(fields: Fields, defaults: ChatDefaults, limits: Limits, kind: str) -> Turn:
    """Read `messages` and the settings of the turn. Raises ClientError."""
    request = session_pb2.ChatRequest()
    read_messages(fields, request, limits, ROLES, _read_part)
    config = request.config
    generation, tts, image = (fields.fields(key) for key in ("generation", "tts", "image"))
    _set_defaults(config, defaults)
    paths: dict[str, str] = {}
    if generation:
        paths |= read_chat_config(generation, config, limits.chat_token_count)
    if tts:
        _check_tts(tts, fields, limits)
        paths["config.tts_voice"] = tts.path("ref_audio_data")
        if (generates_audio := tts.get("enabled", bool)) is not None:
            config.generate_audio = generates_audio
        config.tts_voice = read_voice(tts, "ref_audio_data", limits.voice_s)
    if (uses_template := fields.get("use_tts_template", bool)) is not None:
        config.use_tts_template = uses_template
    if image:
        if (slices := read_slice_count(image)) is not None:
            config.max_slice_count = slices
        if (is_numbered := image.get("use_image_id", bool)) is not None:
            config.use_image_id = is_numbered
    config.is_omni = fields.get("omni_mode", bool) or False
    config.is_thinking = fields.get("enable_thinking", bool) or False
    is_streaming = fields.get("streaming", bool) is not False
    input_id = fields.text("input_id", limits.text_bytes)
    unused = ignored(fields, generation, tts, image)
    return Turn(request, is_streaming, input_id, unused, paths, kind)


def _check_tts(tts: Fields, fields: Fields, limits: Limits) -> None:
    """Check the speech settings that have no effect. Raises ClientError."""
    # A second reader is used, so that the fields still count as unused in `tts`.
    unread = fields.required_fields("tts")
    mode = unread.get("mode", str)
    if mode is not None and mode not in _TTS_MODES:
        raise invalid(tts.path("mode"), f"must be one of {', '.join(_TTS_MODES)}")
    if mode == _TTS_MODES[0]:
        tts.get("mode", str)  # count `mode` as used: this value is the default anyway
    unread.text("language", limits.text_bytes)


def _set_defaults(config: session_pb2.ChatConfig, defaults: ChatDefaults) -> None:
    config.max_new_token_count = defaults.max_new_token_count
    config.length_penalty = defaults.length_penalty
    config.generate_audio = defaults.generates_audio
    if defaults.temperature is not None:
        config.temperature = defaults.temperature
    if defaults.top_p is not None:
        config.top_p = defaults.top_p
    if defaults.use_image_id is not None:
        config.use_image_id = defaults.use_image_id


def read_messages(
    fields: Fields,
    request: session_pb2.ChatRequest,
    limits: Limits,
    roles: Mapping[str, session_pb2.ChatRole],
    read_part: PartReader,
) -> None:
    """Copy the list `messages` into `request`, within the bounds of a chat. Raises ClientError.

    `roles` are the names of roles in the client's dialect, and `read_part` reads a part of a
    message that is not plain text.
    """
    path = fields.path("messages")
    messages = fields.items("messages", limits.chat_message_count)
    if messages is None:
        raise missing(path)
    if not messages:
        raise invalid(path, "must not be empty")
    part_count = text_bytes = 0
    budget = MediaBudget(limits.chat_media_bytes)
    for index, item in enumerate(messages):
        message = _object(item, f"{path}[{index}]")
        role = message.get("role", str, required=True)
        if role not in roles:
            raise invalid(message.path("role"), f"must be one of {', '.join(roles)}")
        parts = _read_content(message, limits, budget, read_part)
        part_count += len(parts)
        if part_count > limits.chat_part_count:
            raise invalid(path, f"must have at most {limits.chat_part_count} parts")
        text_bytes += sum(len(part.text.encode()) for part in parts)
        if text_bytes > limits.chat_text_bytes:
            fault = f"brings the text of all messages to more than {limits.chat_text_bytes} bytes"
            raise invalid(message.path("content"), fault)
        request.messages.add(role=roles[role], parts=parts)


def _read_content(
    message: Fields, limits: Limits, budget: MediaBudget, read_part: PartReader
) -> list[session_pb2.ChatPart]:
    content = message.get("content", object, required=True)
    if isinstance(content, str):
        text = message.required_text("content", limits.chat_text_bytes)
        return [session_pb2.ChatPart(text=text)]
    if not isinstance(content, list):
        raise invalid(message.path("content"), "must be text or a list of parts")
    items = message.items("content", limits.chat_part_count) or []
    if not items:
        raise invalid(message.path("content"), "must not be empty")
    path = message.path("content")
    return [
        read_part(_object(item, f"{path}[{at}]"), limits, budget) for at, item in enumerate(items)
    ]


def _read_part(part: Fields, limits: Limits, budget: MediaBudget) -> session_pb2.ChatPart:
    match part.get("type", str, required=True):
        case "text":
            text = part.required_text("text", limits.chat_text_bytes)
            return session_pb2.ChatPart(text=text)
        case "image":
            encoded = part.get("data", str, required=True)
            picture = decode_picture(encoded, part.path("data"), limits)
            return session_pb2.ChatPart(image=budget.spend(picture, part.path("data")))
        case "audio":
            sound = read_sound(part, limits, budget)
            return session_pb2.ChatPart(audio=budget.spend(sound, part.path("data")))
        case "video":
            frames = part.integer("stack_frames", 1, MAX_STACK_FRAME_COUNT)
            video = budget.spend(_read_video(part, limits), part.path("data"))
            return session_pb2.ChatPart(video=video, video_stack_frame_count=frames or 1)
        case _:
            raise invalid(part.path("type"), "must be one of text, image, audio, video")


def read_sound(part: Fields, limits: Limits, budget: MediaBudget) -> bytes:
    """Return a sound as PCM at the rate of the dialects.

    A WAV file states its sample rate; for raw samples the field `sample_rate` does, or else they
    have the rate of the dialects. A sound that exceeds its bound or the budget is refused before it
    is decoded. Raises ClientError.
    """
    rate = part.integer("sample_rate", _LOWEST_RATE_HERTZ, _HIGHEST_RATE_HERTZ)
    encoded, path = part.get("data", str, required=True), part.path("data")
    is_file = encoded.startswith(WAV_IN_BASE64)
    rate_hertz = INPUT_RATE_HERTZ if rate is None or is_file else rate
    is_budget_less = budget.sound_s < limits.chat_audio_s
    max_s = budget.sound_s if is_budget_less else limits.chat_audio_s
    fault = budget.fault if is_budget_less else ""
    decoded = decode_audio(encoded, path, max_s, rate_hertz=rate_hertz, fault=fault)
    sound = resample_pcm(decoded, rate_hertz, INPUT_RATE_HERTZ)
    if not sound:
        count = len(decoded) // SAMPLE_BYTES
        raise invalid(path, f"is too short: {count} samples at {rate_hertz} Hz")
    return sound


def _read_video(part: Fields, limits: Limits) -> bytes:
    """Return a video file without decoding it. The worker decodes it."""
    encoded, path = part.get("data", str, required=True), part.path("data")
    video = decode_file(encoded, path, limits.chat_video_bytes)
    if not video:
        raise invalid(path, "is empty")
    return video


def _object(item: object, path: str) -> Fields:
    if not isinstance(item, dict):
        raise invalid(path, "must be an object")
    return Fields(cast("dict[str, object]", item), path)
