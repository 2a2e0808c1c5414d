"""Checkpoints that lack a part, contradict themselves, or bring a voice of their own."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from safetensors.numpy import save_file
from support.model.past_units import run_unit
from support.paths import GOLDEN

from duplane.tools.golden_replay.audio import read_audio, read_clip
from duplane.worker.models.minicpm_o.checkpoint import CheckpointError
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.types import ConversationOptions, DecodeMode, Unit

AUDIO = GOLDEN / "audio"
UNIT = 16_000
GREEDY = ConversationOptions(
    "Streaming Omni Conversation.",
    llm_voice=read_clip(AUDIO / "ref1.wav"),
    seed=1,
    decode_mode=DecodeMode.GREEDY,
    force_listen_count=0,
)


def test_what_has_no_effect_is_said(model: DuplexModel, speaking_checkpoint: Path) -> None:
    voice = np.zeros(UNIT, np.float32)
    assert model.open(0, ConversationOptions(tts_voice=voice)).ignored == ("tts_voice",)
    silent = DuplexModel.load(speaking_checkpoint.parents[0] / "silent", slot_count=1)
    assert silent.open(0, GREEDY).ignored == ("generate_audio",)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"vocab_size": 1500}, "ids beyond vocab_size"),
        ({"hidden_size": 256}, "llm_dim is 128, not hidden_size"),
        (
            {"hidden_size": 256, "tts_config": {"llm_dim": 256}},
            r"llm\.model\.embed_tokens\.weight has shape.*tts\.projector_semantic\.\S+ has shape",
        ),
        ({"tts_config": {"llm_dim": 64}}, "llm_dim"),
        ({"tts_config": {"num_text_tokens": 1000}}, "num_text_tokens"),
        ({"tts_config": {"num_audio_tokens": 100}}, r"tts\.emb_code\.0\.weight has shape"),
        ({"num_hidden_layers": 3}, r"llm\.model\.layers\.2\..* is missing"),
    ],
)
def test_a_checkpoint_that_contradicts_its_configuration_is_refused(
    speaking_checkpoint: Path, tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    for path in speaking_checkpoint.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = orjson.loads((tmp_path / "config.json").read_bytes())
    for name, value in change.items():
        config[name] = {**config[name], **value} if isinstance(value, dict) else value
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_bytes(orjson.dumps(config))
    with pytest.raises(CheckpointError, match=complaint):
        DuplexModel.load(tmp_path, slot_count=1)


def test_a_built_in_voice_that_does_not_fit_is_refused(
    speaking_checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(speaking_checkpoint, tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "assets" / "token2wav" / "voice.safetensors"
    save_file({"prompt_tokens": np.zeros(3, np.int64)}, path)
    with pytest.raises(CheckpointError, match=r"voice\.safetensors lacks 'prompt_mel'"):
        DuplexModel.load(tmp_path / "checkpoint", slot_count=1)
    voice = {
        "prompt_tokens": np.zeros(3, np.int64),
        "prompt_mel": np.zeros((4, 80), np.float32),
        "speaker_embedding": np.zeros(192, np.float32),
    }
    save_file(voice, path)
    with pytest.raises(CheckpointError, match="built-in voice"):
        DuplexModel.load(tmp_path / "checkpoint", slot_count=1)


def test_a_checkpoints_own_prompt_voice_is_heard_when_the_client_sends_none(
    speaking_checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(speaking_checkpoint, tmp_path / "checkpoint")
    shutil.copy(AUDIO / "ref1.wav", tmp_path / "checkpoint" / "assets" / "system_ref_audio.wav")
    voiced = DuplexModel.load(tmp_path / "checkpoint", slot_count=2)
    opened = [voiced.open(0, GREEDY), voiced.open(1, replace(GREEDY, llm_voice=None))]
    assert opened[0] == replace(opened[1], slot=0)
    sound = read_audio(AUDIO / "talk.wav", UNIT)
    default, sent = (run_unit(voiced, Unit(slot, sound)).token_ids for slot in range(2))
    assert default == sent


@pytest.fixture(autouse=True, scope="module")
def _silent_checkpoint(speaking_checkpoint: Path) -> None:
    """Return a folder with links to the checkpoint's files, except for the vocoder."""
    silent = speaking_checkpoint.parent / "silent"
    silent.mkdir()
    for path in speaking_checkpoint.iterdir():
        if path.is_file():
            (silent / path.name).symlink_to(path)
