"""The rules for server events of each dialect: the fields of each event, and their types."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pybase64

from duplane.edge.client_errors import ErrorCode
from duplane.edge.dialects import a, b_chat, b_events

Check = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Shape:
    """The fields of one object and their checks."""

    required: Mapping[str, Check | Shape]
    optional: Mapping[str, Check | Shape] = field(default_factory=dict)


def one_of(*known: object) -> Check:
    return lambda value: value in known


def text(value: Any) -> bool:
    return isinstance(value, str)


def said(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value.encode()) <= 8192


def whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def flag(value: Any) -> bool:
    return isinstance(value, bool)


def absent(value: Any) -> bool:
    return value is None


def sound(value: Any) -> bool:
    return isinstance(value, str) and len(pybase64.b64decode(value, validate=True)) % 4 == 0


def names(value: Any) -> bool:
    return isinstance(value, list) and 0 < len(value) <= 100 and all(map(text, value))


def matching(pattern: str) -> Check:
    compiled = re.compile(pattern)
    return lambda value: isinstance(value, str) and compiled.fullmatch(value) is not None


def _whole(*keys: str) -> dict[str, Check | Shape]:
    return dict.fromkeys(keys, whole)


def _numbers(*keys: str) -> dict[str, Check | Shape]:
    return dict.fromkeys(keys, number)


_PLACE = Shape(
    {"position": whole, "estimated_wait_s": number, "ticket_id": text, "queue_length": whole}
)
_QUEUE = {"queued": _PLACE, "queue_update": _PLACE, "queue_done": Shape({})}
_QUEUE_AB = {f"session.{name}": shape for name, shape in _QUEUE.items()}
QUEUE_EVENTS = frozenset(_QUEUE_AB)  # the same in A and B
_FAULT = Shape(
    {
        "code": one_of(*ErrorCode),
        "message": said,
        "type": one_of("client_error", "server_error"),
    }
)

# --- A ---

_DROPPED: dict[str, Check | Shape] = {
    "metrics": Shape({}, {"dropped_units": whole, "dropped_frames": whole})
}
_BEGUN: dict[str, Check | Shape] = {"recording_session_id": said, "ignored_init_fields": names}
_A = {
    **_QUEUE_AB,
    "session.created": Shape({"session_id": matching(r"rt_\d+"), "prompt_length": whole}, _BEGUN),
    "response.listen": Shape({"kv_cache_length": whole}, {**_DROPPED, "end_of_turn": flag}),
    "response.output_audio.delta": Shape(
        {"text": text, "audio": sound, "end_of_turn": flag, "kv_cache_length": whole}, _DROPPED
    ),
    "session.closed": Shape({"reason": one_of(*a.CLOSED_REASONS.values())}),
    "error": Shape({"error": _FAULT}),
}

# --- B ---

_SESSION: dict[str, Check | Shape] = {"session_id": matching(r"sess_\w+"), "server_send_ts": number}
_TIMES = _numbers(
    *("wall_clock_ms", "prefill_ms", "generate_ms", "cost_llm_ms", "cost_tts_ms"),
    *("cost_tts_prep_ms", "cost_token2wav_ms"),
)
_BACKEND: dict[str, Check | Shape] = {"backend": said}
_UNIT_METRICS = Shape(
    _BACKEND | _TIMES | _whole("kv_cache_length", "n_tokens", "n_tts_tokens", "dropped_units"),
    _whole("vision_tokens", "vision_slices", "dropped_frames"),
)
_USAGE = Shape(
    {
        **_whole("total_tokens", "input_tokens", "output_tokens"),
        "input_token_details": Shape(_whole("text_tokens", "audio_tokens", "vision_tokens")),
        "output_token_details": Shape(_whole("text_tokens", "audio_tokens")),
    }
)
_CREATED = Shape(
    {
        **_SESSION,
        "mode": one_of("full_duplex", "turn_based"),
        "prompt_length": whole,
        "metrics": Shape({"kv_cache_length": whole}),
        "usage": _USAGE,
    },
    _BEGUN,
)
_CLOSED = Shape(
    {**_SESSION, "reason": said, "usage": _USAGE}, {"diagnostic": Shape({"message": said})}
)
_ERROR_B = Shape({**_SESSION, "error": _FAULT}, {"input_id": text})
_COUNTED: dict[str, Check | Shape] = {
    "chunk_index": whole,
    "chunk_usage": _USAGE,
    "usage": _USAGE,
}
_DELTA: dict[str, Check | Shape] = {**_SESSION, "kind": text, "metrics": _UNIT_METRICS}
_DELTA_OPTIONAL: dict[str, Check | Shape] = {**_COUNTED, "input_id": text}
_KINDS: Mapping[str, Shape] = {
    "listen": Shape(_DELTA, {**_DELTA_OPTIONAL, "response_id": text}),
    "text": Shape({**_DELTA, "response_id": text, "text": text}, _DELTA_OPTIONAL),
    "audio": Shape({**_DELTA, "response_id": text, "audio": sound}, _DELTA_OPTIONAL),
}
_B = {
    **_QUEUE_AB,
    "session.created": _CREATED,
    "session.closed": _CLOSED,
    "error": _ERROR_B,
}

_REPLY: dict[str, Check | Shape] = {**_SESSION, "response_id": matching(r"resp_[0-9a-f]{12}")}
_PIECE_METRICS = Shape(_BACKEND, _TIMES | _whole("kv_cache_length"))
_PIECE: dict[str, Check | Shape] = {**_REPLY, "kind": text, "metrics": _PIECE_METRICS}
_NAMED: dict[str, Check | Shape] = {"input_id": text}
_CHAT_KINDS: Mapping[str, Shape] = {
    "text": Shape({**_PIECE, "text": said}, _NAMED),
    "audio": Shape({**_PIECE, "audio": sound}, _NAMED),
}
_B_CHAT = {
    **_B,
    "response.done": Shape(
        {
            **_REPLY,
            "text": text,
            "reason": one_of("turn_end"),
            "metrics": Shape(_BACKEND | _whole("kv_cache_length", "n_tokens", "n_tts_tokens")),
            "usage": _USAGE,
        },
        {
            **_NAMED,
            "audio": sound,
            "ignored_fields": names,
            "finish_reason": one_of(*b_chat.FINISH_REASONS.values()),
        },
    ),
}

# --- C and D ---

_FLAT_ERROR = Shape({"error": said})
_RESULT: dict[str, Check | Shape] = {
    "is_listen": flag,
    "text": text,
    "end_of_turn": flag,
    "current_time": whole,
    **_numbers(
        *("cost_llm_ms", "cost_tts_prep_ms", "cost_tts_ms", "cost_token2wav_ms", "cost_all_ms"),
        *("server_send_ts", "wall_clock_ms"),
    ),
    **_whole("n_tokens", "n_tts_tokens", "kv_cache_length", "vision_slices", "vision_tokens"),
    "audio_data": lambda value: absent(value) or sound(value),
}
_C = {
    **_QUEUE,
    "prepared": Shape({"prompt_length": whole}, _BEGUN),
    "result": Shape(_RESULT, _whole("dropped_units", "dropped_frames")),
    "paused": Shape({"timeout": number}),
    "resumed": Shape({}),
    "interrupted": Shape({}),
    "stopped": Shape({}),
    "timeout": Shape({"reason": said}),
    "error": _FLAT_ERROR,
}
_AUDIO_OR_NULL: dict[str, Check | Shape] = {
    "audio_data": lambda value: absent(value) or sound(value)
}
_D = {
    **_QUEUE,
    "prefill_done": Shape({"input_tokens": whole}, {"ignored_fields": names}),
    "chunk": Shape({"text_delta": text, **_AUDIO_OR_NULL}),
    "done": Shape(
        {"text": text, **_whole("generated_tokens", "input_tokens"), **_AUDIO_OR_NULL},
        {"recording_session_id": said},
    ),
    "error": _FLAT_ERROR,
}

EVENTS: Mapping[str, Mapping[str, Shape]] = {"A": _A, "B": _B, "B chat": _B_CHAT, "C": _C, "D": _D}
_DELTAS = {"B": _KINDS, "B chat": _CHAT_KINDS}
# For each dialect, the events that close a session. A session that is refused ends with `error`
# instead.
CLOSINGS = {
    "A": ("session.closed",),
    "B": ("session.closed",),
    "B chat": ("session.closed",),
    "C": ("stopped", "timeout"),
    "D": ("done",),
}
B_REASONS = tuple(b_events.CLOSED_REASONS.values())


class IllegalError(Exception):
    """The edge has broken a rule."""


def check_event(dialect: str, event: Any) -> None:
    """Raise IllegalError unless the dialect allows `event` and each of its fields."""
    if not isinstance(event, dict):
        raise IllegalError(f"{dialect}: no object: {str(event)[:200]}")
    fields = dict(event)
    kind = fields.pop("type", None)
    shape = EVENTS[dialect].get(kind)
    if kind == "response.output.delta" and dialect in _DELTAS:
        shape = _DELTAS[dialect].get(fields.get("kind", ""))
    if shape is None:
        raise IllegalError(f"{dialect}: no such event: {kind} {fields.get('kind', '')}")
    _check(shape, fields, f"{dialect}: {kind}")
    if kind == "error" and isinstance(fields["error"], dict):
        error = fields["error"]
        if ErrorCode(error["code"]).fault != error["type"]:
            raise IllegalError(f"{dialect}: {error['code']} is no {error['type']}")


def _check(shape: Shape, fields: Any, path: str) -> None:
    if not isinstance(fields, dict):
        raise IllegalError(f"{path}: must be an object")
    for name, check in {**shape.required, **shape.optional}.items():
        if name not in fields:
            if name in shape.required:
                raise IllegalError(f"{path}.{name}: absent")
        elif isinstance(check, Shape):
            _check(check, fields[name], f"{path}.{name}")
        elif not check(fields[name]):
            raise IllegalError(f"{path}.{name}: must not be {str(fields[name])[:100]!r}")
    if unknown := fields.keys() - shape.required.keys() - shape.optional.keys():
        raise IllegalError(f"{path}: unknown fields {sorted(unknown)}")
