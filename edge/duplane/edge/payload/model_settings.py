"""Reads the model's settings from clients: maps public names to fields of the contract.

One table is for duplex sessions (`DuplexConfig`), the other for turns of chat (`ChatConfig`). Every
dialect uses the same tables. `duplane.fabric.bounds` has the bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from duplane.edge.payload.fields import Fields, invalid
from duplane.fabric.bounds import CHAT_CONFIG, DUPLEX_CONFIG
from duplane.fabric.v1 import session_pb2


@dataclass(frozen=True, slots=True)
class WholeNumber:
    """A whole number within the bounds of `field`."""

    field: str


@dataclass(frozen=True, slots=True)
class Number:
    """A number within the bounds of `field`."""

    field: str


@dataclass(frozen=True, slots=True)
class Flag:
    """A boolean."""

    field: str


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice of several words; each word has a value in the contract."""

    field: str
    choices: Mapping[str, int]


Setting = WholeNumber | Number | Flag | Choice

DUPLEX_SETTINGS: Mapping[str, Setting] = {
    "generate_audio": Flag("generate_audio"),
    "force_listen_count": WholeNumber("force_listen_count"),
    "max_new_speak_tokens_per_chunk": WholeNumber("max_new_speak_token_count"),
    "decode_mode": Choice(
        "decode_mode",
        {
            "sampling": session_pb2.DECODE_MODE_SAMPLING,
            "greedy": session_pb2.DECODE_MODE_GREEDY,
        },
    ),
    "temperature": Number("temperature"),
    "top_k": WholeNumber("top_k"),
    "top_p": Number("top_p"),
    "text_repetition_penalty": Number("text_repetition_penalty"),
    "text_repetition_window_size": WholeNumber("text_repetition_window_size"),
    "length_penalty": Number("length_penalty"),
    "listen_prob_scale": Number("listen_prob_scale"),
    "listen_top_k": WholeNumber("listen_top_k"),
    "tts_temperature": Number("tts_temperature"),
}

CHAT_SETTINGS: Mapping[str, Setting] = {
    "top_k": WholeNumber("top_k"),
    "temperature": Number("temperature"),
    "top_p": Number("top_p"),
    "length_penalty": Number("length_penalty"),
    "repetition_penalty": Number("repetition_penalty"),
}


def read_duplex_config(fields: Fields, config: session_pb2.DuplexConfig) -> dict[str, str]:
    """Copy settings into `config`; return the client's path of each. Raises ClientError."""
    paths: dict[str, str] = {}
    for name, setting in DUPLEX_SETTINGS.items():
        value = _read(fields, name, setting, DUPLEX_CONFIG)
        if value is not None:
            setattr(config, setting.field, value)
            paths[f"config.{setting.field}"] = fields.path(name)
    return paths


def read_length_penalty(fields: Fields, config: session_pb2.DuplexConfig) -> dict[str, str]:
    """Copy `length_penalty`, which B allows outside its config object, too. Raises ClientError."""
    value = fields.number("length_penalty", *DUPLEX_CONFIG["length_penalty"])
    if value is None:
        return {}
    config.length_penalty = value
    return {"config.length_penalty": fields.path("length_penalty")}


def read_chat_config(
    fields: Fields, config: session_pb2.ChatConfig, max_token_count: int
) -> dict[str, str]:
    """Copy settings into `config`; return the client's path of each. Raises ClientError."""
    paths: dict[str, str] = {}
    if (count := fields.integer("max_new_tokens", 1, max_token_count)) is not None:
        config.max_new_token_count = count
        paths["config.max_new_token_count"] = fields.path("max_new_tokens")
    for name, setting in CHAT_SETTINGS.items():
        value = _read(fields, name, setting, CHAT_CONFIG)
        if value is not None:
            setattr(config, setting.field, value)
            paths[f"config.{setting.field}"] = fields.path(name)
    if fields.get("do_sample", bool) is False:
        config.decode_mode = session_pb2.DECODE_MODE_GREEDY
    return paths


def _read(
    fields: Fields, name: str, setting: Setting, bounds: Mapping[str, tuple[float, float]]
) -> bool | float | None:
    match setting:
        case Flag():
            return fields.get(name, bool)
        case WholeNumber():
            low, high = bounds[setting.field]
            return fields.integer(name, int(low), int(high))
        case Number():
            return fields.number(name, *bounds[setting.field])
        case Choice():
            word = fields.get(name, str)
            if word is None:
                return None
            if word not in setting.choices:
                raise invalid(fields.path(name), f"must be one of {', '.join(setting.choices)}")
            return setting.choices[word]
