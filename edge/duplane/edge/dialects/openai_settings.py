"""Settings that OpenAI's protocols share: the default prompt, and the voice."""

from __future__ import annotations

from dataclasses import dataclass

from duplane.edge.payload.fields import Fields
from duplane.edge.settings import Limits

DEFAULT_PROMPT = "You are a helpful assistant."
HISTORY = "The conversation so far:"


@dataclass(frozen=True, slots=True)
class Voice:
    """The client's name of the voice: a text, or an object with an `id` (`is_object`).

    The model has one voice, whatever its name is.
    """

    name: str = "default"
    is_object: bool = False

    def to_json(self) -> object:
        """Return the voice as the client has named it."""
        return {"id": self.name} if self.is_object else self.name


DEFAULT_VOICE = Voice()


def read_voice_name(output: Fields, limits: Limits) -> Voice:
    """Return the voice that the object `output` names in `voice`. Raises ClientError."""
    if isinstance(output.get("voice", object), dict):
        voice = output.required_fields("voice")
        return Voice(voice.required_text("id", limits.text_bytes), is_object=True)
    return Voice(output.required_text("voice", limits.text_bytes))
