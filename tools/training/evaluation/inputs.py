"""What a client sends in the conversations of an evaluation, and the interface that runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from duplane.worker.models.types import FloatArray
from training.evaluation.scores import Answered

Role = Literal["system", "user", "assistant"]
USUAL_PROMPT = "You are a helpful assistant."


@dataclass(frozen=True)
class SessionInput:
    """The sound of a session at 16 kHz, in whole units, and the settings of the session.

    `voice` is the reference audio in the prompt. `pictures` are the JPEG frames of the units, one
    for each; the last belongs to all units that follow, too.
    """

    samples: FloatArray
    seed: int
    prompt: str = USUAL_PROMPT
    voice: FloatArray | None = None
    pictures: tuple[bytes, ...] = ()

    def frames(self, unit: int) -> tuple[bytes, ...]:
        """Return the frames of a unit: one, or none in a session without pictures."""
        return self.pictures[unit : unit + 1] or self.pictures[-1:]


@dataclass(frozen=True)
class ChatInput:
    """The roles and texts of a chat's messages. The model answers the last message.

    `is_spoken` means that the client also requests the sound of the answer. The last message shows
    `picture`, a JPEG file, before its text.
    """

    messages: tuple[tuple[Role, str], ...]
    seed: int
    is_spoken: bool = False
    picture: bytes | None = None


class Runner(Protocol):
    """Runs conversations with the model, several at the same time."""

    async def sessions(self, inputs: Sequence[SessionInput]) -> list[list[Answered]]:
        """Return the outputs of all units of each session. All sessions have the same length."""
        ...

    async def chats(self, inputs: Sequence[ChatInput]) -> list[str]:
        """Return the text of each answer."""
        ...
