"""Replays token2wav/: compares the streaming vocoder with the values of the reference.

Waves have larger tolerances than other values, because the phase of the source adds up the rounding
errors of the pitch over a second. Even the reference itself differs by up to 2e-3 on a CPU of
another type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from numpy.typing import NDArray

from duplane.tools.golden_replay.check import Check, compare, same
from duplane.tools.golden_replay.target import CPU_TARGET, ReplayTarget
from duplane.worker.models.minicpm_o.vocoder.types import VocoderChunk, VocoderOptions, VocoderVoice
from duplane.worker.models.minicpm_o.vocoder.vocoder import Vocoder
from duplane.worker.models.minicpm_o.vocoder.voice import prompt_mel

TOLERANCE = 1e-3
# The tolerance for waves from the recorded mel. Errors up to 1e-4 were measured, on another
# type of CPU up to 2e-3.
WAVE_TOLERANCE = 5e-3
# The tolerance for waves from our own mel. An error of 3e-6 in the mel changes the pitch just as
# little, but the phase adds up these changes over a second. Errors up to 2e-3 were measured, also
# for the reference on another CPU.
OWN_MEL_TOLERANCE = 1e-2
OWN_MEL_NOTE = "from our own mel; the phase sums rounding errors"

Arrays = Mapping[str, NDArray[Any]]


def checks(golden: Path, target: ReplayTarget = CPU_TARGET) -> Iterator[Check]:
    """Yield the checks of `golden`/token2wav; none if this folder is absent."""
    directory = golden / "token2wav"
    if not (directory / "golden.json").exists():
        return
    recorded: dict[str, Any] = orjson.loads((directory / "golden.json").read_bytes())
    with np.load(directory / "golden.npz") as file:
        arrays = {name: file[name] for name in file.files}
    voice = VocoderVoice(
        arrays["prompt_tokens"][0], arrays["prompt_mel"][0], arrays["speaker_embedding"][0]
    )
    # The mel of a voice is computed on the CPU, also if the model runs on a GPU.
    mel = prompt_mel(torch.tensor(arrays["prompt_wav_24k"]), len(voice.prompt_mel))
    yield _near("prompt_mel", mel[None], arrays)
    vocoder = _load(directory, recorded, arrays, target)
    yield same("token2wav cfg_rate", vocoder.flow.decoder.rate, recorded["cfg_rate"])
    vocoder.prime(0, voice, seed=0)
    yield from _setup_checks(vocoder, arrays, len(voice.prompt_mel))
    yield from _chunk_checks(vocoder, recorded, arrays, target)
    vocoder.prime(0, voice, seed=0)
    yield from _own_mel_checks(vocoder, recorded, arrays)
    vocoder.reset(0)
    yield from _offline_checks(vocoder, voice, recorded, arrays, target)
    yield same("token2wav slot_is_clean", vocoder.is_clean(0), True)


def _load(
    directory: Path, recorded: Mapping[str, Any], arrays: Arrays, target: ReplayTarget
) -> Vocoder:
    """Load a vocoder for one slot.

    Its flow uses the recorded noise, and its source uses no noise.
    """
    frames = arrays["prompt_mel"].shape[1] + arrays["offline_mel"].shape[2]
    noise = torch.tensor(arrays["noise"][0].T)
    # No recorded value depends on the noise of frames after the recorded ones, but the table needs
    # rows for these frames.
    unused = torch.zeros(frames + 1000, noise.shape[1])
    return Vocoder.load(
        directory,
        slot_count=1,
        device=target.device_name,
        options=VocoderOptions(
            steps=recorded["n_timesteps"],
            max_prompt_frames=frames,
            noise=torch.cat((noise, unused)),
            has_source_noise=False,
        ),
    )


def _setup_checks(vocoder: Vocoder, arrays: Arrays, frames: int) -> Iterator[Check]:
    """Compare the caches after priming, in the layout of the reference."""
    base = vocoder.base
    stride = vocoder.flow.stride

    def attention(cache: torch.Tensor, count: int) -> torch.Tensor:
        """Return the first `count` columns of slot 0, with keys and values joined.

        Maps `[slots, ..., 2, heads, columns, width]` to `[..., heads, count, 2 * width]`.
        """
        keys, values = cache[0, ..., :count, :].unbind(-4)
        return torch.cat((keys, values), -1)

    tails = torch.cat((base.lookahead_tail[0], base.upsample_tail[0])).T[None]
    yield _near("setup_conformer_cnn_cache", tails, arrays)
    tokens = attention(base.token_attention, frames // stride).repeat(1, 1, stride, 1)
    conformer = torch.cat((tokens, attention(base.frame_attention, frames)))[:, None]
    yield _near("setup_conformer_att_cache", conformer, arrays)
    # The dimensions change from [layers, convolutions, columns, pair, width] to
    # [layers, pair, convolutions * width, columns].
    tails = base.estimator_tails[0, 0].permute(0, 3, 1, 4, 2).flatten(2, 3)
    yield _near("setup_estimator_cnn_cache_step0", tails, arrays)
    estimator = attention(base.estimator_attention, frames)[:, -1]
    for name, step in (("step0", 0), ("laststep", -1)):
        pair = estimator[step].reshape(2, -1, *estimator.shape[-2:])
        yield _near(f"setup_estimator_att_cache_{name}_lastlayer", pair, arrays)


def _chunk_checks(
    vocoder: Vocoder, recorded: Mapping[str, Any], arrays: Arrays, target: ReplayTarget
) -> Iterator[Check]:
    """Stream the recorded chunks: mel from tokens, wave from recorded mel, cache lengths."""
    for number, entry in enumerate(recorded["chunks"]):
        chunk = VocoderChunk(0, entry["tokens"], entry["last"])
        before = vocoder.cached_frames(0)
        mel = vocoder.encode([chunk])[0]
        name = f"c{number}"
        yield _near(f"{name}_mel", mel.T[None], arrays)
        yield same(f"token2wav {name}_mel_frames", len(mel), entry["mel_frames"])
        yield from _length_checks(vocoder, name, entry, before + len(mel))
        recorded_mel = target.tensor(arrays[f"{name}_mel"][0].T)
        samples = vocoder.decode_mel([chunk], [recorded_mel])[0]
        yield same(f"token2wav {name}_samples", len(samples), entry["samples"])
        if f"{name}_wav" in arrays:
            yield _near(f"{name}_wav", samples[None], arrays)


def _length_checks(
    vocoder: Vocoder, name: str, entry: Mapping[str, Any], before_trim: int
) -> Iterator[Check]:
    """Compare the number of cached frames. After the end of a turn our vocoder keeps none."""
    lengths = {"before": before_trim, "after": vocoder.cached_frames(0)}
    if entry["last"]:
        del lengths["after"]
    for when, length in lengths.items():
        shapes = entry[f"caches_{when}_trim"]
        kept = [shapes["conformer_att_cache"][3], shapes["estimator_att_cache"][4]]
        yield same(f"token2wav {name}_frames_{when}_trim", [length, length], kept)


def _own_mel_checks(
    vocoder: Vocoder, recorded: Mapping[str, Any], arrays: Arrays
) -> Iterator[Check]:
    """Stream the chunks again, from tokens to wave without the recorded mel."""
    for number, entry in enumerate(recorded["chunks"]):
        samples = vocoder.decode([VocoderChunk(0, entry["tokens"], entry["last"])])[0]
        if f"c{number}_wav" in arrays:
            yield _loosely(f"c{number}_wav", samples[None], arrays)


def _offline_checks(
    vocoder: Vocoder,
    voice: VocoderVoice,
    recorded: Mapping[str, Any],
    arrays: Arrays,
    target: ReplayTarget,
) -> Iterator[Check]:
    """Compare an utterance that is generated in one piece instead of in chunks."""
    mel = vocoder.render_mel(voice, recorded["offline_tokens"]).T[None]
    yield _near("offline_mel", mel, arrays)
    hift = vocoder.stream.hift
    with torch.inference_mode():
        known = target.tensor(arrays["offline_mel"])
        yield _near("offline_f0", hift.f0_predictor(known), arrays)
        yield _near("offline_wav", hift(known, hift.source(known, None)), arrays)
        yield _loosely("offline_wav", hift(mel, hift.source(mel, None)), arrays)


def _near(name: str, got: Any, arrays: Arrays) -> Check:
    tolerance = WAVE_TOLERANCE if name.endswith("_wav") else TOLERANCE
    return compare(f"token2wav {name}", got, arrays[name], tolerance)


def _loosely(name: str, got: Any, arrays: Arrays) -> Check:
    check = compare(f"token2wav {name}_own_mel", got, arrays[name], OWN_MEL_TOLERANCE)
    return replace(check, note=check.note or OWN_MEL_NOTE)
