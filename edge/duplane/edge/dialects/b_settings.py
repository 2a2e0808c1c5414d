"""The `payload` of B's `session.init`: its aliases, in order, and what of it has no effect."""

from __future__ import annotations

from duplane.edge.dialects.duplex_config import read_duplex_config
from duplane.edge.dialects.fields import Fields, ignored
from duplane.edge.dialects.media import read_voice
from duplane.edge.settings import Limits
from duplane.fabric.v1 import session_pb2

_PROMPT_ALIASES = ("system_prompt", "instructions")
_CONFIG_ALIASES = ("config", "duplex")
_LLM_VOICE_ALIASES = ("ref_audio_base64", "ref_audio")
_TTS_VOICE_ALIASES = ("tts_ref_audio_base64", "tts_ref_audio")
_MAX_SEED = 2**63 - 1


def read_settings(payload: Fields, limits: Limits) -> tuple[session_pb2.Open, list[str]]:
    """Return the settings, and the paths of fields without effect. Raises ClientError.

    `payload.defaults` is a bag of the same fields, each used where the payload has none. No path
    on the server is ever taken from a client.
    """
    settings = session_pb2.Open(context_token_limit=limits.context_token_count)
    bags = [bag for bag in (payload.fields("defaults"), payload) if bag is not None]
    nested: list[Fields] = []
    for bag in bags:  # the later wins
        nested += _read_bag(bag, settings, limits)
    return settings, list(ignored(*bags, *nested))


def _read_bag(bag: Fields, settings: session_pb2.Open, limits: Limits) -> list[Fields]:
    """Copy one bag into `settings`; return the objects found in it."""
    if (key := bag.first(*_PROMPT_ALIASES)) is not None:
        settings.system_prompt = bag.required_text(key, max_bytes=limits.instructions_bytes)
    if (seed := bag.integer("seed", -_MAX_SEED - 1, _MAX_SEED)) is not None:
        settings.seed = seed
    if (penalty := bag.number("length_penalty", 0.1, 5.0)) is not None:
        settings.config.length_penalty = penalty
    if (is_spoken := bag.flag("use_tts")) is not None:
        settings.config.generate_audio = is_spoken
    nested: list[Fields] = []
    if (key := bag.first(*_CONFIG_ALIASES)) is not None:
        config = bag.required_fields(key)
        read_duplex_config(config, settings.config)
        nested.append(config)
    if (voice := bag.fields("voice")) is not None:
        nested.append(voice)
    for place in (bag, *([voice] if voice else [])):
        _read_voices(place, settings, limits)
    return nested


def _read_voices(fields: Fields, settings: session_pb2.Open, limits: Limits) -> None:
    if (key := fields.first(*_LLM_VOICE_ALIASES)) is not None:
        settings.llm_voice = read_voice(fields, key, limits.voice_s)
    if (key := fields.first(*_TTS_VOICE_ALIASES)) is not None:
        settings.tts_voice = read_voice(fields, key, limits.voice_s)
