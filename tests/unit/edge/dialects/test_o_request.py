"""The requests of dialect O: what they mean, and which are refused."""

from __future__ import annotations

import contextlib
import copy
import re
from typing import Any

import orjson
import pybase64
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paths import ROOT
from support.protocols.transcripts import pcm, wav

from duplane.edge.client_errors import ClientError, ErrorCode
from duplane.edge.dialects.o import REQUEST
from duplane.edge.dialects.o_request import (
    UNSUPPORTED,
    UNSUPPORTED_IN_MESSAGES,
    CompletionTurn,
    read_completion,
)
from duplane.edge.payload.fields import parse
from duplane.edge.settings import Limits
from duplane.fabric.v1 import session_pb2

HI = {"role": "user", "content": "Hi"}
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (2).to_bytes(4) + (3).to_bytes(4) + b"\x08\x02"
AUDIO = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}}


def encoded(content: bytes) -> str:
    return pybase64.b64encode(content).decode()


def read(body: dict[str, Any], limits: Limits | None = None) -> CompletionTurn:
    limits = limits or Limits()
    return read_completion(parse(orjson.dumps(body), limits), limits, REQUEST)


def ask(**fields: Any) -> CompletionTurn:
    return read({"messages": [HI], **fields})


def say(*parts: Any, limits: Limits | None = None) -> session_pb2.ChatMessage:
    (message,) = read({"messages": [{"role": "user", "content": parts}]}, limits).request.messages
    return message


def refusal(body: dict[str, Any]) -> tuple[ErrorCode, str]:
    with pytest.raises(ClientError) as caught:
        read(body)
    return caught.value.code, caught.value.message.partition(": ")[0]


def test_roles_and_texts_become_messages() -> None:
    roles = ["system", "developer", "user", "assistant"]
    turn = read({"messages": [{"role": role, "content": role} for role in roles]})
    assert [(m.role, m.parts[0].text) for m in turn.request.messages] == [
        (session_pb2.CHAT_ROLE_SYSTEM, "system"),
        (session_pb2.CHAT_ROLE_SYSTEM, "developer"),
        (session_pb2.CHAT_ROLE_USER, "user"),
        (session_pb2.CHAT_ROLE_ASSISTANT, "assistant"),
    ]


def test_parts_are_read_in_order() -> None:
    sound = {"data": encoded(wav(16_000)), "format": "wav"}
    message = say(
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(PNG)}"}},
        {"type": "input_audio", "input_audio": sound},
    )
    text, picture, audio = message.parts
    assert text.text == "look"
    assert picture.image == PNG
    assert len(audio.audio) == 4 * 16_000


def test_settings_become_those_of_the_contract() -> None:
    turn = ask(model="m", max_tokens=7, temperature=0, top_p=0.5, seed=3, stream=True)
    config = turn.request.config
    assert (config.max_new_token_count, config.temperature, config.top_p) == (7, 0.0, 0.5)
    assert (turn.request.seed, turn.model, turn.is_streaming) == (3, "m", True)
    assert ask(max_tokens=7, max_completion_tokens=8).request.config.max_new_token_count == 8
    assert ask().request.config.max_new_token_count == 2048
    assert not ask().request.HasField("seed")


def test_speech_is_generated_only_if_it_is_asked_for() -> None:
    for fields, form in (
        ({}, ""),
        ({"modalities": ["text"]}, ""),
        ({"audio": AUDIO["audio"]}, ""),
        (AUDIO, "wav"),
        ({**AUDIO, "modalities": ["audio", "text"]}, "wav"),
        ({**AUDIO, "audio": {"format": "pcm16"}, "stream": True}, "pcm16"),
    ):
        turn = ask(**fields)
        assert turn.audio_format == form
        assert turn.request.config.generate_audio is bool(form)


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"},
        {"parallel_tool_calls": True, "stream_options": {"include_obfuscation": False}},
        dict.fromkeys(UNSUPPORTED),
        {name: values[0] for name, values in UNSUPPORTED.items() if values},
        {"whatever": [1, 2]},
    ],
    ids=["metadata", "options", "null", "harmless", "unknown"],
)
def test_fields_that_do_not_change_the_answer_are_ignored(fields: dict[str, Any]) -> None:
    assert ask(**fields) == ask()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", True),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("response_format", {"type": "json_object"}),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("logit_bias", {"5": 1}),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("stop", "\n"),
        ("web_search_options", {}),
    ],
    ids=lambda value: str(value)[:20],
)
def test_parameter_that_would_change_the_answer_is_refused(name: str, value: Any) -> None:
    assert refusal({"messages": [HI], name: value}) == (ErrorCode.UNSUPPORTED, name)


def test_every_refused_parameter_is_tested() -> None:
    (marks,) = [
        mark
        for mark in getattr(test_parameter_that_would_change_the_answer_is_refused, "pytestmark")  # noqa: B009 - pyright does not know it
        if mark.name == "parametrize"
    ]
    assert {name for name, _ in marks.args[1]} == UNSUPPORTED.keys()


