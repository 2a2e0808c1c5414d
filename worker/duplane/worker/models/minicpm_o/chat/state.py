"""The host-side state of one chat: its prompt, its answer so far, and its next part."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from duplane.worker.models.chat import ChatOptions, Finish
from duplane.worker.models.interface import Part
from duplane.worker.models.minicpm_o.chat.prompt_rows import PromptRows
from duplane.worker.models.minicpm_o.llm.sampling import Uniforms
from duplane.worker.models.minicpm_o.llm.tokenizer import Tokens
from duplane.worker.models.minicpm_o.stopwatch import Laps
from duplane.worker.models.minicpm_o.tts.passages import SpeechStream
from duplane.worker.models.minicpm_o.vision.seen_tiles import SeenTiles
from duplane.worker.models.minicpm_o.vocoder.token_buffer import SpeechTokens
from duplane.worker.models.minicpm_o.vocoder.types import VocoderChunk
from duplane.worker.models.types import FloatArray, UnitFailure

CHUNK_IDS = 10
"""Ids of one piece of an answer."""
_INCOMPLETE = "\ufffd"


@dataclass
class ChatSpeech:
    """The speech of a chat: the state of its passages, and the vocoder's token buffer."""

    stream: SpeechStream
    tokens: SpeechTokens


@dataclass
class Chat:
    """The state of one chat, which moves from part to part.

    The answer comes in pieces: some ids, and then the speech of these ids.

    - `granted`: the number of rows, or of tiles, of the next launch.
    - `pass_rows`: rows [n, hidden] of the prompt that the next pass feeds; None for `next_id`.
    - `room`: how many ids may be fed. `full`: the reason to give if the answer ends at this limit.
    - `answer`: all chosen ids without the terminator; `fed_count` of them are in the context.
    - `new_ids`: the ids of the piece. `hidden` has one state [hidden] for each.
    - `has_text`: the prompt, or the ids of the piece, must be reported.
    - `is_speaking`: the talker has not drawn all speech tokens of the piece. `token_count` of the
      tokens are in no output.
    - `chunks`: the vocoder chunks that wait to be decoded. `mel` belongs to the first of them.
    - `samples`: samples of chunks that are in no output.
    - `finish`: why the answer has ended, also before the first answer.
    - `failure`: if it is set, the chat can only be closed.
    - `laps`: the launches since the last output.
    """

    slot: int
    options: ChatOptions
    uniforms: Uniforms
    speech: ChatSpeech | None
    prompt: PromptRows
    granted: int = 0
    pass_rows: Tensor | None = None
    room: int = 0
    full: Finish = Finish.LENGTH
    answer: list[int] = field(default_factory=list[int])
    fed_count: int = 0
    new_ids: list[int] = field(default_factory=list[int])
    hidden: list[Tensor] = field(default_factory=list[Tensor])
    has_text: bool = False
    is_speaking: bool = False
    token_count: int = 0
    chunks: deque[VocoderChunk] = field(default_factory=deque[VocoderChunk])
    mel: Tensor | None = None
    samples: list[FloatArray] = field(default_factory=list[FloatArray])
    finish: Finish | None = Finish.STOP
    failure: UnitFailure | None = None
    sent_characters: int = 0
    laps: Laps = field(default_factory=Laps)

    def begin(self, prompt: PromptRows, room: int, full: Finish) -> None:
        """Begin an answer to `prompt`."""
        self.prompt, self.room, self.full = prompt, room, full
        self.finish, self.fed_count, self.sent_characters = None, 0, 0
        self.answer, self.new_ids, self.hidden = [], [], []

    @property
    def part(self) -> Part | None:
        """The part that does the next piece of work; None if the answer is complete."""
        if not self.prompt.is_fed:
            return self.prompt.part
        if self.chunks:
            return Part.VOCODE
        if self.is_speaking:
            return Part.TALK
        return Part.DECODE if self.finish is None else None

    @property
    def left(self) -> int:
        """The size of what is left of the part; see `Unfinished`."""
        if not self.prompt.is_fed:
            return self.prompt.left
        return max(1, len(self.chunks))

    @property
    def seen(self) -> SeenTiles:
        """The tiles of the pictures of the prompt."""
        return self.prompt.seen

    @property
    def next_id(self) -> int:
        """The id of the answer that the next pass feeds."""
        return self.answer[-1]

    @property
    def has_piece(self) -> bool:
        """Whether the piece has as many ids as a piece may have."""
        return len(self.new_ids) == CHUNK_IDS

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
