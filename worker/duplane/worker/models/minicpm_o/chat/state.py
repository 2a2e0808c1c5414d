"""The host-side state of one chat: its prompt, its answer so far, and its next stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from duplane.worker.models.chat import ChatOptions, Finish
from duplane.worker.models.minicpm_o.chat.prompt_rows import PromptRows
from duplane.worker.models.minicpm_o.llm.sampling import Uniforms
from duplane.worker.models.minicpm_o.llm.tokenizer import Tokens
from duplane.worker.models.minicpm_o.tts.passages import SpeechStream
from duplane.worker.models.minicpm_o.vocoder.token_buffer import SpeechTokens
from duplane.worker.models.types import UnitFailure

_INCOMPLETE = "\ufffd"


class Stage(Enum):
    """The work of a chat's next step."""

    PREFILL = "prefill"
    TEXT = "text"
    SPEECH = "speech"
    DONE = "done"


@dataclass
class ChatSpeech:
    """The speech of a chat: the state of its passages, and the vocoder's token buffer."""

    stream: SpeechStream
    tokens: SpeechTokens


@dataclass
class Chat:
    """The state of one chat.

    - `room`: how many ids may be fed. `full`: the reason to give if the answer ends at this limit.
    - `answer`: all chosen ids without the terminator; `fed_count` of them are in the context.
    - `new_ids`: the ids fed since the last output. `hidden` has one state [hidden] for each.
    - `failure`: if it is set, the chat can only be closed.
    """

    slot: int
    options: ChatOptions
    uniforms: Uniforms
    speech: ChatSpeech | None
    prompt: PromptRows
    room: int = 0
    full: Finish = Finish.LENGTH
    stage: Stage = Stage.PREFILL
    answer: list[int] = field(default_factory=list[int])
    fed_count: int = 0
    new_ids: list[int] = field(default_factory=list[int])
    hidden: list[Tensor] = field(default_factory=list[Tensor])
    finish: Finish | None = None
    failure: UnitFailure | None = None
    sent_characters: int = 0

    def begin(self, prompt: PromptRows, room: int, full: Finish) -> None:
        """Begin an answer to `prompt`."""
        self.prompt, self.room, self.full = prompt, room, full
        self.stage, self.finish, self.fed_count, self.sent_characters = Stage.PREFILL, None, 0, 0
        self.answer, self.new_ids, self.hidden = [], [], []

    @property
    def is_answering(self) -> bool:
        """Whether an id of the answer waits to be fed."""
        return self.finish is None and self.failure is None

    def choose(self, token: int, terminators: Sequence[int]) -> None:
        """Add the chosen id to the answer, or finish the answer."""
        if token in terminators:
            self.finish = Finish.STOP
        elif self.fed_count == self.room:
            self.finish = self.full
        else:
            self.answer.append(token)

    def record_fed(self, hidden: Tensor) -> None:
        """Record that the latest id of the answer was fed, with the LLM's state `hidden`."""
        self.new_ids.append(self.answer[-1])
        self.hidden.append(hidden)
        self.fed_count += 1

    def new_text(self, tokens: Tokens) -> str:
        """Return the text since the last call.

        The bytes of an incomplete character are kept until the character is complete. At the end
        they are returned if the model has ended the answer, and dropped if the answer is cut off.
        """
        text = tokens.decode(self.answer[: self.fed_count])
        whole = text if self.finish is Finish.STOP else text.rstrip(_INCOMPLETE)
        new = whole[self.sent_characters :]
        self.sent_characters = max(self.sent_characters, len(whole))
        return new
