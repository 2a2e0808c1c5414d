"""Measures the model's speech by two figures.

One is the share of sums that the model understands when it hears its own speech. The other is the
distance of its mels from those of the synthesiser.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import soxr  # pyright: ignore[reportMissingTypeStubs]  it ships none
import torch

from duplane.worker.models.minicpm_o.llm.sampling import SeededUniforms
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.tts.sampling import SpeechRequest
from duplane.worker.models.minicpm_o.types import INPUT_SAMPLE_RATE, OUTPUT_SAMPLE_RATE
from duplane.worker.models.minicpm_o.vocoder.token_buffer import SpeechTokens
from duplane.worker.models.minicpm_o.vocoder.types import VocoderChunk
from duplane.worker.models.types import FloatArray
from training.answers import speak_answer
from training.domain import sums
from training.evaluation.inputs import Runner, SessionInput
from training.evaluation.scores import Rate, turns
from training.voice.features import MEL_BINS, frames_of

LEAD_S = 2.6
UNITS = 7
MOST_TOKENS = 75


@torch.inference_mode()
def spoken(model: DuplexModel, text: str, seed: int) -> FloatArray:
    """Return the speech of a text at 24 kHz, made by the talker and the vocoder as in a chat."""
    parts = model.parts
    voice = None if parts.voices is None else parts.voices.built_in
    if parts.talker is None or parts.vocoder is None or voice is None:
        raise ValueError("the checkpoint has no talker, no vocoder or no built-in voice")
    ids = parts.tokens.encode(text)
    hidden = torch.zeros(len(ids), parts.llm.hidden_size)
    condition = parts.talker.condition(ids, hidden, is_text_end=True)
    request = SpeechRequest(
        0, condition, SeededUniforms(seed), is_greedy=False, temperature=0.8, most=MOST_TOKENS
    )
    tokens = [token for token in parts.talker.draw([request])[0] if token != parts.talker.end]
    parts.talker.cache.reset(0)
    parts.vocoder.prime(0, voice, seed=seed)
    buffer = SpeechTokens(
        silence_token_id=parts.vocoder.silence_token_id, lookahead=parts.vocoder.lookahead
    )
    cut = buffer.push(tokens, end_of_turn=True)
    chunks = [VocoderChunk(0, chunk.tokens, chunk.is_last) for chunk in cut]
    samples = np.concatenate(parts.vocoder.decode(chunks))
    parts.vocoder.reset(0)
    return samples


async def understood(runner: Runner, speak: Callable[[str, int], FloatArray], seed: int) -> Rate:
    """Return the share of sums that the model answers correctly when `speak` makes their sound."""
    rate = Rate()
    questions = sums()
    inputs = [
        SessionInput(_session(speak(text, number)), seed + number)
        for number, (text, _) in enumerate(questions)
    ]
    for (_, wanted), units in zip(questions, await runner.sessions(inputs), strict=True):
        rate.add(is_right=any(turn.text == wanted for turn in turns(units)))
    return rate


def _session(samples: FloatArray) -> FloatArray:
    sound = np.zeros(UNITS * INPUT_SAMPLE_RATE, np.float32)
    start = int(LEAD_S * INPUT_SAMPLE_RATE)
    part = narrow(samples)[: len(sound) - start]
    sound[start : start + len(part)] = part
    noise = np.random.default_rng(0).standard_normal(len(sound)) * 1e-3
    return sound + noise.astype(np.float32)


def narrow(samples: FloatArray) -> FloatArray:
    """Resample the model's output to the rate of its input."""
    return soxr.resample(samples, OUTPUT_SAMPLE_RATE, INPUT_SAMPLE_RATE)


def original(text: str, seed: int) -> FloatArray:
    """Return the synthesiser's speech of a text, in the voice that the model imitates."""
    del seed
    return speak_answer(text).samples


def mel_distance(model: DuplexModel, texts: Sequence[str]) -> float:
    """Return the mean distance between aligned log-mels of the model and of the synthesiser."""
    distances = [
        _aligned_distance(frames_of(original(text, 0)), frames_of(spoken(model, text, 0)))
        for text in texts
    ]
    return float(np.mean(distances))


def _aligned_distance(first: FloatArray, second: FloatArray) -> float:
    """Return the mean distance between two sequences of frames, aligned as well as possible."""
    a, b = first[:, :MEL_BINS], second[:, :MEL_BINS]
    costs = np.abs(a[:, None] - b[None]).mean(-1)
    total = np.full((len(a) + 1, len(b) + 1), np.inf)
    steps = np.zeros_like(total)
    total[0, 0] = 0.0
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            before = min(((i - 1, j - 1), (i - 1, j), (i, j - 1)), key=lambda at: total[at])
            total[i, j] = total[before] + costs[i - 1, j - 1]
            steps[i, j] = steps[before] + 1
    return float(total[-1, -1] / steps[-1, -1])
