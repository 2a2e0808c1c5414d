"""One chat on the host: its prompt, its answer so far, how far it has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from duplane.worker.model.chat_prompt import ChatPrompt
from duplane.worker.model.chat_types import ChatOptions, Finish
from duplane.worker.model.sampling import Uniforms
from duplane.worker.model.speech_tokens import SpeechTokens
from duplane.worker.model.talker_stream import SpeechStream
from duplane.worker.model.tokens import Tokens
from duplane.worker.model.types import UnitFailure

_INCOMPLETE = "\ufffd"


class Stage(Enum):
    """What a chat's next step does."""

    PREFILL = "prefill"
    TEXT = "text"
    SPEECH = "speech"
    DONE = "done"


@dataclass
class Voice:
    """What a chat that is heard keeps: the talker's stream, and the tokens for the vocoder."""

    stream: SpeechStream
    tokens: SpeechTokens


@dataclass
class Chat:
    """The state of one chat.

    `answer` are all ids chosen, without the terminator; `fed_count` of them are in the context.
    `fresh` are the ids fed since the last chunk of text was told, `hidden` the states behind
    them. `room` is how many ids may be fed; at it, `full` says why the answer ends. With a
    `failure` the chat can only be closed.
    """

    slot: int
    options: ChatOptions
    uniforms: Uniforms
    voice: Voice | None
    prompt: ChatPrompt
    room: int = 0
    full: Finish = Finish.LENGTH
    stage: Stage = Stage.PREFILL
    answer: list[int] = field(default_factory=list[int])
    fed_count: int = 0
    fresh: list[int] = field(default_factory=list[int])
    hidden: list[Tensor] = field(default_factory=list[Tensor])
    finish: Finish | None = None
    failure: UnitFailure | None = None
    told_characters: int = 0

    def begin(self, prompt: ChatPrompt, room: int, full: Finish) -> None:
        """Begin an answer to `prompt`."""
        self.prompt, self.room, self.full = prompt, room, full
        self.stage, self.finish, self.fed_count, self.told_characters = Stage.PREFILL, None, 0, 0
        self.answer, self.fresh, self.hidden = [], [], []

    @property
    def is_answering(self) -> bool:
        """Whether there is an id to be fed."""
        return self.finish is None and self.failure is None

    def choose(self, token: int, terminators: Sequence[int]) -> None:
        """Take the model's choice of the next id."""
        if token in terminators:
            self.finish = Finish.STOP
        elif self.fed_count == self.room:
            self.finish = self.full
        else:
            self.answer.append(token)

    def feed(self, hidden: Tensor) -> None:
        """The last id of the answer was fed; `hidden` [hidden] is the state behind it."""
        self.fresh.append(self.answer[-1])
        self.hidden.append(hidden)
        self.fed_count += 1

    def tell(self, tokens: Tokens) -> str:
        """The text that is new; bytes of a character that is not whole yet wait for the rest.

        What the model itself ends with is told as it is, what is cut off ends with the last whole.
        """
        text = tokens.decode(self.answer[: self.fed_count])
        whole = text if self.finish is Finish.STOP else text.rstrip(_INCOMPLETE)
        new = whole[self.told_characters :]
        self.told_characters = max(self.told_characters, len(whole))
        return new
