"""The model's side of a protocol without turns: its speech, and silence while it listens. Pure."""

from __future__ import annotations

from functools import lru_cache

from duplane.edge.payload.sound_format import SoundFormat
from duplane.fabric.audio import SAMPLE_BYTES
from duplane.fabric.model import ModelFormat
from duplane.fabric.resampler import resampler


class ContinuousSound:
    """Makes one piece of sound of each unit. Together, the pieces are one stream without gaps.

    A unit of speech may be longer than a unit of the model, and the last unit of a turn may be
    shorter. So silence is added only until the stream is as long as all units so far: otherwise the
    client would hear each turn later than the one before.
    """

    def __init__(self, sound: SoundFormat, model: ModelFormat) -> None:
        self._sound = sound
        self._unit_samples = model.samples_of_unit(model.output_rate_hertz)
        # With the prompt of silence, n samples of the model give their share of samples at once.
        self._resampler = resampler(model.output_rate_hertz, sound.rate_hertz, is_prompt=True)
        self._is_silent = True  # the resampler holds only silence
        self._due_count = 0  # samples of all units so far, at the model's rate
        self._given_count = 0  # samples of the stream so far, at the model's rate
        self._sent_count = 0  # samples of the stream so far, at the client's rate
        self._from_hertz, self._to_hertz = model.output_rate_hertz, sound.rate_hertz

    @property
    def sent_ms(self) -> int:
        """The length of the stream so far."""
        return self._sent_count * 1000 // self._to_hertz

    def next_unit(self, speech: bytes) -> bytes:
        """Return the sound of the next unit, in the client's format; empty if nothing is due.

        `speech` is float32 PCM of the model; empty if the model listens.
        """
        self._due_count += self._unit_samples
        missing = max(0, self._due_count - self._given_count - len(speech) // SAMPLE_BYTES)
        self._given_count += len(speech) // SAMPLE_BYTES + missing
        if not speech and self._is_silent:
            whole = self._given_count * self._to_hertz // self._from_hertz
            sound = _silence(self._sound, max(0, whole - self._sent_count))
        else:
            pcm = speech + bytes(missing * SAMPLE_BYTES) if missing else speech
            # The end of the speech comes out with the silence of the next unit, if that is long
            # enough. A unit of silence is.
            self._is_silent = not self._resampler or (not speech and missing >= self._unit_samples)
            sound = self._sound.encode(self._resampler.add(pcm) if self._resampler else pcm)
        self._sent_count += len(sound) // self._sound.sample_bytes
        return sound


@lru_cache(maxsize=16)  # almost all units of a format have the same silence
def _silence(sound: SoundFormat, count: int) -> bytes:
    return sound.encode(bytes(count * SAMPLE_BYTES))
