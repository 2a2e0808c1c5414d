"""The inputs of the vocoder, and the checks that refuse invalid ones."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from duplane.worker.models.types import FloatArray


class VocoderError(ValueError):
    """The vocoder cannot use a voice or a chunk. Its state has not changed."""


@dataclass(frozen=True)
class VocoderOptions:
    """Settings that are not in the vocoder's files.

    - `steps`: the number of solver steps; the duplex mode of the reference uses 5.
    - `max_prompt_frames`: the longest voice prompt, in mel frames of 20 ms.
    - `silence_token_id`: the speech token of silence; the default is that of the released model.
    - `cached_voices`: the number of voices whose prompts are cached, for all slots together.
    - `noise` `[columns, mel]`: the solver's noise table. None means a table from a fixed seed.
    - `has_source_noise`: noise is added to the source of HiFT.
    """

    steps: int = 5
    max_prompt_frames: int = 500
    silence_token_id: int = 4218
    cached_voices: int = 4
    noise: Tensor | None = None
    has_source_noise: bool = True


@dataclass(frozen=True)
class VocoderVoice:
    """A voice of the vocoder. All three parts come from one clip.

    The parts are `prompt_tokens` `[P]` (int), `prompt_mel` `[P * 2, mel]` and `speaker_embedding`
    `[width]`.
    """

    prompt_tokens: NDArray[np.integer]
    prompt_mel: FloatArray
    speaker_embedding: FloatArray

    def digest(self) -> bytes:
        """Return a digest of all three parts, equal for equal voices."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.prompt_tokens, self.prompt_mel, self.speaker_embedding):
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.digest()


@dataclass(frozen=True)
class VocoderChunk:
    """One chunk of a slot's tokens. It ends with lookahead, unless it is the last of its turn."""

    slot: int
    tokens: Sequence[int]
    is_last: bool


@dataclass(frozen=True)
class Limits:
    """The limits of one vocoder's models and caches. The checks raise `VocoderError`."""

    vocabulary: int
    stride: int
    mel_width: int
    speaker_width: int
    lookahead: int
    max_prompt_frames: int
    max_chunk_tokens: int
    min_first_frames: int

    def check_voice(self, voice: VocoderVoice, spoken: Sequence[int] = ()) -> None:
        """Refuse a voice whose parts do not match, or that is too long together with `spoken`."""
        count = len(voice.prompt_tokens)
        if count == 0:
            raise VocoderError("prompt_tokens is empty")
        for name, array, shape in (
            ("prompt_mel", voice.prompt_mel, (count * self.stride, self.mel_width)),
            ("speaker_embedding", voice.speaker_embedding, (self.speaker_width,)),
        ):
            if array.shape != shape:
                raise VocoderError(f"{name} has shape {list(array.shape)}, not {list(shape)}")
            if not np.isfinite(array).all():
                raise VocoderError(f"{name} has values that are not finite")
        self._check_tokens([*voice.prompt_tokens.tolist(), *spoken], "prompt_tokens")
        frames = (count + len(spoken)) * self.stride
        if frames > self.max_prompt_frames:
            raise VocoderError(
                f"the voice's prompt has {frames} mel frames, "
                f"more than max_prompt_frames {self.max_prompt_frames}"
            )

    def check_chunk(self, chunk: VocoderChunk, *, is_first: bool) -> None:
        """Refuse a chunk that is too long, or too short for the cross-fade with the next chunk."""
        where = f"slot {chunk.slot}"
        self._check_tokens(chunk.tokens, where)
        count = len(chunk.tokens)
        if count > self.max_chunk_tokens:
            raise VocoderError(f"{where}: {count} tokens, at most {self.max_chunk_tokens}")
        fewest = 1
        if not chunk.is_last:
            frames = self.min_first_frames if is_first else 1
            fewest = -(-frames // self.stride) + self.lookahead
        if count < fewest:
            raise VocoderError(f"{where}: {count} tokens, at least {fewest}")

    def _check_tokens(self, tokens: Sequence[int], where: str) -> None:
        outside = [token for token in tokens if not 0 <= token < self.vocabulary]
        if outside:
            raise VocoderError(f"{where}: no such speech tokens: {outside[:10]}")
