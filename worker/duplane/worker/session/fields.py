"""Checks of fields that `Open` and `ChatRequest` have in common, and their refusals."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from duplane.fabric.audio import AudioError, Samples, samples_from_pcm
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import session_pb2
from duplane.worker.models.types import DecodeMode

DECODE_MODES: Mapping[int, DecodeMode] = {
    session_pb2.DECODE_MODE_SAMPLING: DecodeMode.SAMPLING,
    session_pb2.DECODE_MODE_GREEDY: DecodeMode.GREEDY,
}

LEAST_VOICE_S = 0.1
"""Least duration of a voice. A shorter clip is ignored and named in `ignored_fields`."""


def invalid(path: str, fault: str) -> FabricError:
    """Return the error that refuses the field at `path`."""
    return FabricError(Reason.INVALID_FIELD, f"{path} {fault}", field=path)


def read_numbers(
    config: session_pb2.DuplexConfig | session_pb2.ChatConfig,
    bounds: Mapping[str, tuple[float, float]],
    model_names: Mapping[str, str],
) -> dict[str, float]:
    """Return the numbers that `config` sets, under the model's names.

    Raises FabricError INVALID_FIELD for a number that is out of its bounds.
    """
    chosen: dict[str, float] = {}
    for name, (low, high) in bounds.items():
        if not config.HasField(name):  # pyright: ignore[reportArgumentType] - names are checked
            continue
        value: float = getattr(config, name)
        if not low <= value <= high:
            raise invalid(f"config.{name}", f"is {value:g}, not between {low:g} and {high:g}")
        chosen[model_names.get(name, name)] = value
    return chosen


def read_samples(path: str, pcm: bytes) -> Samples:
    """Return the samples in `pcm` as a copy, because torch needs writable memory.

    Raises FabricError INVALID_FIELD.
    """
    try:
        return np.array(samples_from_pcm(pcm))
    except AudioError as error:
        raise invalid(path, str(error)) from None


def read_voice(path: str, pcm: bytes, rate_hertz: int, max_s: float) -> Samples | None:
    """Return the samples of a voice, or None if the clip is too short to be a voice.

    Raises FabricError INVALID_FIELD.
    """
    samples = read_samples(path, pcm)
    seconds = samples.size / rate_hertz
    if seconds < LEAST_VOICE_S:
        return None
    if seconds > max_s:
        raise invalid(path, f"lasts {seconds:.1f} s, more than {max_s:g} s")
    return samples
