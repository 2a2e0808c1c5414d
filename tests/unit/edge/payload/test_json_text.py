"""A long base64 string is decoded without the JSON parser, which reads all other messages."""

from __future__ import annotations

import orjson
import pybase64
import pytest

from duplane.edge.client_errors import ClientError, UnreadableError
from duplane.edge.payload import json_text
from duplane.edge.payload.fields import BASE64, Fields, parse
from duplane.edge.settings import Limits

CONTENT = bytes(range(256)) * 32
LONG = pybase64.b64encode(CONTENT)
SHORT = LONG[:64]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The texts that reach the JSON parser."""
    texts: list[bytes] = []

    class Parser:
        JSONDecodeError = orjson.JSONDecodeError

        @staticmethod
        def loads(text: bytes) -> object:
            texts.append(text)
            return orjson.loads(text)

    monkeypatch.setattr(json_text, "orjson", Parser)
    return texts


def field_of(event: Fields, *path: str) -> str | bytes | None:
    *outer, key = path
    for name in outer:
        event = event.required_fields(name)
    return event.get(key, BASE64)


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (b'{"type":"x","audio":"%b"}', ("audio",)),
        (b'{"audio" : "%b", "type":"x", "n":[1,{"a":2}]}', ("audio",)),
        (b'{"input":{"audio":"%b","input_id":"i"},"type":"x"}', ("input", "audio")),
        (b'{"input":{"audio":{"data":"%b"}},"type":"x"}', ("input", "audio", "data")),
        (b'{"a":{"b":{"c":{"d":"%b"\n}\n}},"type":"x"}', ("a", "b", "c", "d")),
    ],
)
def test_parser_does_not_read_a_long_base64_string(
    parsed: list[bytes], message: bytes, path: tuple[str, ...]
) -> None:
    event = parse(message % LONG)
    encoded = field_of(event, *path)
    assert encoded == CONTENT
    assert max(map(len, parsed)) < 100
    *outer, key = path
    holder = event
    for name in outer:
        holder = holder.required_fields(name)
    assert holder.get(key, str) == LONG.decode(), "other readers get the string itself"
    assert event.get("type", str) == "x"


@pytest.mark.parametrize(
    "message",
    [
        b'{"audio":"%b"}' % SHORT,
        b'{"audio":"%b!"}' % LONG,
        b'{"audio":"%b="}' % LONG,
        b'{"audio":"%bAR=="}' % LONG[:-4],
        b'{"audio":"%bAAB="}' % LONG[:-4],
        b'{"audio":"%bAA=="}' % LONG[:-4],
        b'{"audio":"a\\/%b"}' % LONG,
        b'{"text":"\\u0000","audio":"%b"}' % LONG,
        b'{"audio":"%b","audio":"x"}' % LONG,
        b'{"audio":"x","audio":"%b"}' % LONG,
        b'{"%b":1,"audio":"x"}' % LONG,
        b'{"frames":["%b"],"audio":"x"}' % LONG,
        b'{"frames":["%b","b"],"audio":"x"}' % LONG,
        b'{"text":"%b"}' % ("\N{SNOWMAN}".encode() * 5000),
        b"{%b}" % b",".join(b'"a%d":"b"' % n for n in range(50)) + b" " * 5000,
    ],
)
def test_every_valid_message_has_the_values_of_the_parser(message: bytes) -> None:
    event = parse(message)
    values = orjson.loads(message)
    assert {key: event.get(key, type(value)) for key, value in values.items()} == values


@pytest.mark.parametrize(
    "message",
    [
        b'{"audio":"%b\x01"}' % LONG,
        b'{"audio":"%b\n"}' % LONG,
        b'{"audio":"%b\xff"}' % LONG,
        b'{"audio":"%b"' % LONG,
        b'{"audio":"%b' % LONG,
        b'{"audio":"%b",}' % LONG,
        b'{"audio":"%b","b":"\x00"}' % LONG,
        b'{"audio":"%b" "b":1}' % LONG,
        b'{"audio":"%b","b":"\xff"}' % LONG,
    ],
)
def test_message_that_is_not_json_is_unreadable(message: bytes) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        orjson.loads(message)
    with pytest.raises(UnreadableError):
        parse(message)


def test_bounds_apply_to_a_message_that_is_cut() -> None:
    values = b",".join([b"1"] * 50)
    with pytest.raises(ClientError, match="at most 20 values"):
        parse(b'{"audio":"%b","n":[%b]}' % (LONG, values), Limits(json_value_count=20))
    with pytest.raises(ClientError, match="2 lists and objects deep"):
        parse(b'{"audio":"%b","n":[[[1]]]}' % LONG, Limits(json_depth=2))
    with pytest.raises(ClientError, match="must be a JSON object"):
        parse(b'[{"audio":"%b"}]' % LONG)


def test_value_of_another_type_has_its_error() -> None:
    event = parse(b'{"flag":"%b"}' % LONG)
    with pytest.raises(ClientError, match="flag: must be true or false"):
        event.get("flag", bool)
    with pytest.raises(ClientError, match="audio: must be a string"):
        parse(b'{"audio":1}').get("audio", BASE64)
    assert event.get("audio", BASE64) is None


def test_only_long_strings_are_cut() -> None:
    length = json_text.MIN_LENGTH
    for size, is_cut in ((length - 4, False), (length + 4, True)):
        event = parse(b'{"audio":"%b"}' % (b"A" * size))
        assert isinstance(event.get("audio", BASE64), bytes) is is_cut
