"""Voices from clips: the networks, the cache, and the voice of each conversation."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.model.voice_files import CODE_STEP, CODES, SPEAKER_WIDTH, write_voice_networks
from support.test_checkpoint.build import build_test_checkpoint

from duplane.worker.models.chat import (
    ChatMessage,
    ChatOptions,
    ChatOutput,
    ChatRequest,
    ChatRole,
)
from duplane.worker.models.minicpm_o.checkpoint import CheckpointError
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.vocoder.voice import (
    FEWEST_SAMPLES,
    SPEAKER_FILE,
    TOKEN_SAMPLES,
    TOKENIZER_FILE,
    VoiceNetworks,
    Voices,
)
from duplane.worker.models.types import (
    ConversationOptions,
    FloatArray,
    OptionError,
    Unit,
    UnitOutput,
)

pytestmark = pytest.mark.slow

GREEDY = ConversationOptions(seed=1, force_listen_count=0)


def clip(seconds: float, pitch: float = 150.0) -> FloatArray:
    time = np.arange(int(seconds * 16_000)) / 16_000
    sound = sum(np.sin(2 * np.pi * pitch * n * time) / n for n in range(1, 9))
    return (0.1 * sound * (0.6 + 0.4 * np.sin(11 * time))).astype(np.float32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    build_test_checkpoint(folder)
    write_voice_networks(folder / "assets" / "token2wav")
    return folder


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> DuplexModel:
    return DuplexModel.load(checkpoint, slot_count=2, context_capacity=512)


@pytest.fixture
def model(loaded: DuplexModel) -> DuplexModel:
    for slot in range(2):
        loaded.close(slot)
    return loaded


@pytest.fixture(scope="module")
def networks(checkpoint: Path) -> VoiceNetworks:
    found = VoiceNetworks.load(checkpoint / "assets" / "token2wav", max_tokens=100)
    assert found is not None
    return found


@pytest.mark.parametrize("seconds", [0.1, 0.35, 1.0, 1.993, 3.97])
def test_the_parts_of_a_voice_fit_together_for_clips_of_any_length(
    networks: VoiceNetworks, seconds: float
) -> None:
    voice = networks.read(clip(seconds))
    count = len(voice.prompt_tokens)
    assert count == -(-(int(seconds * 16_000) // 160) // 4)
    assert voice.prompt_mel.shape == (2 * count, 80)
    assert voice.speaker_embedding.shape == (SPEAKER_WIDTH,)
    assert set(voice.prompt_tokens.tolist()) <= set(range(0, CODES * CODE_STEP, CODE_STEP))


def test_a_long_clip_is_cut(networks: VoiceNetworks) -> None:
    long = clip(6.0)
    voice, cut = networks.read(long), networks.read(long[: 100 * TOKEN_SAMPLES])
    assert len(voice.prompt_tokens) == 100
    assert voice.digest() == cut.digest()


def test_the_input_of_the_tokenizer_is_the_unpadded_log_mel_of_whisper(
    networks: VoiceNetworks, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import WhisperFeatureExtractor  # imports a thousand modules

    seen: list[np.ndarray] = []
    monkeypatch.setattr(
        "duplane.worker.models.minicpm_o.vocoder.voice._run",
        lambda session, *values: (seen.append(values[0]), np.arange(40))[1],
    )
    sound = clip(1.6)
    networks.read(sound)
    whisper = WhisperFeatureExtractor(feature_size=128)
    expected = whisper(
        sound, sampling_rate=16_000, padding="do_not_pad", return_tensors="np"
    ).input_features
    np.testing.assert_allclose(seen[0], expected, atol=1e-4)


def test_a_clip_that_is_too_short_is_refused_by_option_name(
    model: DuplexModel,
) -> None:
    short = clip(1.0)[: FEWEST_SAMPLES - 1]
    with pytest.raises(OptionError, match=r"^tts_voice has 1599 samples") as refused:
        model.open(0, ConversationOptions(tts_voice=short))
    assert refused.value.field == "tts_voice"
    with pytest.raises(OptionError, match=r"^llm_voice"):
        model.preparer.conversation(ConversationOptions(llm_voice=short))
    assert model.is_clean(0)


def test_the_tts_voice_precedes_the_llm_voice_and_the_built_in_voice(checkpoint: Path) -> None:
    folder = checkpoint / "assets" / "token2wav"
    networks = VoiceNetworks.load(folder, max_tokens=50)
    assert networks is not None
    high, low = clip(1.0, 220), clip(1.0, 110)
    own = networks.read(clip(0.5))
    voices = Voices(networks, own)
    chosen = voices.choose(high, low)
    assert chosen is not None
    assert chosen.digest() == networks.read(high).digest() != networks.read(low).digest()
    fallback = voices.choose(None, low)
    assert fallback is not None
    assert fallback.digest() == networks.read(low).digest()
    assert voices.choose() is own
    assert Voices(None, own).choose(high) is own


def test_a_clip_is_read_once_and_the_least_recently_used_voice_is_evicted(
    networks: VoiceNetworks, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    read: Callable[[FloatArray], object] = networks.read

    def counted(samples: FloatArray) -> object:
        reads.append(len(samples))
        return read(samples)

    monkeypatch.setattr(networks, "read", counted)
    voices = Voices(networks, None, count=2)
    a, b, c = (clip(seconds) for seconds in (0.2, 0.3, 0.4))
    for sound in (a, b, a.copy(), c, a, c, b):
        voices.choose(sound)
    assert reads == [3200, 4800, 6400, 4800]


def speak(model: DuplexModel, slot: int, units: int = 8) -> FloatArray:
    parts: list[FloatArray] = []
    for unit in range(units):
        sound = np.random.default_rng(unit).normal(0, 0.1, 16_000).astype(np.float32)
        (output,) = model.step([Unit(slot, sound)])
        assert isinstance(output, UnitOutput)
        model.settle([slot])
        parts.append(output.audio)
    return np.concatenate(parts)


def test_the_voice_determines_the_samples(model: DuplexModel) -> None:
    samples: list[FloatArray] = []
    for tts_voice in (clip(1.0, 110), clip(1.0, 220), clip(1.0, 110), None):
        options = ConversationOptions(seed=1, force_listen_count=0, tts_voice=tts_voice)
        model.preparer.conversation(options)
        assert model.open(0, options).ignored == ()
        samples.append(speak(model, 0))
        model.close(0)
        assert model.is_clean(0)
    low, high, again, own = samples
    assert len(low) > 24_000
    assert len(low) == len(high) == len(own)
    np.testing.assert_array_equal(low, again)
    assert np.abs(low - high).max() > 1e-3
    assert np.abs(low - own).max() > 1e-3


def test_a_chat_opens_without_reading_its_voice_again_after_an_eviction(
    model: DuplexModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ChatOptions(generate_audio=True, tts_voice=clip(1.0, 330), seed=1)
    message = ChatMessage(ChatRole.USER, ("Good morning.",))
    prepared = model.preparer.chat(ChatRequest((message,), options))

    def read(networks: VoiceNetworks, samples: FloatArray) -> None:
        raise AssertionError("read on the device thread")

    monkeypatch.setattr(VoiceNetworks, "read", read)
    model.open_chat(0, prepared)
    model.close(0)
    assert model.is_clean(0)


def test_a_chat_speaks_with_its_tts_voice(model: DuplexModel) -> None:
    def answer(tts_voice: FloatArray | None) -> FloatArray:
        options = ChatOptions(generate_audio=True, tts_voice=tts_voice, seed=1, max_new_tokens=12)
        message = ChatMessage(ChatRole.USER, ("Good morning.",))
        model.open_chat(0, model.preparer.chat(ChatRequest((message,), options)))
        parts: list[FloatArray] = []
        is_done = False
        while not is_done:
            for output in model.chat_step([0]):
                assert isinstance(output, ChatOutput)
                parts.append(output.audio)
                is_done = output.finish is not None
        model.close(0)
        assert model.is_clean(0)
        return np.concatenate(parts)

    low, high, again = answer(clip(1.0, 110)), answer(clip(1.0, 220)), answer(clip(1.0, 110))
    assert len(low) == len(high) > 0
    np.testing.assert_array_equal(low, again)
    assert np.abs(low - high).max() > 1e-3


def test_without_the_networks_a_tts_voice_has_no_effect(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    (folder / "assets" / "token2wav" / SPEAKER_FILE).unlink()
    model = DuplexModel.load(folder, slot_count=1, context_capacity=512)
    assert model.open(0, ConversationOptions(tts_voice=clip(1.0))).ignored == ("tts_voice",)


def test_without_a_built_in_voice_a_tts_voice_is_required(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    (folder / "assets" / "token2wav" / "voice.safetensors").unlink()
    model = DuplexModel.load(folder, slot_count=2, context_capacity=512)
    assert model.open(0, GREEDY).ignored == ("generate_audio",)
    options = ConversationOptions(seed=1, force_listen_count=0, tts_voice=clip(1.0))
    assert model.open(1, options).ignored == ()
    assert speak(model, 1).any()


def test_voice_networks_that_do_not_fit_the_vocoder_are_refused_at_loading(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    write_voice_networks(folder / "assets" / "token2wav", code_step=1000)
    with pytest.raises(CheckpointError, match=r"what the voice networks make: .* tokens"):
        DuplexModel.load(folder, slot_count=1, context_capacity=128)


@pytest.mark.parametrize("name", [TOKENIZER_FILE, SPEAKER_FILE])
def test_an_unusable_network_is_reported_by_name(
    checkpoint: Path, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "networks"
    folder.mkdir()
    write_voice_networks(folder)
    (folder / name).write_bytes(b"no network")
    with pytest.raises(CheckpointError, match=name):
        VoiceNetworks.load(folder, max_tokens=10)
    write_voice_networks(folder)
    other = SPEAKER_FILE if name == TOKENIZER_FILE else TOKENIZER_FILE
    shutil.copy(folder / other, folder / name)
    with pytest.raises(CheckpointError, match=rf"{name} has . inputs"):
        VoiceNetworks.load(folder, max_tokens=10)
