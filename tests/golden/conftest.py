"""A checkpoint that can speak, put together from the public traces, and a model that runs it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from duplane.worker.model.model import DuplexModel

PUBLIC = Path(__file__).parent / "public"
SLOTS = 4


@pytest.fixture(scope="session")
def speaking_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("speaking") / "checkpoint"
    shutil.copytree(PUBLIC / "checkpoint", directory)
    vocoder = directory / "assets" / "token2wav"
    vocoder.mkdir(parents=True)
    for name in ("flow.yaml", "flow.pt", "hift.pt", "hift_dims.json"):
        shutil.copy(PUBLIC / "token2wav" / name, vocoder)
    recorded = np.load(PUBLIC / "token2wav" / "golden.npz")
    voice = {
        "prompt_tokens": recorded["prompt_tokens"][0].astype(np.int64),
        "prompt_mel": recorded["prompt_mel"][0],
        "speaker_embedding": recorded["speaker_embedding"][0],
    }
    save_file(voice, vocoder / "voice.safetensors")
    return directory


@pytest.fixture(scope="session")
def _loaded(speaking_checkpoint: Path) -> DuplexModel:
    torch.set_num_threads(1)
    return DuplexModel.load(speaking_checkpoint, slot_count=SLOTS, context_capacity=512)


@pytest.fixture
def model(_loaded: DuplexModel) -> Iterator[DuplexModel]:
    """A model of four slots, all clean."""
    yield _loaded
    for slot in range(SLOTS):
        _loaded.close(slot)
