"""`speech.request` and `speech.done` of A, B and C: a text that the model speaks, and its end."""

from __future__ import annotations

from duplane.edge.dialects.actions import Speak, SpeechEnding
from duplane.edge.payload.fields import Fields, invalid
from duplane.edge.settings import Limits
from duplane.fabric.bounds import MAX_SPEECH_TEXT_BYTES

REQUEST = "speech.request"
DONE = "speech.done"


def read_speech(event: Fields, limits: Limits) -> Speak:
    """Return the request in an event. Raises ClientError."""
    input_id = event.text("input_id", limits.text_bytes)
    return Speak(read_speech_text(event, "text"), REQUEST, input_id)


def read_id(event: Fields, limits: Limits) -> str | None:
    """Return the `input_id` of a request whose other fields may be invalid."""
    found = event.whole.get("input_id")
    if not isinstance(found, str) or len(found.encode()) > limits.text_bytes:
        return None
    return found


def read_speech_text(event: Fields, key: str) -> str:
    """Return a text to speak. Raises ClientError."""
    text = event.required_text(key, MAX_SPEECH_TEXT_BYTES)
    if not text.strip():
        raise invalid(event.path(key), "must not be empty")
    return text


def done_fields(speak: Speak, ending: SpeechEnding, message: str = "") -> dict[str, object]:
    """Return the fields of `speech.done`. `message` says why a request was refused."""
    fields: dict[str, object] = {"type": DONE, "status": ending.value}
    if speak.input_id is not None:
        fields["input_id"] = speak.input_id
    if message:
        fields["message"] = message
    return fields
