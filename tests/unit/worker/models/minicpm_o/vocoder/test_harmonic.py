"""The vocoder with one voice: chunks equal whole turns, and slots do not affect each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import orjson
import pytest
import safetensors.torch
import torch
from support.model.shapes import Shapes

from duplane.worker.models.minicpm_o.checkpoint import CheckpointError
from duplane.worker.models.minicpm_o.vocoder import harmonic
from duplane.worker.models.minicpm_o.vocoder.harmonic import (
    HarmonicConfig,
    HarmonicNetwork,
    HarmonicVocoder,
)
from duplane.worker.models.minicpm_o.vocoder.types import VocoderChunk, VocoderError
from duplane.worker.models.types import FloatArray

CONFIG = HarmonicConfig(vocabulary=12, mel_bins=8, width=16, silence_token_id=0, lookahead=3)
TOKEN_SAMPLES = 960
TURN = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3]


@pytest.fixture
def network() -> HarmonicNetwork:
    torch.manual_seed(1)
    made = HarmonicNetwork(CONFIG)
    mel = torch.randn(12, 2, 8) - 6.0
    pitch = 4.5 + 0.3 * torch.rand(12, 2, 1)
    voiced = (torch.arange(12) % 3 > 0).float().view(12, 1, 1).expand(12, 2, 1)
    made.table.copy_(torch.cat((mel, pitch, voiced), -1))
    return made


def decoded(vocoder: HarmonicVocoder, slot: int, cuts: Sequence[int]) -> FloatArray:
    """Decode the turn in chunks that end at `cuts`; the last chunk has all remaining tokens."""
    vocoder.prime(slot, CONFIG.voice)
    starts, pieces = [0, *cuts], list[FloatArray]()
    for start, stop in zip(starts, cuts, strict=False):
        ahead = TURN[start : stop + CONFIG.lookahead]
        pieces += vocoder.decode([VocoderChunk(slot, ahead, is_last=False)])
    pieces += vocoder.decode([VocoderChunk(slot, TURN[starts[-1] :], is_last=True)])
    return np.concatenate(pieces)


def test_chunks_join_to_the_samples_of_the_whole_turn(network: HarmonicNetwork) -> None:
    vocoder = HarmonicVocoder(network, slot_count=1)
    whole = decoded(vocoder, 0, [])
    assert len(whole) == TOKEN_SAMPLES * len(TURN)
    assert np.abs(whole).max() > 1e-3
    for cuts in ([10], [5, 12, 20]):
        np.testing.assert_allclose(decoded(vocoder, 0, cuts), whole, atol=2e-4)


def test_slots_do_not_change_each_other(network: HarmonicNetwork) -> None:
    vocoder = HarmonicVocoder(network, slot_count=3)
    alone = decoded(vocoder, 1, [12])
    chunks = [
        VocoderChunk(0, TURN[:9], is_last=False),
        VocoderChunk(1, TURN[:15], is_last=False),
        VocoderChunk(2, TURN[:4], is_last=True),
    ]
    for slot in range(3):
        vocoder.prime(slot, CONFIG.voice)
    together = vocoder.decode_mel(chunks, vocoder.encode(chunks))
    np.testing.assert_allclose(together[1], alone[: 12 * TOKEN_SAMPLES], atol=1e-5)
    assert [len(samples) // TOKEN_SAMPLES for samples in together] == [6, 12, 4]


def test_batches_have_few_shapes_on_a_gpu_and_the_same_samples(network: HarmonicNetwork) -> None:
    vocoder = HarmonicVocoder(network, slot_count=5)
    exact = [decoded(vocoder, slot, [5, 12, 20]) for slot in range(3)]
    vocoder.has_buckets = True  # as on a CUDA device
    with Shapes("fft") as warm:
        vocoder.warm_up()
    assert all(vocoder.is_clean(slot) for slot in (3, 4))
    with Shapes("fft") as running:
        for slot in range(3):
            np.testing.assert_allclose(decoded(vocoder, slot, [5, 12, 20]), exact[slot], atol=1e-5)
        for slots in ((0, 1, 2), (0, 2), (0, 1, 2, 3, 4)):
            for slot in slots:
                vocoder.prime(slot, CONFIG.voice)
            chunks = [VocoderChunk(slot, TURN[: 15 - slot], is_last=False) for slot in slots]
            together = vocoder.decode_mel(chunks, vocoder.encode(chunks))
            for slot, samples in zip(slots, together, strict=True):
                joined = exact[0][: (12 - slot) * TOKEN_SAMPLES]
                np.testing.assert_allclose(samples, joined, atol=2e-4)
    assert running.found
    assert running.found <= warm.found, "a transform of a new shape ran"


def test_call_can_be_repeated_until_samples_are_made(network: HarmonicNetwork) -> None:
    vocoder = HarmonicVocoder(network, slot_count=1)
    vocoder.prime(0, CONFIG.voice)
    chunk = [VocoderChunk(0, TURN[:9], is_last=False)]
    first, second = vocoder.encode(chunk), vocoder.encode(chunk)
    assert torch.equal(first[0], second[0])


def test_reset_slot_is_clean_and_needs_a_turn(network: HarmonicNetwork) -> None:
    vocoder = HarmonicVocoder(network, slot_count=1)
    vocoder.prime(0, CONFIG.voice)
    vocoder.decode([VocoderChunk(0, TURN[:9], is_last=False)])
    assert not vocoder.is_clean(0)
    vocoder.reset(0)
    assert vocoder.is_clean(0)
    with pytest.raises(VocoderError, match="no turn"):
        vocoder.decode([VocoderChunk(0, TURN[:9], is_last=False)])


def test_unknown_token_is_refused(network: HarmonicNetwork) -> None:
    vocoder = HarmonicVocoder(network, slot_count=1)
    vocoder.prime(0, CONFIG.voice)
    with pytest.raises(VocoderError, match="no such speech tokens"):
        vocoder.decode([VocoderChunk(0, [1, 2, 3, 12], is_last=False)])


def write(network: HarmonicNetwork, folder: Path, kind: str) -> None:
    content = {"type": kind, **asdict(CONFIG)}
    (folder / harmonic.CONFIG).write_bytes(orjson.dumps(content))
    safetensors.torch.save_file(network.state_dict(), folder / harmonic.WEIGHTS)


def test_files_are_loaded(network: HarmonicNetwork, tmp_path: Path) -> None:
    write(network, tmp_path, harmonic.KIND)
    loaded = HarmonicVocoder.load(tmp_path, slot_count=1)
    vocoder = HarmonicVocoder(network, slot_count=1)
    assert np.array_equal(decoded(loaded, 0, [12]), decoded(vocoder, 0, [12]))
    assert loaded.silence_token_id == 0


def test_files_of_another_kind_are_refused(network: HarmonicNetwork, tmp_path: Path) -> None:
    write(network, tmp_path, "whistle")
    with pytest.raises(CheckpointError, match=r"vocoder\.json.*whistle"):
        HarmonicVocoder.load(tmp_path, slot_count=1)
