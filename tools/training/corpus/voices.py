"""The voices of the synthesisers: voices for training, and other voices for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

ACCENTS = ("en", "en-us", "en-gb-scotland", "en-gb-x-rp", "en-029")
HELD_OUT_ACCENTS = ("en-us-nyc", "en-gb-x-gbclan", "en-gb-x-gbcwmd")

_VARIANTS = """
    Alex Andrea Andy Annie Denis Diogo Gene Gene2 Henrique Lee Marco Mario Michael adam anika
    announcer antonio aunty benjamin boris caleb ed edward edward2 f1 f2 f3 f5 grandpa iven3
    iven4 john kaukovalta klatt klatt2 klatt4 klatt6 m1 m2 m3 m4 m6 m7 m8 marcelo michel miguel
    norbert pablo pedro quincy rob robert sandro steph steph3 victor zac
"""
VARIANTS = tuple(_VARIANTS.split())
_HELD_OUT_VARIANTS = """
    m5 Alicia belinda david linda paul shelby travis Jacky max Mike
"""
HELD_OUT_VARIANTS = tuple(_HELD_OUT_VARIANTS.split())
_FAMILIES = """
    iven iven2 iven3 iven4, Hugo Henrique miguel michel, Nguyen m7 m8, f4 aunty,
    klatt klatt2 klatt3 klatt4 klatt5 klatt6, gustave Michael Mario, steph steph2 steph3,
    grandma grandpa
"""
FAMILIES = tuple(frozenset(family.split()) for family in _FAMILIES.split(","))
"""Variants of espeak that sound alike, because most of their parameters are the same. A family is
either for training or unused."""
FLITE_VOICES = ("kal16", "awb", "rms")
HELD_OUT_FLITE_VOICES = ("slt",)

ASSISTANT_RATE = 175
ASSISTANT_PITCH = 45


@dataclass(frozen=True)
class Speaker:
    """A voice, and its rate and pitch.

    `rate` is in words per minute; `pitch` and `pitch_range` are espeak's numbers up to 100. A
    `warp` above 1 lowers and slows the speech, like a longer vocal tract.
    """

    engine: str
    voice: str
    rate: int = 170
    pitch: int = 50
    pitch_range: int = 50
    warp: float = 1.0


ASSISTANT = Speaker("espeak", "en-us", rate=ASSISTANT_RATE, pitch=ASSISTANT_PITCH)


def draw_speaker(chance: Random, *, flite_share: float, is_held_out: bool = False) -> Speaker:
    """Draw a speaker for training, or with `is_held_out` one that does not occur in training."""
    if chance.random() < flite_share:
        names = HELD_OUT_FLITE_VOICES if is_held_out else FLITE_VOICES
        rate = chance.randint(140, 200)
        return Speaker("flite", chance.choice(names), rate, warp=chance.uniform(0.92, 1.1))
    accents: Sequence[str] = HELD_OUT_ACCENTS if is_held_out else ACCENTS
    variants = HELD_OUT_VARIANTS if is_held_out else VARIANTS
    return Speaker(
        "espeak",
        f"{chance.choice(accents)}+{chance.choice(variants)}",
        rate=chance.randint(115, 205),
        pitch=chance.randint(12, 88),
        pitch_range=chance.randint(20, 85),
        warp=1.0 if is_held_out else chance.uniform(0.86, 1.18),
    )
