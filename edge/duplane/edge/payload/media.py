"""Decodes and checks base64 media once: files to bytes, and audio (raw or WAV) to PCM."""

from __future__ import annotations

import pybase64

from duplane.edge.client_errors import ClientError, ErrorCode
from duplane.edge.payload.fields import BASE64, Fields, invalid
from duplane.edge.payload.rates import INPUT_RATE_HERTZ
from duplane.fabric.audio import (
    SAMPLE_BYTES,
    WAV_HEAD,
    AudioError,
    AudioTooLongError,
    pcm_from_samples,
    read_client_wav,
    samples_from_pcm,
    too_long,
)

WAV_IN_BASE64 = "UklGR"  # RIFF


def decode_base64(encoded: str, path: str) -> bytes:
    """Decode base64 text. Raises ClientError with the message of A's specification."""
    try:
        # pybase64 is fastest with validation.
        return pybase64.b64decode(encoded, validate=True)
    except ValueError:
        raise _not_base64(path) from None


def _not_base64(path: str) -> ClientError:
    return ClientError(ErrorCode.INVALID_PAYLOAD, f"{path} base64 decode failed")


def decode_file(encoded: str, path: str, max_bytes: int) -> bytes:
    """Decode a file, unless it exceeds `max_bytes`. Raises ClientError."""
    if len(encoded) * 3 > (max_bytes + 3) * 4:
        raise invalid(path, f"must be at most {max_bytes} bytes")
    file = decode_base64(encoded, path)
    if len(file) > max_bytes:
        raise invalid(path, f"must be at most {max_bytes} bytes")
    return file


def decode_audio(
    encoded: str | bytes,
    path: str,
    max_s: float,
    *,
    rate_hertz: int = INPUT_RATE_HERTZ,  # of the dialects, for sound without a rate of its own
    fault: str = "",
) -> bytes:
    """Return float32 PCM from base64 of raw PCM at `rate_hertz`, or of a WAV file.

    A WAV file is converted to `rate_hertz`. A value of type bytes is base64 that is already
    decoded. Raises ClientError. Audio longer than `max_s` is refused before it is decoded, with the
    message `fault` if given. The first bytes decide between PCM and WAV, because existing clients
    mix up the two forms.
    """
    try:
        audio = encoded
        if isinstance(audio, str):
            audio = pybase64.b64decode(audio, validate=True)
        if not audio:
            raise AudioError("is empty")
        if WAV_HEAD.match(audio):
            samples = read_client_wav(audio, rate_hertz=rate_hertz, max_s=max_s)
            audio = pcm_from_samples(samples)
            if not audio:
                raise AudioError("is empty")
            return audio
        if len(audio) > max_s * rate_hertz * SAMPLE_BYTES:
            raise too_long(len(audio) / (rate_hertz * SAMPLE_BYTES), max_s)
        samples_from_pcm(audio)
    except AudioTooLongError as error:
        raise invalid(path, fault or str(error)) from None
    except AudioError as error:
        raise invalid(path, str(error)) from None
    except ValueError:
        raise _not_base64(path) from None
    return audio


def read_voice(fields: Fields, key: str, max_s: float) -> bytes:
    """Return a reference voice as PCM; empty if the field is absent or empty."""
    encoded = fields.get(key, BASE64)
    return decode_audio(encoded, fields.path(key), max_s) if encoded else b""