@pytest.mark.parametrize(
    ("message", "code", "path"),
    [
        ({"role": "tool", "content": "x"}, ErrorCode.INVALID_PAYLOAD, "role"),
        ({"role": "user"}, ErrorCode.MISSING_FIELD, "content"),
        ({"role": "assistant", "audio": {"id": "audio_1"}}, ErrorCode.UNSUPPORTED, "audio"),
        ({"role": "assistant", "tool_calls": [{}]}, ErrorCode.UNSUPPORTED, "tool_calls"),
        ({"role": "user", "content": []}, ErrorCode.INVALID_PAYLOAD, "content"),
    ],
)
def test_message_that_cannot_be_used_is_refused(
    message: dict[str, Any], code: ErrorCode, path: str
) -> None:
    assert refusal({"messages": [message]}) == (code, f"messages[0].{path}")


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def sound(data: str, form: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": form}}


@pytest.mark.parametrize(
    ("part", "path"),
    [
        (image("https://example.com/a.png"), "image_url.url"),
        (image("http://169.254.169.254/latest"), "image_url.url"),
        (image("file:///etc/passwd"), "image_url.url"),
        (image("data:image/png,abc"), "image_url.url"),
        (image("data:image/png;base64,"), "image_url.url"),
        (image("data:image/png;base64,AAAA"), "image_url.url"),
        (image("data:" + "x" * 500 + ";base64,AAAA"), "image_url.url"),
        ({"type": "image_url", "image_url": "data:"}, "image_url"),
        ({"type": "image_url"}, "image_url"),
        (sound(encoded(wav(160)), "mp3"), "input_audio.format"),
        (sound(encoded(pcm(160))), "input_audio.data"),
        (sound("UklGR!"), "input_audio.data"),
        (sound(encoded(b"RIFF")), "input_audio.data"),
        (sound(encoded(b"RIFF\x40\0\0\0AVI " + bytes(64))), "input_audio.data"),
        ({"type": "file", "file": {"file_id": "x"}}, "type"),
        ({"text": "x"}, "type"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_part_that_cannot_be_used_is_refused(part: dict[str, Any], path: str) -> None:
    code, told = refusal({"messages": [{"role": "user", "content": [part]}]})
    assert told.removesuffix(" base64 decode failed") == f"messages[0].content[0].{path}"
    assert code in (ErrorCode.INVALID_PAYLOAD, ErrorCode.MISSING_FIELD)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"model": 7}, "model"),
        ({"model": "m" * 129}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"modalities": ["text", "audio"]}, "audio"),
        ({**AUDIO, "audio": {"voice": "alloy"}}, "audio.format"),
        ({**AUDIO, "audio": {"format": "mp3"}}, "audio.format"),
        ({**AUDIO, "stream": True}, "audio.format"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 8193}, "max_completion_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"seed": "x"}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": -1}, "seed"),
        ({"stream_options": 1}, "stream_options"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_field_that_cannot_be_used_is_refused(fields: dict[str, Any], path: str) -> None:
    assert refusal({"messages": [HI], **fields})[1] == path


def test_bounds_are_those_of_chats() -> None:
    limits = Limits(picture_bytes=10, chat_audio_s=0.001)
    for part in (image(f"data:image/png;base64,{encoded(PNG)}"), sound(encoded(wav(16_000)))):
        with pytest.raises(ClientError):
            say(part, limits=limits)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)
WHOLE: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "x", "name": "y"},
        {"role": "user", "content": [image(f"data:image/png;base64,{encoded(PNG)}")]},
        {"role": "user", "content": [sound(encoded(wav(160)))]},
    ],
    **AUDIO,
    **dict.fromkeys(("stream", "stream_options", "max_tokens", "seed", "temperature", "top_p")),
    **dict.fromkeys(UNSUPPORTED),
}


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return each container in a value, with each of its keys or indices."""
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    inner = [place for key in keys for place in places(value[key])]
    return [(value, key) for key in keys] + inner


@settings(max_examples=200)
@given(st.data())
def test_any_value_at_any_place_is_read_or_refused(data: st.DataObject) -> None:
    body = copy.deepcopy(WHOLE)
    container, key = data.draw(st.sampled_from(places(body)))
    container[key] = data.draw(VALUES)
    with contextlib.suppress(ClientError):
        assert len(read(body).request.messages) == 3


def test_page_names_every_refused_parameter() -> None:
    page = (ROOT / "docs/completions.md").read_text()
    (listed,) = re.findall(r"unless their value changes nothing: (.*?)\. The edge", page, re.DOTALL)
    named = set(re.findall(r"`(\w+)`", listed))
    assert named == {*UNSUPPORTED, *UNSUPPORTED_IN_MESSAGES}
