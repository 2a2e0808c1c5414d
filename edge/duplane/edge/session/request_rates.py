"""Converts the sound in settings and turns to the input rate of the model that gets them. Pure.

The sound of a duplex session is a stream, which `UnitAssembler` converts.
"""

from __future__ import annotations

from duplane.fabric.audio import resample_pcm
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
    request: session_pb2.ChatRequest, from_hertz: int, to_hertz: int
) -> session_pb2.ChatRequest:
    """Return a turn with sounds at another rate: the same object if the rates are equal.

    The turn itself is not changed, since another model may get it after this one.
    """
    if from_hertz == to_hertz:
        return request
    converted = session_pb2.ChatRequest()
    converted.CopyFrom(request)
    for message in converted.messages:
        for part in message.parts:
            if part.HasField("audio"):
                part.audio = resample_pcm(part.audio, from_hertz, to_hertz)
    config = converted.config
    config.tts_voice = resample_pcm(config.tts_voice, from_hertz, to_hertz)
    return converted
