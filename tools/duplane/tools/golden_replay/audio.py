"""Replays units/audio_stream and units/audio_offline through the audio encoder alone."""

from __future__ import annotations

import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from numpy.typing import NDArray
from torch import Tensor

from duplane.tools.golden_replay.check import Check, compare, same, worst
from duplane.tools.golden_replay.target import CPU_TARGET, ReplayTarget
from duplane.worker.models.minicpm_o.audio.clip import split_samples
from duplane.worker.models.minicpm_o.audio.encoder import AudioEncoder
from duplane.worker.models.minicpm_o.audio.mel import HOP, MelStream
from duplane.worker.models.minicpm_o.audio.whisper import AudioConfig
from duplane.worker.models.minicpm_o.checkpoint import Checkpoint

TOLERANCE = 1e-4


def checks(golden: Path, target: ReplayTarget = CPU_TARGET) -> Iterator[Check]:
    """Yield all checks of the audio traces that the directory has."""
    units = golden / "units"
    stream, offline = units / "audio_stream.json", units / "audio_offline.json"
    if not (stream.exists() or offline.exists()):
        return
    encoder = load_encoder(golden / "checkpoint", target)
    if stream.exists():
        yield from _stream(encoder, golden, orjson.loads(stream.read_bytes()))
    if offline.exists():
        yield from _offline(encoder, golden, orjson.loads(offline.read_bytes()))


def load_encoder(checkpoint: Path, target: ReplayTarget) -> AudioEncoder:
    """Load the checkpoint's audio front end, for one slot."""
    source = Checkpoint(checkpoint)
    encoder = AudioEncoder(AudioConfig.from_json(source.config), 1, target.device, target.dtype)
    source.load_into(encoder.apm, "apm.")
    source.load_into(encoder.audio_projection_layer, "audio_projection_layer.")
    return encoder


def read_audio(path: Path, sample_count: int) -> NDArray[np.float32]:
    """Return `sample_count` samples, as float32, of an int16 mono file that is repeated."""
    with wave.open(str(path)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
    return np.resize(samples, sample_count).astype(np.float32) / np.float32(32768)


def read_clip(path: Path) -> NDArray[np.float32]:
    """Return all samples of an int16 mono file as float32."""
    with wave.open(str(path)) as file:
        count = file.getnframes()
    return read_audio(path, count)


def _stream(encoder: AudioEncoder, golden: Path, trace: dict[str, Any]) -> Iterator[Check]:
    arrays = np.load(golden / "units" / "audio_stream.npz")
    count, size = trace["n_units"], trace["unit_samples"]
    units = read_audio(golden / "audio" / trace["audio"], count * size).reshape(count, size)

    stream = MelStream(encoder.config.mel_bins, 1, encoder.mel.samples.device)
    mels = [_mel(stream, unit) for unit in units]
    yield same("audio_stream mel_frames", [len(mel) for mel in mels], trace["mel_frames"])
    yield worst(
        "audio_stream mel",
        [
            compare(f"unit {index}", mels[index], arrays[f"mel_u{index}"].T, TOLERANCE)
            for index in map(int, trace["mel_units"])
        ],
    )

    embeds: list[Tensor] = []
    lengths: list[int] = []
    left: list[int] = []
    for unit in units:
        encoder.mel.push(0, unit)
        encoder.mel.take(0)
        embeds.append(encoder.encode([0])[0])
        lengths.append(encoder.cache_length(0))
        left.append(encoder.mel.buffered(0))
    encoder.reset(0)
    yield worst(
        "audio_stream embeds",
        [
            compare(f"unit {index}", embeds[index], arrays[f"embeds_u{index}"], TOLERANCE)
            for index in map(int, trace["embeds_full_units"])
        ],
    )
    every_eighth = torch.stack(embeds)[..., ::8]
    yield compare("audio_stream embeds_c8", every_eighth, arrays["embeds_c8"], TOLERANCE)
    yield same("audio_stream encoder_kv_after", lengths, trace["encoder_kv_after"])
    yield same("audio_stream buffer_left", left, trace["buffer_left"])


@torch.inference_mode()
def _mel(stream: MelStream, unit: NDArray[np.float32]) -> Tensor:
    """Return a unit's features [frames, mel_bins]. A first unit has no frames of left context."""
    stream.push(0, unit)
    stream.take(0)
    features, is_first = stream.features([0])
    return features[0, 2 if is_first[0] else 0 :]


def _offline(encoder: AudioEncoder, golden: Path, trace: dict[str, Any]) -> Iterator[Check]:
    arrays = np.load(golden / "units" / "audio_offline.npz")
    for name, clip in trace.items():
        samples = read_audio(_source(golden / "audio", name), clip["samples"])
        frames = [-(-len(piece) // HOP) for piece in split_samples(encoder.config, samples)]
        yield same(f"audio_offline {name} mel_lens", [frames], clip["mel_lens"])
        embeds = encoder.encode_clip(samples)
        yield same(f"audio_offline {name} n_embeds", len(embeds), clip["n_embeds"])
        recorded = {f"{name}_embeds": embeds, f"{name}_embeds_c8": embeds[:, ::8]}
        if f"{name}_mel" in arrays:
            with torch.inference_mode():
                mel = encoder.mel.log_mel.clip(samples)
            recorded[f"{name}_mel"] = mel.mT[None]
        for key, got in recorded.items():
            if key in arrays:
                yield compare(f"audio_offline {key}", got, arrays[key], TOLERANCE)


def _source(folder: Path, clip: str) -> Path:
    """Return the sound file of a clip.

    The name of a clip may be longer than that of its file: the clip `talk31s` is a part of
    `talk.wav`.
    """
    names = [path for path in folder.glob("*.wav") if clip.startswith(path.stem)]
    return max(names, key=lambda path: len(path.stem))
