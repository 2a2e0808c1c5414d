"""DuplexConfig as clients write it, equal in every dialect: public names, bounds, fabric names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from duplane.edge.dialects.fields import Fields, invalid
from duplane.fabric.bounds import DUPLEX_CONFIG
from duplane.fabric.v1 import session_pb2


@dataclass(frozen=True, slots=True)
class _Whole:
    field: str


@dataclass(frozen=True, slots=True)
class _Number:
    field: str


@dataclass(frozen=True, slots=True)
class _Flag:
    field: str


@dataclass(frozen=True, slots=True)
class _Choice:
    field: str
    choices: Mapping[str, int]


_Setting = _Whole | _Number | _Flag | _Choice

SETTINGS: Mapping[str, _Setting] = {
    "generate_audio": _Flag("generate_audio"),
    "force_listen_count": _Whole("force_listen_count"),
    "max_new_speak_tokens_per_chunk": _Whole("max_new_speak_token_count"),
    "decode_mode": _Choice(
        "decode_mode",
        {
            "sampling": session_pb2.DECODE_MODE_SAMPLING,
            "greedy": session_pb2.DECODE_MODE_GREEDY,
        },
    ),
    "temperature": _Number("temperature"),
    "top_k": _Whole("top_k"),
    "top_p": _Number("top_p"),
    "text_repetition_penalty": _Number("text_repetition_penalty"),
    "text_repetition_window_size": _Whole("text_repetition_window_size"),
    "length_penalty": _Number("length_penalty"),
    "listen_prob_scale": _Number("listen_prob_scale"),
    "listen_top_k": _Whole("listen_top_k"),
    "tts_temperature": _Number("tts_temperature"),
}


def read_duplex_config(fields: Fields, config: session_pb2.DuplexConfig) -> None:
    """Copy what `fields` sets into `config`. Raises ClientError; unknown keys stay unused."""
    for name, setting in SETTINGS.items():
        value = _read(fields, name, setting)
        if value is not None:
            setattr(config, setting.field, value)


def _read(fields: Fields, name: str, setting: _Setting) -> bool | float | None:
    match setting:
        case _Flag():
            return fields.flag(name)
        case _Whole():
            low, high = DUPLEX_CONFIG[setting.field]
            return fields.integer(name, int(low), int(high))
        case _Number():
            return fields.number(name, *DUPLEX_CONFIG[setting.field])
        case _Choice():
            chosen = fields.text(name)
            if chosen is None:
                return None
            if chosen not in setting.choices:
                raise invalid(fields.path(name), f"must be one of {', '.join(setting.choices)}")
            return setting.choices[chosen]
