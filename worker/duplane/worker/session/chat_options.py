"""Checks a `ChatRequest` and translates it to the model's types. Pure.

A refusal names the invalid field.
"""

from __future__ import annotations

from typing import Any

from duplane.fabric.bounds import CHAT_CONFIG, MAX_STACK_FRAME_COUNT
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import session_pb2
from duplane.worker.models.chat import (
    ChatAudio,
    ChatImage,
    ChatMessage,
    ChatOptions,
    ChatPart,
    ChatRequest,
    ChatRole,
    ChatVideo,
)
from duplane.worker.models.interface import PreparedChat
from duplane.worker.models.types import OptionError
from duplane.worker.session.fields import (
    DECODE_MODES,
    invalid,
    read_numbers,
    read_samples,
    read_voice,
)
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


def chat_request(
    request: session_pb2.ChatRequest, limits: SessionLimits, input_hertz: int
) -> ChatRequest:
    """Return the request in the model's types. Absent fields keep the model's defaults.

    `input_hertz` is the rate of the voice. Videos are empty here; `Videos.fill` decodes them.
    Raises FabricError INVALID_FIELD with the path of the field in `ChatRequest`.
    """
    if len(request.messages) > limits.max_chat_messages:
        fault = f"are {len(request.messages)}, more than {limits.max_chat_messages}"
        raise invalid("messages", fault)
    _check_sizes(request, limits)
    messages = tuple(
        _message(message, f"messages[{index}]") for index, message in enumerate(request.messages)
    )
    chosen = _config(request.config, limits, input_hertz)
    if request.HasField("seed"):
        chosen["seed"] = request.seed
    try:
        return ChatRequest(messages, ChatOptions(**chosen))
    except OptionError as error:
        raise invalid_chat(error) from None


def ignored_paths(request: session_pb2.ChatRequest, prepared: PreparedChat) -> frozenset[str]:
    """Return the paths of the client's fields that the prepared chat does not use."""
    if request.config.tts_voice and not prepared.uses_tts_voice:
        return frozenset({"config.tts_voice"})
    return frozenset()


def invalid_chat(error: OptionError) -> FabricError:
    """Return the error of a chat that the model refuses, with the contract's path of the field."""
    path = _PATHS.get(error.field, error.field)
    return FabricError(Reason.INVALID_FIELD, str(error), field=path)


def _check_sizes(request: session_pb2.ChatRequest, limits: SessionLimits) -> None:
    """Refuse messages that exceed a bound on their total size."""
    part_count = clip_count = text_bytes = media_bytes = 0
    for index, message in enumerate(request.messages):
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
            return ChatAudio(read_samples(f"{path}.audio", part.audio))
        case "video":
            count = part.video_stack_frame_count
            if not 0 <= count <= MAX_STACK_FRAME_COUNT:
                fault = f"is {count}, not between 0 and {MAX_STACK_FRAME_COUNT}"
                raise invalid(f"{path}.video_stack_frame_count", fault)
            return ChatVideo(())
        case _:
            raise invalid(path, "is empty")


def _config(
    config: session_pb2.ChatConfig, limits: SessionLimits, input_hertz: int
) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "is_thinking": config.is_thinking,
        "generate_audio": config.generate_audio,
        "is_omni": config.is_omni,
        "max_slices": 1,
        **read_numbers(config, CHAT_CONFIG, _MODEL_NAMES),
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
        chosen["tts_voice"] = read_voice(
            "config.tts_voice", config.tts_voice, input_hertz, limits.max_voice_s
        )
    return chosen
