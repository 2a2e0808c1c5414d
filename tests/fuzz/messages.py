"""Mutations of one message: of its JSON, or of its bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import orjson
from fuzz import values
from fuzz.values import Raw, clone

_JSON_TO_BYTES = 50  # of this many messages, one has its bytes mutated instead of its JSON
_KEYS = ("", "type", "data", "extra", "audio", "input", "payload", "\x00", "Type", "x" * 300)
_AUDIO_KEYS = ("audio", "ref_audio", "voice", "base64")
_PICTURE_KEYS = ("frame", "image", "picture")


@dataclass(frozen=True, slots=True)
class Message:
    """The content of one text frame: a value that is rendered as JSON, or raw bytes."""

    value: Any = None
    raw: bytes | None = None
    is_mutated: bool = False

    def render(self) -> bytes:
        return values.render(self.value) if self.raw is None else self.raw


def mutate(rng: Random, value: Any, others: list[Any]) -> Message:
    """Return a mutation of `value`, perhaps with parts of `others`, which are client messages."""
    if rng.randrange(_JSON_TO_BYTES) == 0:
        return Message(raw=_damage(rng, values.render(value)), is_mutated=True)
    mutated = clone(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        mutated = _mutate_json(rng, mutated, others)
    return Message(mutated, is_mutated=True)


# --- JSON ---


def _mutate_json(rng: Random, value: Any, others: list[Any]) -> Any:
    if not isinstance(value, dict | list) or not value or rng.random() < 0.03:
        return rng.choice([values.anything(rng), [value], {"": value}, clone(rng.choice(others))])
    place, key = _a_place(rng, value)
    rng.choice(_CHANGES)(rng, place, key, others)
    return value


def _a_place(rng: Random, value: Any) -> tuple[Any, Any]:
    """Return a random container in `value`, and one of its keys or indices."""
    place = value
    while True:
        key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        inner = place[key]
        if not (isinstance(inner, dict | list) and inner) or rng.random() < 0.2:
            return place, key
        place = inner


def _remove(rng: Random, place: Any, key: Any, others: list[Any]) -> None:
    del place[key]


def _replace(rng: Random, place: Any, key: Any, others: list[Any]) -> None:
    place[key] = values.anything(rng)


def _replace_alike(rng: Random, place: Any, key: Any, others: list[Any]) -> None:
    """Replace a value by another of the same kind."""
    old = place[key]
    name = str(key)
    if any(part in name for part in _AUDIO_KEYS):
        place[key] = values.audio(rng)
    elif any(part in name for part in _PICTURE_KEYS) or str(old).startswith(("@jpeg", "@png")):
        place[key] = values.picture(rng)
    elif isinstance(old, bool):
        place[key] = rng.choice([not old, None, int(old), str(old)])
    elif isinstance(old, int | float):
        place[key] = rng.choice([*values.NUMBERS, -float(old), old * 1e9, str(old), old + 0.5])
    elif isinstance(old, str):
        place[key] = rng.choice(
            [*values.TEXTS, old.upper(), old + " ", old[:-1], [old], "\0" + old]
        )
    else:
        place[key] = values.anything(rng)


def _rename(rng: Random, place: Any, key: Any, others: list[Any]) -> None:
    if isinstance(place, dict):
        names = [*_KEYS, str(key).upper(), f"{key} ", *_keys_of(rng.choice(others))]
        place[rng.choice(names)] = place.pop(key)


def _add(rng: Random, place: Any, key: Any, others: list[Any]) -> None:
    """Add an item to a list or a field to an object.

    A field comes from another message, or has any value.
    """
    added = values.anything(rng)
    if isinstance(place, list):
        place.insert(rng.randint(0, len(place)), clone(rng.choice([place[key], added])))
        return
    other = rng.choice(others)
    if isinstance(other, dict) and other and rng.random() < 0.7:
        name = rng.choice(list(other))
        place[name] = clone(other[name])
    else:
        place[rng.choice(_KEYS)] = added


def _repeat(rng: Random, place: Any, key: Any, others: list[Any]) -> None:
    """Repeat a key of an object, perhaps with another value; or repeat an item of a list."""
    if isinstance(place, list):
        is_short = len(values.render(place[key])) < 500
        count = rng.choice((1, 5, 70, 1100)) if is_short else 1
        place.extend([clone(place[key]) for _ in range(count)])
        return
    again = rng.choice([place[key], values.anything(rng)])
    first = values.render(place[key])
    name = orjson.dumps(key)
    place[key] = Raw(first + b"," + name + b":" + values.render(again))


def _wrap(rng: Random, place: Any, key: Any, others: list[Any]) -> None:
    old = place[key]
    place[key] = rng.choice([[old], {"data": old}, {"base64": old}, {str(key): old}, [old, old]])


def _deepen(rng: Random, place: Any, key: Any, others: list[Any]) -> None:
    place[key] = values.deep(rng)


def _keys_of(value: Any) -> list[str]:
    return list(value) if isinstance(value, dict) else []


_Change = Callable[[Random, Any, Any, list[Any]], None]
_CHANGES: tuple[_Change, ...] = (
    *(_remove, _remove, _replace, _replace, _replace_alike, _replace_alike, _replace_alike),
    *(_rename, _add, _repeat, _wrap, _deepen),
)


# --- bytes ---

_BOM = b"\xef\xbb\xbf"
_NO_TEXT = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\x00", b"\xfe\xff")


def _damage(rng: Random, message: bytes) -> bytes:
    at = rng.randint(0, min(len(message), 200))
    return rng.choice(_DAMAGES)(rng, message[:at], message[at:])


def _cut(rng: Random, head: bytes, tail: bytes) -> bytes:
    return rng.choice([head, tail, tail[:-1]])


def _spoil_text(rng: Random, head: bytes, tail: bytes) -> bytes:
    return head + rng.choice(_NO_TEXT) + tail


def _append(rng: Random, head: bytes, tail: bytes) -> bytes:
    return head + tail + rng.choice([(head + tail)[:500], b"{}", b"\0", b"]", b" "])


def _encode_otherwise(rng: Random, head: bytes, tail: bytes) -> bytes:
    text = (head + tail)[:500].decode(errors="ignore")
    return rng.choice([_BOM + head + tail, text.encode("utf-16"), text.encode("utf-32")])


def _say_little(rng: Random, head: bytes, tail: bytes) -> bytes:
    return rng.choice([b"", b" ", b"\n", b"null", b"0", b'""', b"[]", b"{}", b"true"])


def _say_noise(rng: Random, head: bytes, tail: bytes) -> bytes:
    return rng.randbytes(rng.randint(1, 40))


def _overwrite(rng: Random, head: bytes, tail: bytes) -> bytes:
    return head + rng.randbytes(rng.randint(1, 3)) + tail[2:]


def _unquote(rng: Random, head: bytes, tail: bytes) -> bytes:
    other = rng.choice([b"'", b'""', b'\\"'])
    return (head + tail).replace(b'"', other, rng.randint(1, 4))


def _punctuate(rng: Random, head: bytes, tail: bytes) -> bytes:
    return head + rng.choice([b",", b":", b"{", b"[", b'"', b"\\"]) + tail


def _join(rng: Random, head: bytes, tail: bytes) -> bytes:
    message = (head + tail)[:2000]
    return b"[" + message + b"," + message + b"]"


_DAMAGES = (
    *(_cut, _spoil_text, _append, _encode_otherwise, _say_little, _say_noise),
    *(_overwrite, _unquote, _punctuate, _join),
)
