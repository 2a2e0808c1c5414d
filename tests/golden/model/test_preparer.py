"""A preparer is made from the files of a checkpoint alone, and prepares what the model expects."""

import shutil
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.model.checkpoints import write_speaking_checkpoint
from support.model.voice_files import write_voice_networks
from support.paths import GOLDEN

from duplane.tools.golden_replay.audio import read_clip
from duplane.worker.models.chat import (
    ChatAudio,
    ChatImage,
    ChatMessage,
    ChatOptions,
    ChatRequest,
    ChatRole,
)
from duplane.worker.models.interface import Continue, Part, Unfinished
from duplane.worker.models.minicpm_o.checkpoint import CheckpointError
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.preparer import Preparer
from duplane.worker.models.minicpm_o.preparer_parts import load_preparer_parts
from duplane.worker.models.types import ConversationOptions, Opened, OptionError, Unit

CAPACITY = 512
VOICE = read_clip(GOLDEN / "audio" / "ref1.wav")
PICTURE = (GOLDEN / "images" / "wide.png").read_bytes()
SPOKEN = ChatRequest(
    (ChatMessage(ChatRole.USER, (ChatImage(PICTURE), ChatAudio(VOICE), "What is it?")),),
    ChatOptions(generate_audio=True, max_new_tokens=8),
)
WEIGHTS = (".safetensors", ".pt")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that has every file a preparer can use."""
    directory = tmp_path_factory.mktemp("whole") / "checkpoint"
    write_speaking_checkpoint(directory)
    write_voice_networks(directory / "assets" / "token2wav")
    shutil.copy(GOLDEN / "audio" / "ref1.wav", directory / "assets" / "system_ref_audio.wav")
    return directory


@pytest.fixture(scope="module")
def model(whole: Path) -> DuplexModel:
    return DuplexModel.load(whole, slot_count=1, context_capacity=CAPACITY)


def without_weights(source: Path, to: Path) -> Path:
    """Copy a checkpoint without its weights; of the vocoder's folder keep the built-in voice."""
    shutil.copytree(source, to)
    for path in to.rglob("*"):
        if path.suffix in WEIGHTS and path.name != "voice.safetensors":
            path.unlink()
    return to


def is_equal(ours: Any, theirs: Any) -> bool:
    """Compare what two preparers made, arrays by their values and types."""
    if isinstance(ours, np.ndarray):
        same_kind = isinstance(theirs, np.ndarray) and ours.dtype == theirs.dtype
        return same_kind and np.array_equal(ours, theirs)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(is_equal, ours, theirs))
    if is_dataclass(ours) and type(ours) is type(theirs):
        return all(
            is_equal(getattr(ours, entry.name), getattr(theirs, entry.name))
            for entry in fields(ours)
        )
    return bool(ours == theirs)


@pytest.mark.slow
def test_it_prepares_the_same_as_the_models_own_without_the_files_of_weights(
    model: DuplexModel, whole: Path, tmp_path: Path
) -> None:
    bare = without_weights(whole, tmp_path / "bare")
    with pytest.raises(CheckpointError, match="cannot be read"):
        DuplexModel.load(bare, slot_count=1)
    ours, theirs = Preparer(load_preparer_parts(bare), model.context_capacity), model.preparer
    for options in (
        ConversationOptions("Talk to me."),
        ConversationOptions(llm_voice=VOICE),
        ConversationOptions(tts_voice=VOICE, basic_window_high_tokens=5000),
        ConversationOptions(generate_audio=False),
    ):
        assert is_equal(ours.conversation(options), theirs.conversation(options))
    for unit in (
        Unit(0, VOICE[:16_000]),
        Unit(0, VOICE[:16_000], frames=(PICTURE, PICTURE), max_slices=3),
        Unit(0, VOICE[:16_000], frames=(b"?",)),
    ):
        assert is_equal(ours.unit(unit), theirs.unit(unit))
    picture = Image.new("RGB", (640, 360), "red")
    assert is_equal(ours.picture(picture, 2), theirs.picture(picture, 2))
    for request in (
        SPOKEN,
        replace(SPOKEN, options=replace(SPOKEN.options, tts_voice=VOICE)),
        replace(SPOKEN, options=ChatOptions()),
    ):
        assert is_equal(ours.chat(request), theirs.chat(request))


@pytest.mark.slow
def test_what_it_prepares_runs_in_the_model(model: DuplexModel, whole: Path) -> None:
    preparer = Preparer(load_preparer_parts(whole), model.context_capacity)
    prepared = preparer.conversation(ConversationOptions(tts_voice=VOICE))
    begun = model.begin(0, prepared)
    assert isinstance(begun, Unfinished)
    assert begun.rows == prepared.rows
    opened, voice = model.launch([Continue(0, Part.FEED, prepared.rows)])
    assert isinstance(opened, Opened)
    assert opened.context_length == prepared.rows
    assert voice == Unfinished(0, Part.VOICE)
    model.close(0)
    model.open_chat(0, preparer.chat(SPOKEN))
    assert list(model.chat_step([0]))
    model.close(0)
    assert model.is_clean(0)


def test_without_a_voice_and_networks_it_refuses_speech(whole: Path, tmp_path: Path) -> None:
    bare = without_weights(whole, tmp_path / "bare")
    shutil.rmtree(bare / "assets" / "token2wav")
    preparer = Preparer(load_preparer_parts(bare), CAPACITY)
    prepared = preparer.conversation(ConversationOptions(tts_voice=VOICE))
    assert prepared.ignored == ("tts_voice", "generate_audio")
    assert not prepared.speaks
    with pytest.raises(OptionError, match="generate_audio"):
        preparer.chat(SPOKEN)


def test_the_vocoder_speaks_with_its_own_clip_if_the_client_sends_none(
    whole: Path, tmp_path: Path
) -> None:
    directory = without_weights(whole, tmp_path / "checkpoint")
    (directory / "assets" / "token2wav" / "voice.safetensors").unlink()
    spoken = directory / "assets" / "HT_ref_audio.wav"
    for name in ("ref1.wav", "ref2.wav"):
        parts = load_preparer_parts(directory)
        assert parts.voices is not None
        assert parts.voices.networks is not None
        expected = parts.voices.networks.read(read_clip(GOLDEN / "audio" / name))
        assert parts.voices.choose() is parts.voices.built_in
        assert is_equal(parts.voices.built_in, expected)
        shutil.copy(GOLDEN / "audio" / "ref2.wav", spoken)
