"""The session object of dialect E: what a change names is merged, and what is fixed stays."""

from __future__ import annotations

from typing import Any

import pytest

from duplane.edge.client_errors import ClientError
from duplane.edge.dialects.e_items import Item, Part
from duplane.edge.dialects.e_settings import (
    FIXED_BY_OPENING,
    FIXED_BY_SOUND,
    SessionSettings,
    read_change,
    with_history,
)
from duplane.edge.dialects.openai_settings import DEFAULT_PROMPT
from duplane.edge.payload.fields import Fields
from duplane.edge.settings import Limits
from duplane.fabric.v1 import session_pb2

SEMANTIC = {
    "type": "semantic_vad",
    "eagerness": "auto",
    "create_response": True,
    "interrupt_response": True,
}


def changed(
    session: dict[str, Any],
    before: SessionSettings | None = None,
    fixed: frozenset[str] = frozenset(),
) -> SessionSettings:
    change = read_change(Fields(session, "session"), Limits())
    return (before or SessionSettings("m")).changed(change, fixed)


def told(session: dict[str, Any], *path: str) -> Any:
    value: Any = changed(session).to_json()
    for name in path:
        value = value[name]
    return value


def test_what_the_model_cannot_do_is_shown_as_absent() -> None:
    asked = {
        "type": "realtime",
        "tools": [{"type": "function", "name": "f"}],
        "tool_choice": "required",
        "audio": {
            "input": {"transcription": {"model": "x"}, "noise_reduction": {"type": "near_field"}},
            "output": {"speed": 1.5},
        },
        "tracing": "auto",
        "prompt": {"id": "p"},
        "temperature": 0.3,
    }
    assert changed(asked).to_json() == SessionSettings("m").to_json()
    assert SessionSettings("m").to_json() == {
        "model": "m",
        "output_modalities": ("audio",),
        "instructions": DEFAULT_PROMPT,
        "audio": {
            "input": {
                "format": {"type": "audio/pcm", "rate": 24000},
                "transcription": None,
                "noise_reduction": None,
                "turn_detection": SEMANTIC,
            },
            "output": {
                "format": {"type": "audio/pcm", "rate": 24000},
                "voice": "default",
                "speed": 1.0,
            },
        },
        "tools": [],
        "tool_choice": "auto",
        "max_output_tokens": "inf",
        "tracing": None,
        "truncation": "auto",
        "prompt": None,
    }


@pytest.mark.parametrize(
    ("asked", "path", "value"),
    [
        ({"instructions": "x"}, ["instructions"], "x"),
        ({"output_modalities": ["text"]}, ["output_modalities"], ("text",)),
        ({"output_modalities": ["text", "audio"]}, ["output_modalities"], ("audio",)),
        ({"max_output_tokens": 7}, ["max_output_tokens"], 7),
        ({"max_output_tokens": "inf"}, ["max_output_tokens"], "inf"),
        (
            {"audio": {"input": {"format": {"type": "audio/pcmu"}}}},
            ["audio", "input", "format"],
            {"type": "audio/pcmu"},
        ),
        (
            {"audio": {"output": {"format": {"type": "audio/pcma"}}}},
            ["audio", "output", "format"],
            {"type": "audio/pcma"},
        ),
        ({"audio": {"output": {"voice": "marin"}}}, ["audio", "output", "voice"], "marin"),
        (
            {"audio": {"output": {"voice": {"id": "v"}}}},
            ["audio", "output", "voice"],
            {"id": "v"},
        ),
        (
            {"audio": {"input": {"turn_detection": {"type": "semantic_vad", "eagerness": "low"}}}},
            ["audio", "input", "turn_detection", "eagerness"],
            "low",
        ),
        (
            {
                "audio": {
                    "input": {"turn_detection": {"type": "semantic_vad", "create_response": False}}
                }
            },
            ["audio", "input", "turn_detection"],
            SEMANTIC,
        ),
    ],
)
def test_a_setting_is_as_given(asked: dict[str, Any], path: list[str], value: object) -> None:
    assert told(asked, *path) == value


