"""The `payload` of B's `session.init`: its settings with their aliases, and unused fields."""

from __future__ import annotations

from duplane.edge.payload.fields import Fields, ignored
from duplane.edge.payload.media import read_voice
from duplane.edge.payload.model_settings import read_duplex_config, read_length_penalty
from duplane.edge.settings import Limits
from duplane.fabric.v1 import session_pb2

_PROMPT_ALIASES = ("system_prompt", "instructions")
_CONFIG_ALIASES = ("config", "duplex")
_LLM_VOICE_ALIASES = ("ref_audio_base64", "ref_audio")
_TTS_VOICE_ALIASES = ("tts_ref_audio_base64", "tts_ref_audio")
_MAX_SEED = 2**63 - 1


def read_settings(
    payload: Fields, limits: Limits, modes: frozenset[str]
) -> tuple[session_pb2.Open, tuple[str, ...], dict[str, str]]:
    """Return settings, the paths of fields without effect, and the client's path of each setting.

    `payload.defaults` may hold the same fields; a default applies if the payload itself has no such
    field. No value is ever used as a file path on the server. `modes` are the values of `mode` that
    agree with the URL. Raises ClientError.
    """
    settings = session_pb2.Open(context_token_limit=limits.context_token_count)
    paths: dict[str, str] = {}
    groups = [group for group in (payload.fields("defaults"), payload) if group is not None]
    nested: list[Fields] = []
    for group in groups:  # a value in a later group replaces that of an earlier group
        nested += _read_group(group, settings, limits, paths)
        group.expect("mode", modes)
    return settings, ignored(*groups, *nested), paths


def _read_group(
    group: Fields, settings: session_pb2.Open, limits: Limits, paths: dict[str, str]
) -> list[Fields]:
    """Copy one group of fields into `settings`. Returns the objects nested in the group."""
    if (key := group.first(*_PROMPT_ALIASES)) is not None:
        settings.system_prompt = group.required_text(key, limits.instructions_bytes)
        paths["system_prompt"] = group.path(key)
    if (seed := group.integer("seed", -_MAX_SEED - 1, _MAX_SEED)) is not None:
        settings.seed = seed
        paths["seed"] = group.path("seed")
    paths |= read_length_penalty(group, settings.config)
    if (generates_audio := group.get("use_tts", bool)) is not None:
        settings.config.generate_audio = generates_audio
        paths["config.generate_audio"] = group.path("use_tts")
    nested: list[Fields] = []
    if (key := group.first(*_CONFIG_ALIASES)) is not None:
        config = group.required_fields(key)
        paths |= read_duplex_config(config, settings.config)
        nested.append(config)
    if (voice := group.fields("voice")) is not None:
        nested.append(voice)
    for fields in (group, *([voice] if voice else [])):
        _read_voices(fields, settings, limits, paths)
    return nested


def _read_voices(
    fields: Fields, settings: session_pb2.Open, limits: Limits, paths: dict[str, str]
) -> None:
    if (key := fields.first(*_LLM_VOICE_ALIASES)) is not None:
        settings.llm_voice = read_voice(fields, key, limits.voice_s)
        paths["llm_voice"] = fields.path(key)
    if (key := fields.first(*_TTS_VOICE_ALIASES)) is not None:
        settings.tts_voice = read_voice(fields, key, limits.voice_s)
        paths["tts_voice"] = fields.path(key)
