"""Settings that OpenAI's protocols share: the default prompt, and the voice."""

from __future__ import annotations

from duplane.edge.payload.fields import Fields
from duplane.edge.settings import Limits

DEFAULT_PROMPT = "You are a helpful assistant."
DEFAULT_VOICE = "default"
HISTORY = "The conversation so far:"


def read_voice_name(output: Fields, limits: Limits) -> object:
    """Return the client's name of the voice: text, or an object with its `id`.

    The model has one voice, whatever its name is.
    """
    if isinstance(output.get("voice", object), dict):
        voice = output.required_fields("voice")
        return {"id": voice.required_text("id", limits.text_bytes)}
    return output.required_text("voice", limits.text_bytes)
