"""An error names its field once, with the whole path, even if the worker's message names it."""

from __future__ import annotations

import pytest

from duplane.edge.client_errors import name_fault


@pytest.mark.parametrize(
    ("field", "message", "told"),
    [
        ("", "the step failed", "the step failed"),
        ("audio", "too loud", "audio: too loud"),
        ("audio", "audio is empty", "audio is empty"),
        ("audio", "audio: is empty", "audio: is empty"),
        ("video_frames", "video_frames[2] is 9 bytes", "video_frames[2] is 9 bytes"),
        ("config.top_k", "config.top_k is 9", "config.top_k is 9"),
        ("config.top_k", "top_k is 9", "config.top_k is 9"),
        ("sequence", "sequences must rise", "sequence: sequences must rise"),
        ("system_prompt", "the prompt is too long", "system_prompt: the prompt is too long"),
    ],
)
def test_a_fault_names_its_field_once(field: str, message: str, told: str) -> None:
    assert name_fault(field, message) == told