def test_only_named_fields_change() -> None:
    first = changed({"instructions": "x", "audio": {"output": {"voice": "v"}}})
    second = changed({"audio": {"output": {"format": {"type": "audio/pcmu"}}}}, first)
    before: dict[str, Any] = first.to_json()
    after: dict[str, Any] = second.to_json()
    assert after["instructions"] == "x"
    output = {"format": {"type": "audio/pcmu"}, "voice": "v", "speed": 1.0}
    assert after["audio"] == {"input": before["audio"]["input"], "output": output}


def test_what_has_begun_stays() -> None:
    before = SessionSettings("m")
    sound = {"format": {"type": "audio/pcmu"}, "voice": "v"}
    asked = {"instructions": "x", "output_modalities": ["text"], "audio": {"output": sound}}
    assert changed(asked, before, FIXED_BY_OPENING) == before
    after = changed({**asked, "max_output_tokens": 5}, before, FIXED_BY_OPENING)
    assert after.max_output_tokens == 5
    heard = changed(asked, before, FIXED_BY_SOUND)
    assert (heard.instructions, heard.modalities) == ("x", ("text",))
    assert heard.output_sound == before.output_sound


@pytest.mark.parametrize(
    ("asked", "fault"),
    [
        ({"type": "transcription"}, "session.type: must be realtime"),
        ({"instructions": 7}, "session.instructions: must be a string"),
        ({"output_modalities": []}, 'session.output_modalities: must be ["audio"]'),
        ({"output_modalities": ["video"]}, 'session.output_modalities: must be ["audio"]'),
        ({"max_output_tokens": 0}, "session.max_output_tokens: must be a whole number"),
        ({"audio": 7}, "session.audio: must be an object"),
        (
            {"audio": {"input": {"format": {"type": "audio/opus"}}}},
            "session.audio.input.format.type: must be one of",
        ),
        (
            {"audio": {"output": {"format": {"type": "audio/pcm", "rate": 16000}}}},
            "session.audio.output.format.rate: must be 24000",
        ),
        (
            {"audio": {"input": {"turn_detection": {"type": "x"}}}},
            "session.audio.input.turn_detection.type: must be",
        ),
        (
            {"audio": {"input": {"turn_detection": {"type": "semantic_vad", "eagerness": "x"}}}},
            "session.audio.input.turn_detection.eagerness: must be",
        ),
    ],
)
def test_a_malformed_setting_is_refused_by_its_name(asked: dict[str, Any], fault: str) -> None:
    with pytest.raises(ClientError) as refusal:
        changed(asked)
    assert refusal.value.message.startswith(fault)


def test_text_only_needs_no_sound_of_the_model() -> None:
    config = changed({"output_modalities": ["text"]}).to_open((), Limits()).config
    assert config.generate_audio is False
    assert config.HasField("generate_audio")
    assert config.context_window == session_pb2.CONTEXT_WINDOW_BASIC
    assert not changed({}).to_open((), Limits()).config.HasField("generate_audio")


def said(role: str, text: str) -> Item:
    return Item("i", role=role, parts=(Part("input_text", text),))


def test_a_prompt_has_the_newest_messages() -> None:
    items = [said("user", "a" * 50), Item("f", "function_call"), said("user", "b"), said("x", "")]
    assert with_history("Be brief.", items, 1000).splitlines()[:4] == [
        "Be brief.",
        "",
        "The conversation so far:",
        f"user: {'a' * 50}",
    ]
    bounded = with_history("Be brief.", items, 60)
    assert bounded.splitlines()[3:] == ["user: b"]
    assert len(bounded.encode()) <= 60
    assert with_history("Be brief.", items, 20) == "Be brief."
    assert with_history(" ", [], 20) == DEFAULT_PROMPT
