"""The host-side state of a duplex conversation and of its unit in progress.

The tensors of a conversation are in the caches; only those of its unit in progress are here.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from torch import Tensor

from duplane.worker.models.interface import Part
from duplane.worker.models.minicpm_o.duplex.context_window import Window
from duplane.worker.models.minicpm_o.duplex.hearing import Hearing
from duplane.worker.models.minicpm_o.duplex.requested_speech import RequestedSpeech
from duplane.worker.models.minicpm_o.duplex.sampling import SlotSampling
from duplane.worker.models.minicpm_o.duplex.unit_state import TurnState, UnitState
from duplane.worker.models.minicpm_o.llm.kv_cache import Slide
from duplane.worker.models.minicpm_o.stopwatch import Laps
from duplane.worker.models.minicpm_o.types import PreparedImage
from duplane.worker.models.minicpm_o.vision.seen_tiles import SeenTiles
from duplane.worker.models.minicpm_o.vocoder.token_buffer import SpeechTokens
from duplane.worker.models.minicpm_o.vocoder.vocoder import VocoderChunk
from duplane.worker.models.types import FloatArray, SpeechResult, Unit, UnitFailure


@dataclass
class PastSpeech:
    """Speech of past units, oldest first, that talker and vocoder still have to process again.

    `units` has the units of the talker's open turn, each as the ids of its text, the LLM's state
    for each of these ids, and its speech tokens. `chunks` has the chunks of the vocoder's
    open turn. `talker_rows` counts the rows that the talker had, also those of units that were not
    fed, so that it drops its rows at the same units.
    """

    units: list[tuple[Sequence[int], Sequence[Tensor], Sequence[int]]] = field(
        default_factory=list[tuple[Sequence[int], Sequence[Tensor], Sequence[int]]]
    )
    chunks: deque[VocoderChunk] = field(default_factory=deque[VocoderChunk])
    talker_rows: int = 0

    def __bool__(self) -> bool:
        return bool(self.units or self.chunks)


class Status(Enum):
    """What may be done with a conversation."""

    OPENING = "not open yet"  # a part of the prompt is not fed
    READY = "ready"  # a unit may run
    RUNNING = "amid a unit"  # the unit `running` is not complete
    UNSETTLED = "not settled"  # the context window has to move rows
    REBUILDING = "not rebuilt yet"
    LOST = "lost"  # it can only be closed


@dataclass
class Opening:
    """The part of a conversation's prompt that is not fed yet, and values to report after it is.

    - `rows` [n, hidden]: the embeddings to feed. `granted` is the number of those in a pass.
    - `voice`: the embeddings of the voice in the prompt.
    - `ignored`: the options that have no effect.
    """

    slot: int
    rows: Tensor
    voice: Tensor | None
    ignored: tuple[str, ...]
    granted: int = 0
    failure: UnitFailure | None = None
    next_id: None = None

    @property
    def pass_rows(self) -> Tensor:
        """The rows [n, hidden] of the next pass."""
        return self.rows[: self.granted]


@dataclass
class Conversation:
    """The state of one conversation between its units.

    - `window` counts the rows of the context.
    - `generated_rows`: the largest number of rows that a unit adds after its input.
    - `speech` is None for a conversation without audio.
    - `opening` is None when the whole prompt is fed.
    - `running`: a unit that is not complete.
    - `slide`: what the context window has to do before the next unit.
    - `slid_to`: the limit of rows to which the window last made room for a unit, if no unit was
      accepted since. Such limits only fall.
    - `failure`: why the conversation cannot be settled or get its voice.
    - `pending_ids`: the closing ids of a completed unit. They count as part of the context, but are
      fed only with the next unit.
    - `past_speech`: the speech that a rebuild still has to repeat.
    - `awaits_voice`: the conversation has begun or its last turn has ended, and the next turn has
      not been started in the vocoder.
    - `requested`: the texts that a caller wants to be spoken.
    - `unfed_count`: the number of units that a rebuild has not fed. They are the first ones.
    - `talker_begin`: the number of the oldest unit in the talker's cache; None if it is empty.
    """

    slot: int
    turn: TurnState
    sampling: SlotSampling
    window: Window
    generated_rows: int
    speech: SpeechTokens | None
    hearing: Hearing
    opening: Opening | None = None
    status: Status = Status.OPENING
    running: RunningUnit | None = None
    slide: Slide | None = None
    slid_to: int = sys.maxsize
    failure: UnitFailure | None = None
    pending_ids: tuple[int, ...] = ()
    settle_s: float = 0.0
    past_speech: PastSpeech = field(default_factory=PastSpeech)
    awaits_voice: bool = False
    requested: RequestedSpeech = field(default_factory=RequestedSpeech)
    unfed_count: int = 0
    talker_begin: int | None = None

    @property
    def number(self) -> int:
        """The number of the latest complete unit, from 0."""
        return self.turn.unit_count - 1

    @property
    def part(self) -> Part | None:
        """The part that does the next piece of work; None if there is none."""
        if self.opening is not None:
            return Part.FEED
        if self.running is not None:
            return self.running.part
        if self.slide is not None:
            return Part.SETTLE
        return Part.VOICE if self.awaits_voice else None

    def end_speech(self) -> None:
        """Note that the turn has ended, if the conversation speaks. The host alone does this.

        The talker's cache is not changed. The talker empties it when the model ends a turn. After
        an interruption the next turn continues with the old cache, as in the reference.
        """
        if self.speech is not None:
            self.speech.reset()
            self.awaits_voice = True


class InputRows(NamedTuple):
    """The rows of a unit's input in the context, by their content.

    `marks` counts `<unit>` and two marks for each image or slice. `audio` is 0 for a unit without
    audio, which then has frames.
    """

    marks: int = 0
    video: int = 0
    audio: int = 0


@dataclass(eq=False)
class RunningUnit:
    """One unit in progress, which moves from part to part.

    If a stage fails, `failure` is set; a fatal failure ends the conversation.

    - `is_interrupting`: a forced listen ends the turn that is open before the unit.
    - `is_amid_turn`: a turn was open before the unit.
    - `start`: the length of the context before the unit.
    - `row_limit`: the limit of rows to which the window made room before the unit because memory
      was short; 0 if it was not.
    - `first_draw`: how many uniform numbers the conversation has used before the unit.
    - `images`: the decoded frames of the unit. `seen` has their tiles.
    - `row_count`: the number of rows to feed: the pending ids of the conversation, and `rows`.
      `fed` of these rows are in the context. `embeds` are the others, after they were embedded.
    - `granted`: the number of rows, or of tiles, of the next launch.
    - `audio_embeds`: the embeddings of the audio.
    - `chosen_id`: the last choice of the model. `next_id`: the id to feed.
    - `listen_probability`: how likely the first choice was to listen; None if it was not drawn.
    - `chosen_ids`: the choices that the repetition penalty counts.
    - `hidden`: the state of the LLM for each id of the text.
    - `is_spoken`: the talker has drawn the `speech_tokens`.
    - `chunks`: the vocoder chunks that wait to be decoded. `mel` belongs to the first of them.
    - `samples`: the samples of the decoded chunks.
    - `request`: the number of the request whose text the unit speaks; None if there is none.
    - `results`: the requests that the unit has refused or interrupted.
    - `new_requests`: how many requests the unit has added.
    - `laps`: the launches of the unit.
    """

    slot: int
    unit: Unit
    conversation: Conversation
    state: UnitState
    is_interrupting: bool
    is_amid_turn: bool = False
    failure: UnitFailure | None = None
    start: int = 0
    row_limit: int = 0
    first_draw: int = 0
    images: list[PreparedImage] = field(default_factory=list[PreparedImage])
    seen: SeenTiles = field(default_factory=SeenTiles)
    rows: InputRows = field(default_factory=InputRows)
    row_count: int = 0
    fed: int = 0
    granted: int = 0
    audio_embeds: Tensor | None = None
    embeds: Tensor | None = None
    chosen_id: int | None = None
    listen_probability: float | None = None
    next_id: int | None = None
    chosen_ids: list[int] = field(default_factory=list[int])
    hidden: list[Tensor] = field(default_factory=list[Tensor])
    is_spoken: bool = False
    speech_tokens: list[int] = field(default_factory=list[int])
    chunks: deque[VocoderChunk] = field(default_factory=deque[VocoderChunk])
    mel: Tensor | None = None
    samples: list[FloatArray] = field(default_factory=list[FloatArray])
    request: int | None = None
    results: list[SpeechResult] = field(default_factory=list[SpeechResult])
    new_requests: int = 0
    laps: Laps = field(default_factory=Laps)

    def set_input(self, unit: Unit, rows: InputRows) -> None:
        """Set the prepared unit, and the numbers of its rows."""
        self.unit, self.rows = unit, rows
        self.images = [image for image in unit.frames if isinstance(image, PreparedImage)]
        self.seen = SeenTiles(self.images)

    @property
    def part(self) -> Part | None:
        """The part that does the next piece of work; None if the output is complete."""
        if self.fed < self.row_count:
            if self.embeds is None and self.rows.audio and self.audio_embeds is None:
                return Part.HEAR
            return Part.SEE if self.seen.left else Part.FEED
        if self.next_id is not None:
            return Part.DECODE
        if self.speaks and not self.is_spoken:
            return Part.TALK
        return Part.VOCODE if self.chunks else None

    @property
    def speaks(self) -> bool:
        """Whether the complete text is spoken."""
        return not self.state.is_listen and self.conversation.speech is not None

    @property
    def left(self) -> int:
        """The size of what is left of the part; see `Unfinished`."""
        match self.part:
            case Part.FEED:
                return self.row_count - self.fed
            case Part.SEE:
                return self.seen.left
            case Part.VOCODE:
                return len(self.chunks)
            case _:
                return 1

    @property
    def pass_rows(self) -> Tensor | None:
        """The rows [n, hidden] of the next pass; None if it feeds `next_id`."""
        return None if self.embeds is None else self.embeds[: self.granted]
