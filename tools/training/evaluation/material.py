"""The voices, recordings and rooms of an evaluation. Training uses five of the rooms, else none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from random import Random
from typing import Literal, NoReturn

from duplane.tools.command import CommandError
from duplane.worker.models.minicpm_o.types import INPUT_SAMPLE_RATE
from duplane.worker.models.types import FloatArray
from training.answers import speak_answer
from training.corpus import festival, neural
from training.corpus.clips import kept_clip, read_clip, resample, trimmed
from training.corpus.recording import resampled, synthesise
from training.corpus.voices import draw_speaker
from training.sources.fetching import find_source
from training.sources.recordings import Recordings, Takes, recordings_of
from training.sources.room_files import read_room, rooms_of

Engine = Literal["espeak", "flite", "festival", "kokoro"]
Voice = Callable[[str], FloatArray]
"""Speaks a text at 16 kHz, without silence around it."""

_WOMAN = Path("usr/share/asterisk/sounds/en_US_f_Allison")
_MAN = Path("usr/share/sounds/linphone/hello16000.wav")
_SAY = Path("usr/share/klettres/en/syllab/say.ogg")
_READ = Path("usr/share/pocketsphinx/test/data")
_PHRASES = {
    "hello": ("hello",),
    "goodbye": ("goodbye", "vm-goodbye"),
    "thank you": ("privacy-thankyou",),
}
_BYE_S = (9.0, 9.95)
"""Where the man of the test call says "bye"."""
_OTHER = (
    *("goforward.raw", "something.raw", "numbers.raw"),
    *("cards/002.wav", "cards/003.wav", "cards/005.wav"),
    *(f"librivox/sense_and_sensibility_01_austen_64kb-{name}.wav" for name in ("0880", "0930")),
)
_OTHER_CALL_S = ((0.5, 4.2), (4.5, 8.6))
_MOST_S = 6.0


class MissingError(CommandError):
    """A row needs a source that is missing."""


@dataclass
class Material:
    """Finds and speaks the material. `cache` has the sources and keeps slow synthesis.

    `recordings` is a folder of words that people speak. The methods raise MissingError, which names
    what is missing.
    """

    cache: Path
    recordings: Path | None = None
    _kokoro: neural.Kokoro | None = field(default=None, init=False)

    def voice(self, engine: Engine, chance: Random) -> Voice:
        """Draw a voice that training does not use."""
        if engine == "festival":
            name, stretch = chance.choice(festival.HELD_OUT_VOICES), chance.uniform(0.85, 1.2)
            return lambda text: self._kept(
                f"festival {name} {stretch:.3f} {text}",
                lambda: _at_input_rate(*festival.speak(text, name, stretch)),
            )
        if engine == "kokoro":
            kokoro = self._neural()
            name, speed = chance.choice(neural.HELD_OUT_VOICES), chance.uniform(0.8, 1.15)
            return lambda text: self._kept(
                f"kokoro {name} {speed:.3f} {text}",
                lambda: _at_input_rate(kokoro.speak(text, name, speed), neural.RATE),
            )
        speaker = draw_speaker(chance, flite_share=float(engine == "flite"), is_held_out=True)
        return lambda text: trimmed(
            resampled(synthesise(text, speaker), speaker.warp, INPUT_SAMPLE_RATE)
        )

    def _kept(self, name: str, make: Callable[[], FloatArray]) -> FloatArray:
        return trimmed(kept_clip(self.cache / "spoken", name, make))

    def _neural(self) -> neural.Kokoro:
        if self._kokoro is None:
            self._kokoro = neural.Kokoro(self._source("kokoro"))
        return self._kokoro

    def _source(self, name: str) -> Path:
        folder = find_source(name, self.cache, "judging")
        if folder is None:
            raise MissingError(f"the source {name} is not fetched")
        return folder

    def digits(self) -> Mapping[str, Takes]:
        """Return the digits of each speaker whom training must not hear."""
        return self._recorded.digits or _missing("no digits of one speaker")

    def words(self) -> Takes:
        """Return words of many speakers whom training must not hear."""
        return self._recorded.words or _missing("no words of many speakers")

    @cached_property
    def _recorded(self) -> Recordings:
        if self.recordings is None:
            raise MissingError("no --recordings are named")
        return recordings_of(self.recordings, "judging")

    def take(self, path: Path) -> FloatArray:
        """Return one recording of a word."""
        return trimmed(read_clip(path))

    def say(self) -> FloatArray:
        """Return the word "say", spoken by a person."""
        return trimmed(read_clip(self._source("klettres") / _SAY))

    def woman(self, name: str) -> FloatArray:
        """Return a prompt of the telephone system by its name, for example `digits/7`."""
        return trimmed(read_clip(self._source("asterisk") / _WOMAN / f"{name}.wav"))

    def phrases(self) -> Sequence[tuple[str, FloatArray]]:
        """Return questions of the domain that people recorded, with their texts."""
        found = [(text, self.woman(name)) for text, names in _PHRASES.items() for name in names]
        return [*found, ("bye", _part(read_clip(self._source("linphone") / _MAN), _BYE_S))]

    def other_sentences(self) -> Sequence[FloatArray]:
        """Return sentences of people outside the domain."""
        folder = self._source("pocketsphinx") / _READ
        call = read_clip(self._source("linphone") / _MAN)
        found = [trimmed(read_clip(folder / name)) for name in _OTHER]
        found += [_part(call, between) for between in _OTHER_CALL_S]
        return [clip for clip in found if len(clip) <= _MOST_S * INPUT_SAMPLE_RATE]

    def room(self, name: str) -> FloatArray:
        """Return the recording of a room, with an RMS of 0.1."""
        found = rooms_of(self.cache, "judging")
        if not found:
            raise MissingError("the source rooms is not fetched")
        return read_room(found[name])


def _missing(what: str) -> NoReturn:
    raise MissingError(f"the recordings have {what}")


def _at_input_rate(samples: FloatArray, rate: int) -> FloatArray:
    return resample(samples, rate, INPUT_SAMPLE_RATE)


def _part(samples: FloatArray, between_s: tuple[float, float]) -> FloatArray:
    first, last = (int(second * INPUT_SAMPLE_RATE) for second in between_s)
    return trimmed(samples[first:last])


@cache
def answer_units(text: str) -> int:
    """Return the number of units in which the default model should speak an answer."""
    return len(speak_answer(text).units) if text else 0
