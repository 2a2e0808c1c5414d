"""Checks the requests of a unit to speak texts. Pure.

A request that is refused does not affect its unit: the unit's delta reports it.
"""

from __future__ import annotations

from collections.abc import Sequence

from duplane.fabric.bounds import MAX_SPEECH_REQUESTS, MAX_SPEECH_TEXT_BYTES
from duplane.fabric.v1 import session_pb2
from duplane.worker.models.interface import ModelConstants
from duplane.worker.models.types import (
    INVALID_FIELD,
    UNSUPPORTED,
    SpeechRequest,
    SpeechResult,
    refused_speech,
    too_many,
)

_MAX_CHECKED = 64  # requests of one unit; a unit with more is bad, and a check must be short


def check_speech(
    requests: Sequence[session_pb2.SpeechRequest], model: ModelConstants
) -> tuple[tuple[SpeechRequest, ...], tuple[SpeechResult, ...]]:
    """Return the valid requests of a unit, and the results of the others.

    Of more requests than may be unfinished, the first ones count. Requests beyond `_MAX_CHECKED`
    are refused without a result.
    """
    accepted: list[SpeechRequest] = []
    results: list[SpeechResult] = []
    for index, request in enumerate(requests[:_MAX_CHECKED]):
        path = f"speech_requests[{index}]"
        if not model.accepts_speech_requests:
            fault = "is not possible: this model speaks only what it chooses"
            results.append(refused_speech(request.number, UNSUPPORTED, fault, path))
        elif index >= MAX_SPEECH_REQUESTS:
            results.append(too_many(request.number))
        elif fault := _text_fault(request.text):
            results.append(refused_speech(request.number, INVALID_FIELD, fault, f"{path}.text"))
        else:
            accepted.append(SpeechRequest(request.number, request.text))
    return tuple(accepted), tuple(results)


def _text_fault(text: str) -> str:
    # A character has at least one byte, so most long texts are refused without encoding them.
    size = len(text) if len(text) > MAX_SPEECH_TEXT_BYTES else len(text.encode())
    if size > MAX_SPEECH_TEXT_BYTES:
        return f"has more than {MAX_SPEECH_TEXT_BYTES} bytes"
    return "" if text.strip() else "is empty"
