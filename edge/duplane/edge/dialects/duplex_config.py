"""DuplexConfig as clients write it, equal in every dialect: public names, bounds, fabric names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from duplane.edge.dialects.fields import Fields, invalid
from duplane.fabric.v1 import session_pb2


@dataclass(frozen=True, slots=True)
class _Whole:
    field: str
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class _Number:
    field: str
    low: float
    high: float


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
    "force_listen_count": _Whole("force_listen_count", 0, 10_000),
    "max_new_speak_tokens_per_chunk": _Whole("max_new_speak_token_count", 1, 1_000),
    "decode_mode": _Choice(
        "decode_mode",
        {
            "sampling": session_pb2.DECODE_MODE_SAMPLING,
            "greedy": session_pb2.DECODE_MODE_GREEDY,
        },
    ),
    "temperature": _Number("temperature", 0.0, 2.0),
    "top_k": _Whole("top_k", 0, 1_000_000),
    "top_p": _Number("top_p", 0.0, 1.0),
    "text_repetition_penalty": _Number("text_repetition_penalty", 0.1, 10.0),
    "text_repetition_window_size": _Whole("text_repetition_window_size", 0, 1_000_000),
    "length_penalty": _Number("length_penalty", 0.1, 5.0),
    "listen_prob_scale": _Number("listen_prob_scale", 0.0, 100.0),
    "listen_top_k": _Whole("listen_top_k", 0, 1_000_000),
    "tts_temperature": _Number("tts_temperature", 0.0, 2.0),
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
            return fields.integer(name, setting.low, setting.high)
        case _Number():
            return fields.number(name, setting.low, setting.high)
        case _Choice():
            chosen = fields.text(name)
            if chosen is None:
                return None
            if chosen not in setting.choices:
                raise invalid(fields.path(name), f"must be one of {', '.join(setting.choices)}")
            return setting.choices[chosen]
