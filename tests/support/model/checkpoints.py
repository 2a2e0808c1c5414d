"""Builds a checkpoint that can speak, from files of the public traces."""

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from support.paths import GOLDEN


def write_speaking_checkpoint(directory: Path) -> None:
    """Copy the traces' checkpoint and a vocoder with one voice into a new directory."""
    shutil.copytree(GOLDEN / "checkpoint", directory)
    vocoder = directory / "assets" / "token2wav"
    vocoder.mkdir(parents=True)
    for name in ("flow.yaml", "flow.pt", "hift.pt", "hift_dims.json"):
        shutil.copy(GOLDEN / "token2wav" / name, vocoder)
    recorded = np.load(GOLDEN / "token2wav" / "golden.npz")
    voice = {
        "prompt_tokens": recorded["prompt_tokens"][0].astype(np.int64),
        "prompt_mel": recorded["prompt_mel"][0],
        "speaker_embedding": recorded["speaker_embedding"][0],
    }
    save_file(voice, vocoder / "voice.safetensors")
