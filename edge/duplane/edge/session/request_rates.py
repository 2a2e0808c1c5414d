"""Converts the sound in settings and turns to the input rate of the model that gets them. Pure.

The sound of a duplex session is a stream, which `UnitAssembler` converts.
"""

from __future__ import annotations

from duplane.fabric.audio import resample_pcm
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import session_pb2


def convert_voices(settings: session_pb2.Open, from_hertz: int, to_hertz: int) -> session_pb2.Open:
    """Return the settings with voices at another rate: the same object if the rates are equal."""
    if from_hertz == to_hertz:
        return settings
    converted = session_pb2.Open()
    converted.CopyFrom(settings)
    converted.llm_voice = resample_pcm(settings.llm_voice, from_hertz, to_hertz)
    converted.tts_voice = resample_pcm(settings.tts_voice, from_hertz, to_hertz)
    return converted


def convert_turn(
    request: session_pb2.ChatRequest, from_hertz: int, to_hertz: int, media_bytes: int
) -> session_pb2.ChatRequest:
    """Return a turn with sounds at another rate: the same object if the rates are equal.

    The turn itself is not changed, since another model may get it after this one. Raises
    FabricError INVALID_FIELD if the media of the turn would have more than `media_bytes`.
    """
    if from_hertz == to_hertz:
        return request
    _check_media(request, to_hertz / from_hertz, media_bytes, to_hertz)
    converted = session_pb2.ChatRequest()
    converted.CopyFrom(request)
    for message in converted.messages:
        for part in message.parts:
            if part.HasField("audio"):
                part.audio = resample_pcm(part.audio, from_hertz, to_hertz)
    config = converted.config
    config.tts_voice = resample_pcm(config.tts_voice, from_hertz, to_hertz)
    return converted


def _check_media(
    request: session_pb2.ChatRequest, growth: float, media_bytes: int, to_hertz: int
) -> None:
    """Check the bytes of all media before the conversion, after which sounds are `growth` larger.

    A model with a high rate gets more bytes than the client has sent. Workers have the same bound.
    """
    left_bytes = float(media_bytes)
    for number, said in enumerate(request.messages):
        for at, part in enumerate(said.parts):
            kind = part.WhichOneof("content")
            if kind in (None, "text"):
                continue
            left_bytes -= len(getattr(part, kind)) * (growth if kind == "audio" else 1.0)
            if left_bytes < 0:
                field = f"messages[{number}].parts[{at}].{kind}"
                fault = f"brings the media of all messages to more than {media_bytes} bytes"
                fault += f" at {to_hertz} Hz, the rate of the model"
                raise FabricError(Reason.INVALID_FIELD, fault, field=field)
