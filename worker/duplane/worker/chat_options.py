"""What a client asks for in a chat, checked and made into the model's own terms.

Decides which values are refused, naming the field at fault. Pure.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from duplane.fabric.audio import AudioError, Samples, is_wav, samples_from_pcm
from duplane.fabric.bounds import CHAT_CONFIG, MAX_STACK_FRAME_COUNT
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import session_pb2
from duplane.worker.model.chat_types import (
    ChatAudio,
    ChatImage,
    ChatMessage,
    ChatOptions,
    ChatPart,
    ChatRequest,
    ChatRole,
    ChatVideo,
)
from duplane.worker.model.types import OptionError
from duplane.worker.options import DECODE_MODES, invalid, numbers, voice
from duplane.worker.settings import SessionLimits

_MODEL_NAMES = {"max_new_token_count": "max_new_tokens", "max_slice_count": "max_slices"}
_PATHS = {
    **{_MODEL_NAMES.get(name, name): f"config.{name}" for name in CHAT_CONFIG},
    "generate_audio": "config.generate_audio",
    "tts_voice": "config.tts_voice",
}
_ROLES = {
    session_pb2.CHAT_ROLE_SYSTEM: ChatRole.SYSTEM,
    session_pb2.CHAT_ROLE_USER: ChatRole.USER,
    session_pb2.CHAT_ROLE_ASSISTANT: ChatRole.ASSISTANT,
}


def chat_request(wish: session_pb2.ChatRequest, limits: SessionLimits) -> ChatRequest:
    """Return what `wish` asks for; what it leaves out is left to the model.

    Videos are left empty. Raises FabricError INVALID_FIELD with the path of the field in
    `ChatRequest`.
    """
    if len(wish.messages) > limits.max_chat_messages:
        fault = f"are {len(wish.messages)}, more than {limits.max_chat_messages}"
        raise invalid("messages", fault)
    _check_sizes(wish, limits)
    messages = tuple(
        _message(message, f"messages[{index}]") for index, message in enumerate(wish.messages)
    )
    chosen = _config(wish.config, limits)
    if wish.HasField("seed"):
        chosen["seed"] = wish.seed
    try:
        return ChatRequest(messages, ChatOptions(**chosen))
    except OptionError as error:
        raise invalid_chat(error) from None


def invalid_chat(error: OptionError) -> FabricError:
    """Translate the model's refusal of a chat; paths of messages are the same in both."""
    path = _PATHS.get(error.field, error.field)
    return FabricError(Reason.INVALID_FIELD, str(error), field=path)


def _check_sizes(wish: session_pb2.ChatRequest, limits: SessionLimits) -> None:
    """Bound what all messages hold together."""
    part_count = clip_count = text_bytes = media_bytes = 0
    for index, message in enumerate(wish.messages):
        part_count += len(message.parts)
        for number, part in enumerate(message.parts):
            clip_count += part.WhichOneof("content") == "audio"
            text_bytes += len(part.text.encode())
            media_bytes += len(part.image) + len(part.audio) + len(part.video)
            path = f"messages[{index}].parts[{number}]"
            if text_bytes > limits.max_chat_text_bytes:
                fault = f"brings the text to more than {limits.max_chat_text_bytes} bytes"
                raise invalid(f"{path}.text", fault)
            if media_bytes > limits.max_chat_media_bytes:
                fault = f"brings the media to more than {limits.max_chat_media_bytes} bytes"
                raise invalid(f"{path}.{part.WhichOneof('content')}", fault)
            if clip_count > limits.max_chat_clips:
                fault = f"brings the sounds to more than {limits.max_chat_clips}"
                raise invalid(f"{path}.audio", fault)
        if part_count > limits.max_chat_parts:
            fault = f"bring the parts of all messages to more than {limits.max_chat_parts}"
            raise invalid(f"messages[{index}].parts", fault)


def _message(message: session_pb2.ChatMessage, path: str) -> ChatMessage:
    role = _ROLES.get(message.role)
    if role is None:
        raise invalid(f"{path}.role", f"is {message.role}, not a known role")
    parts = tuple(
        _part(part, f"{path}.parts[{number}]") for number, part in enumerate(message.parts)
    )
    return ChatMessage(role, parts)


def _part(part: session_pb2.ChatPart, path: str) -> ChatPart:
    match part.WhichOneof("content"):
        case "text":
            return part.text
        case "image":
            return ChatImage(part.image)
        case "audio":
            return ChatAudio(_samples(part.audio, f"{path}.audio"))
        case "video":
            count = part.video_stack_frame_count
            if not 0 <= count <= MAX_STACK_FRAME_COUNT:
                fault = f"is {count}, not between 0 and {MAX_STACK_FRAME_COUNT}"
                raise invalid(f"{path}.video_stack_frame_count", fault)
            return ChatVideo(())  # see `videos.py`
        case _:
            raise invalid(path, "is empty")


def _samples(pcm: bytes, path: str) -> Samples:
    """Return samples that may be written to, as torch insists."""
    if is_wav(pcm):
        raise invalid(path, "is a WAV file, must be bare float32 samples")
    try:
        return np.array(samples_from_pcm(pcm))
    except AudioError as error:
        raise invalid(path, str(error)) from None


def _config(config: session_pb2.ChatConfig, limits: SessionLimits) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "is_thinking": config.is_thinking,
        "generate_audio": config.generate_audio,
        "is_omni": config.is_omni,
        "max_slices": 1,
        **numbers(config, CHAT_CONFIG, _MODEL_NAMES),
    }
    if config.decode_mode != session_pb2.DECODE_MODE_UNSPECIFIED:
        mode = DECODE_MODES.get(config.decode_mode)
        if mode is None:
            raise invalid("config.decode_mode", f"is {config.decode_mode}, not a known mode")
        chosen["decode_mode"] = mode
    if config.HasField("use_tts_template"):
        chosen["use_tts_template"] = config.use_tts_template or config.generate_audio
    if config.HasField("use_image_id"):
        chosen["use_image_id"] = config.use_image_id
    if config.tts_voice:
        chosen["tts_voice"] = voice("config.tts_voice", config.tts_voice, limits.max_voice_s)
    return chosen
