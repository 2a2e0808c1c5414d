"""The request of dialect O: reads OpenAI's chat completions as a turn of chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import pybase64

from duplane.edge.client_errors import ClientError, ErrorCode
from duplane.edge.dialects.actions import Turn
from duplane.edge.dialects.chat_request import ROLES, MediaBudget, read_messages, read_sound
from duplane.edge.payload.fields import Fields, invalid
from duplane.edge.payload.pictures import decode_data_uri
from duplane.edge.settings import Limits
from duplane.fabric.audio import WAV_HEAD
from duplane.fabric.bounds import CHAT_CONFIG
from duplane.fabric.settings import MAX_LABEL_LENGTH
from duplane.fabric.v1 import session_pb2

WAV, PCM16 = "wav", "pcm16"

# Parameters for abilities that are missing here -> their values that change nothing. With another
# value the answer would not be what the client expects, so the request is refused.
UNSUPPORTED: Mapping[str, Sequence[object]] = {
    "n": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "stop": ([],),
    "web_search_options": (),
}
# The same for the fields of a message.
UNSUPPORTED_IN_MESSAGES: Mapping[str, Sequence[object]] = {
    "audio": (),  # names an earlier answer, and the edge keeps none
    "tool_calls": ([],),
    "function_call": (),
}

_ROLES: Mapping[str, session_pb2.ChatRole] = {
    **ROLES,
    "developer": session_pb2.CHAT_ROLE_SYSTEM,
}
_TEXT, _AUDIO = "text", "audio"
_MAX_SEED = 2**63 - 1
_DEFAULT_TEMPERATURE, _DEFAULT_TOP_P = 0.7, 0.8  # those of dialect D
_DEFAULT_TOKEN_COUNT = 2048
_WAV_HEAD_CHARACTERS = 16  # the base64 of the 12 bytes that mark a WAV file


@dataclass(frozen=True, slots=True)
class CompletionTurn(Turn):
    """One request for a completion. Without `audio_format` the answer is not spoken."""

    audio_format: str = ""
    includes_usage: bool = False


def read_completion(event: Fields, limits: Limits, kind: str) -> CompletionTurn:
    """Read a request. Raises ClientError.

    Unknown fields, and fields that do not change the answer (`user`, `store`, `metadata`), are
    ignored.
    """
    _refuse_unsupported(event, UNSUPPORTED)
    model = event.get("model", str) or ""
    if len(model) > MAX_LABEL_LENGTH:
        raise invalid("model", f"must be at most {MAX_LABEL_LENGTH} characters")
    is_streaming = event.get("stream", bool) or False
    options = event.fields("stream_options")
    includes_usage = bool(options and options.get("include_usage", bool))
    audio_format = _read_audio_format(event, limits, is_streaming=is_streaming)
    request = session_pb2.ChatRequest()
    paths = _read_config(event, request, limits)
    request.config.generate_audio = bool(audio_format)
    for index, item in enumerate(event.items("messages", limits.chat_message_count) or ()):
        if isinstance(item, dict):
            message = Fields(cast("dict[str, object]", item), f"messages[{index}]")
            _refuse_unsupported(message, UNSUPPORTED_IN_MESSAGES)
    read_messages(event, request, limits, _ROLES, _read_part)
    return CompletionTurn(
        request,
        is_streaming,
        paths=paths,
        kind=kind,
        model=model,
        audio_format=audio_format,
        includes_usage=includes_usage,
    )


def _refuse_unsupported(fields: Fields, harmless: Mapping[str, Sequence[object]]) -> None:
    for name, values in harmless.items():
        value = fields.get(name, object)
        if value is None or any(type(value) is type(each) and value == each for each in values):
            continue
        raise ClientError(ErrorCode.UNSUPPORTED, f"{fields.path(name)}: is not supported")


def _read_audio_format(event: Fields, limits: Limits, *, is_streaming: bool) -> str:
    """Return the format of the speech; empty if the answer is not spoken."""
    modalities = event.items("modalities", 8)
    if modalities is None or modalities == [_TEXT]:
        return ""
    if modalities not in ([_TEXT, _AUDIO], [_AUDIO, _TEXT]):
        raise invalid("modalities", 'must be ["text"] or ["text", "audio"]')
    audio = event.required_fields("audio")
    form = audio.required_text("format", limits.text_bytes)
    formats = (PCM16,) if is_streaming else (WAV, PCM16)
    if form not in formats:
        in_stream = " in a stream" if is_streaming else ""
        raise invalid(audio.path("format"), f"must be {' or '.join(formats)}{in_stream}")
    return form


def _read_config(event: Fields, request: session_pb2.ChatRequest, limits: Limits) -> dict[str, str]:
    """Copy the settings of generation; return the client's path of each."""
    config = request.config
    config.max_new_token_count = min(_DEFAULT_TOKEN_COUNT, limits.chat_token_count)
    config.temperature, config.top_p = _DEFAULT_TEMPERATURE, _DEFAULT_TOP_P
    config.length_penalty = 1.0
    config.use_image_id = True
    paths: dict[str, str] = {}
    if key := event.first("max_completion_tokens", "max_tokens"):
        count = event.integer(key, 1, limits.chat_token_count)
        if count is not None:
            config.max_new_token_count = count
        paths["config.max_new_token_count"] = key
    for name in ("temperature", "top_p"):
        value = event.number(name, *CHAT_CONFIG[name])
        if value is not None:
            setattr(config, name, value)
            paths[f"config.{name}"] = name
    seed = event.integer("seed", 0, _MAX_SEED)
    if seed is not None:
        request.seed = seed
    return paths


def _read_part(part: Fields, limits: Limits, budget: MediaBudget) -> session_pb2.ChatPart:
    match part.get("type", str, required=True):
        case "text":
            text = part.required_text("text", limits.chat_text_bytes)
            return session_pb2.ChatPart(text=text)
        case "image_url":
            image = part.required_fields("image_url")
            path = image.path("url")
            picture = decode_data_uri(image.get("url", str, required=True), path, limits)
            return session_pb2.ChatPart(image=budget.spend(picture, path))
        case "input_audio":
            audio = part.required_fields("input_audio")
            if audio.required_text("format", limits.text_bytes) != WAV:
                raise invalid(audio.path("format"), f"must be {WAV}")
            path = audio.path("data")
            if not _is_wav(audio.get("data", str, required=True)):
                raise invalid(path, "is not a WAV file")
            sound = budget.spend(read_sound(audio, limits, budget), path)
            return session_pb2.ChatPart(audio=sound)
        case _:
            raise invalid(part.path("type"), "must be one of text, image_url, input_audio")


def _is_wav(encoded: str) -> bool:
    try:
        head = pybase64.b64decode(encoded[:_WAV_HEAD_CHARACTERS], validate=True)
    except ValueError:
        return False
    return WAV_HEAD.match(head) is not None
