"""Converts a client's unit to the record of a checked unit, or to the answer that refuses it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from duplane.fabric.audio import (
    MAX_EXPONENT,
    AudioError,
    Samples,
    samples_from_pcm,
)
from duplane.fabric.bounds import MAX_NOTE_BYTES
from duplane.fabric.durations import to_wall_ns
from duplane.fabric.errors import Reason
from duplane.fabric.unit_audio import pcm_of
from duplane.fabric.v1 import session_pb2
from duplane.worker.engine.events import FailedUnit
from duplane.worker.engine.unit_record import UnitRecord
from duplane.worker.models.interface import ModelConstants
from duplane.worker.models.types import Unit
from duplane.worker.session.speech_check import check_speech
from duplane.worker.settings import SessionLimits

UNIT_TOO_LONG = "UNIT_TOO_LONG"
PAUSED = "PAUSED"


class _BadUnitError(Exception):
    def __init__(self, message: str, field: str = "", reason: str = Reason.INVALID_FIELD) -> None:
        super().__init__(message)
        self.field = field
        self.reason = reason


def check_unit(
    request: session_pb2.Unit,
    limits: SessionLimits,
    model: ModelConstants,
    *,
    slot: int,
    last_sequence: int,
    is_omni: bool,
    is_paused: bool,
    may_be_silent: bool = False,
) -> UnitRecord | FailedUnit:
    """Return the unit's record with its time of arrival, or the answer that names the bad field.

    The worker checks samples only here, so the audio of every `Unit` is finite float32. Only with
    `may_be_silent` may a unit have neither sound nor pictures.
    """
    received_s, receive_time_ns = time.monotonic(), time.time_ns()
    trace = request.trace if request.HasField("trace") else None
    try:
        if request.sequence <= last_sequence:
            fault = f"sequence is {request.sequence}, not above {last_sequence}"
            raise _BadUnitError(fault, "sequence")
        if is_paused:
            raise _BadUnitError("the session is paused", reason=PAUSED)
        max_slices = request.max_slice_count if request.HasField("max_slice_count") else 1
        if request.video_frames or max_slices != 1:
            _check_pictures(request.video_frames, max_slices, limits, is_omni=is_omni)
        _check_rest(request)
        name, samples = _samples_of(request)
        if not (samples.size or request.video_frames or may_be_silent):
            raise _BadUnitError(f"{name} is empty", name)
        most_s = limits.max_unit_s * model.unit_s
        if (seconds := samples.size / model.input_hertz) > most_s:
            fault = f"{name} lasts {seconds:.3g} s, more than {most_s:.3g} s"
            raise _BadUnitError(fault, name, UNIT_TOO_LONG)
    except _BadUnitError as error:
        sequence, fault = request.sequence, str(error)
        return FailedUnit(sequence, error.reason, fault, error.field, receive_time_ns, trace)
    speech, results = (), ()
    if request.speech_requests:
        speech, results = check_speech(request.speech_requests, model)
    return UnitRecord(
        Unit(
            slot,
            samples,
            request.force_listen,
            tuple(request.video_frames),
            max_slices,
            request.sequence,
            speech=speech,
            speech_results=results,
        ),
        received_s,
        receive_time_ns,
        to_wall_ns(request.receive_time),
        trace,
        received_s,
    )


def _check_rest(request: session_pb2.Unit) -> None:
    if (size := len(request.edge_note)) > MAX_NOTE_BYTES:
        fault = f"edge_note is {size} bytes, more than {MAX_NOTE_BYTES}"
        raise _BadUnitError(fault, "edge_note")
    if request.forced_token_ids:
        fault = "forced_token_ids are not served by this worker"
        raise _BadUnitError(fault, "forced_token_ids")


def _samples_of(request: session_pb2.Unit) -> tuple[str, Samples]:
    """Return the name of the field that has the unit's sound, and the sound."""
    if request.audio_int16 and request.audio:
        raise _BadUnitError("audio and audio_int16 are both set", "audio")
    if len(request.audio_int16) % 2:
        raise _BadUnitError("audio_int16 is not a whole number of samples", "audio_int16")
    if not 0 <= request.audio_exponent <= MAX_EXPONENT:
        raise _BadUnitError(f"audio_exponent must be 0 to {MAX_EXPONENT}", "audio_exponent")
    name = "audio_int16" if request.audio_int16 else "audio"
    try:
        return name, samples_from_pcm(pcm_of(request))
    except AudioError as error:
        raise _BadUnitError(f"{name}: {error}", name) from None


def _check_pictures(
    frames: Sequence[bytes], max_slices: int, limits: SessionLimits, *, is_omni: bool
) -> None:
    """Refuse too many frames, frames that are too large, and a wrong number of slices."""
    if frames and not is_omni:
        raise _BadUnitError("video_frames can only come in an omni session", "video_frames")
    if len(frames) > limits.frame_count:
        fault = f"video_frames are {len(frames)}, more than {limits.frame_count}"
        raise _BadUnitError(fault, "video_frames")
    for index, frame in enumerate(frames):
        if len(frame) > limits.max_frame_bytes:
            fault = f"is {len(frame)} bytes, more than {limits.max_frame_bytes}"
            raise _BadUnitError(f"video_frames[{index}] {fault}", "video_frames")
    if not 1 <= max_slices <= limits.max_slice_count:
        fault = f"max_slice_count is {max_slices}, not between 1 and {limits.max_slice_count}"
        raise _BadUnitError(fault, "max_slice_count")
