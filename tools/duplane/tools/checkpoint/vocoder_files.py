"""The names and the content of the vocoder's files: HiFT's weights and the built-in voice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from duplane.tools.checkpoint.weights import random_numbers

Array = NDArray[np.float32]

FOLDER = Path("assets", "token2wav")
SPEECH_TOKENS = 6561
MEL_BINS = 80
SPEAKER_WIDTH = 192

# Layers of HiFT that the released files store without weight norm.
_PLAIN_LAYERS = ("m_source.", "source_downs.", "f0_predictor.classifier.")


def weight_normed(tensors: dict[str, Array]) -> dict[str, Array]:
    """Rename the tensors as in hift.pt, and store most weights as directions and lengths."""
    stored: dict[str, Array] = {}
    for name, tensor in tensors.items():
        if name.startswith(_PLAIN_LAYERS) or not name.endswith(".weight"):
            stored["generator." + name] = tensor
            continue
        layer = "generator." + name.removesuffix(".weight") + ".parametrizations.weight."
        axes = tuple(range(1, tensor.ndim))
        stored[layer + "original0"] = np.sqrt(np.sum(tensor**2, axis=axes, keepdims=True))
        stored[layer + "original1"] = tensor
    return stored


def random_voice(seed: int, tokens: int) -> dict[str, np.ndarray]:
    """Return the arrays of voice.safetensors for a voice of this many speech tokens."""
    random = random_numbers("voice", seed)
    mel: Array = random.standard_normal((2 * tokens, MEL_BINS)).astype(np.float32)
    return {
        "prompt_tokens": random.integers(0, SPEECH_TOKENS, tokens, dtype=np.int64),
        "prompt_mel": mel - 3.0,
        "speaker_embedding": random.standard_normal(SPEAKER_WIDTH).astype(np.float32),
    }
