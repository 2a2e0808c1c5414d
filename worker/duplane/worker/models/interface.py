"""The seam between the worker and the families of models.

A family gives the worker a `Device`, which loads the two halves of a model:

- a `Preparer`, which needs no weights: tokenizer, pictures, layout of prompts, voices. Any thread
  may use it.
- a `Model`, which only the threads of the device use: one, or two if the device has two lanes. It
  holds the conversations and chats of the slots, and one method, `advance`, does all their work.

The work comes as items. Items and results are plain data without tensors of the device, which
`pickle` can copy, so that the two halves can run in two processes. A family implements these
protocols for the samples, rows and ids of its own; the worker only counts rows, and moves audio,
text and `UnitOutput.state`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, Protocol

from duplane.worker.models.chat import ChatOutput, ChatRequest
from duplane.worker.models.types import (
    ConversationOptions,
    Opened,
    PastUnit,
    PreparedPicture,
    Rebuilt,
    Unit,
    UnitFailure,
    UnitOutput,
)

if TYPE_CHECKING:  # a base install has no Pillow
    from PIL.Image import Image


class LoadError(Exception):
    """The checkpoint or the device cannot be used. The message says why."""


class DeviceLostError(Exception):
    """The device has failed, and only a new process can use it again."""


@dataclass(frozen=True)
class ModelConstants:
    """The properties of a loaded model, which do not change.

    - `slot_count`: how many conversations and chats the model holds at the same time.
    - `context_capacity`: how many rows one conversation can hold.
    - `name`: the model's name in the checkpoint.
    - `digest` identifies the weights and the settings that decide the output. It is empty if
      conversations cannot be rebuilt.
    - `memory_bytes`: the size of all permanent tensors.
    - `unit_s`: the duration of one unit in seconds. `input_hertz`, `output_hertz`: the sample rates
      of the audio that the model hears and speaks.
    - `accepts_pictures`: whether units may have frames. `has_chat`: whether the model can chat.
    - `accepts_speech_requests`: whether units may have `speech`.
    - `plans_batches`: whether the first units of each number of slots take long, because the device
      then plans them. So units of 1, 2, 4 ... slots run together before the worker serves.
    - `accepts_unfed_units`: whether the first past units of a rebuild may have `unfed_rows`.
    - `lane_count`: 2 if the device may run launches of both lanes at the same time, else 1.
    """

    slot_count: int
    context_capacity: int
    name: str
    digest: str
    parameter_count: int
    memory_bytes: int
    unit_s: float
    input_hertz: int
    output_hertz: int
    accepts_pictures: bool
    has_chat: bool
    accepts_speech_requests: bool = False
    accepts_unfed_units: bool = False
    plans_batches: bool = False
    lane_count: Literal[1, 2] = 1

    def count_of(self, seconds: int) -> int:
        """Return the number of units that last `seconds`, and at least this number.

        So a bound that counts units of one second has the same duration for shorter units.
        """
        return max(seconds, math.ceil(seconds / self.unit_s))


class PreparedConversation(Protocol):
    """The options of a conversation that the model can open, and its prompt of `rows` rows."""

    @property
    def rows(self) -> int: ...


class PreparedChat(Protocol):
    """A chat request that the model can answer, and its prompt.

    `prompt_rows` is the number of all rows of the prompt; `image_rows` and `audio_rows` are parts
    of it. `uses_tts_voice` means that the answer is spoken with the voice of the request.
    """

    @property
    def prompt_rows(self) -> int: ...
    @property
    def image_rows(self) -> int: ...
    @property
    def audio_rows(self) -> int: ...
    @property
    def uses_tts_voice(self) -> bool: ...


class Preparer(Protocol):
    """The half of a model that needs no weights. Any thread may call any method at any time.

    Its results may only be given to the model of the same checkpoint.
    """

    def conversation(self, options: ConversationOptions) -> PreparedConversation:
        """Lay out the prompt and compute the voice, which may take seconds. Raises OptionError."""
        ...

    def unit(self, unit: Unit) -> Unit | UnitFailure:
        """Return the unit with prepared pictures and its number of rows, or its refusal.

        Without frames and requests to speak this takes microseconds, because the worker calls it on
        its event loop. A request that the model cannot speak becomes one of the `speech_results`.
        """
        ...

    def unit_steps(self, unit: Unit) -> Generator[None, None, Unit | UnitFailure]:
        """Do what `unit` does, in steps of about one picture: yields between them.

        Any thread may run the next step. The pictures of other sessions are prepared between the
        steps. The generator may be dropped before its end, if the session ends.
        """
        ...

    def picture(self, picture: Image, max_slices: int | None) -> PreparedPicture:
        """Prepare an RGB picture of a video for a chat. Raises ImageError."""
        ...

    def chat(self, request: ChatRequest, check: Callable[[], None]) -> PreparedChat:
        """Lay out the prompt of a chat. Raises OptionError.

        `check` is called before every picture, sound and voice; it raises to stop the work.
        """
        ...


class Part(Enum):
    """The block of the model that does the next piece of a slot's unfinished work."""

    HEAR = "hear"  # sound of a unit or of a chat's prompt becomes rows
    SEE = "see"  # pictures become rows
    FEED = "feed"  # rows of a unit or a prompt; the last one of a unit or chat chooses its first id
    DECODE = "decode"  # feeds the latest id of a text, and chooses the next one
    TALK = "talk"  # draws speech tokens of a unit, or of a piece of a chat's answer
    VOCODE = "vocode"  # makes samples of one chunk of tokens
    SETTLE = "settle"  # moves the context window after a unit; no unit may run before it
    VOICE = "voice"  # computes the prompt of the voice of the next turn; no unit may run before it


@dataclass(frozen=True, slots=True)
class Open:
    """Open a conversation in a clean slot.

    Results: `Unfinished` FEED until all rows of the prompt are fed, then `Opened`, and perhaps
    `Unfinished` VOICE.
    """

    slot: int
    conversation: PreparedConversation

    @property
    def rows(self) -> int:
        return self.conversation.rows


@dataclass(frozen=True, slots=True)
class StartChat:
    """Start a chat in a clean slot, without feeding rows.

    Results: `Unfinished`, and a `ChatOutput` for the prompt and for each piece of the answer; the
    last one has `finish`.
    """

    slot: int
    chat: PreparedChat

    @property
    def rows(self) -> int:
        return self.chat.prompt_rows


@dataclass(frozen=True, slots=True)
class RunUnit:
    """Begin a prepared unit of an open conversation; this is work of the host only.

    Results: `Unfinished` for each part of its work, then a `UnitOutput` or `UnitFailure`. After a
    `UnitOutput` the conversation may have `Unfinished` SETTLE or VOICE, and a fatal `UnitFailure`
    if it cannot go on.
    """

    unit: Unit

    @property
    def slot(self) -> int:
        return self.unit.slot

    @property
    def rows(self) -> int:
        return self.unit.rows


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Rebuild a share of the past units of an open conversation. Result: `Rebuilt`.

    The share has at least one unit if the item has units.
    Later items bring the units that are left. After the conversation's last past unit, an item
    without units repeats the speech of the open turn, until the result `is_complete`.
    """

    slot: int
    units: Sequence[PastUnit]

    @property
    def rows(self) -> int:
        return sum(past.row_count for past in self.units)


@dataclass(frozen=True, slots=True)
class Continue:
    """Do the next piece of the unfinished work of a slot, whose last result was `Unfinished`.

    `rows` is how much of it to do: rows of FEED, pieces of pictures of SEE; it is at least 1 and at
    most `Unfinished.rows`. The other parts are not divided. The results are those of the item that
    began the work.
    """

    slot: int
    part: Part
    rows: int


Item = Open | StartChat | RunUnit | Rebuild | Continue
"""A piece of work of one slot. `rows` is the number of rows that it needs in all."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The slot's work is not finished. A `Continue` must come before other items.

    `rows` is what is left of this part: rows of FEED, pieces of pictures of SEE, chunks of VOCODE;
    1 for other parts.
    """

    slot: int
    part: Part
    rows: int = 1


@dataclass(frozen=True, slots=True)
class Ready:
    """The slot has settled, or has the voice of its next turn, and has no work left."""

    slot: int


Result = Unfinished | Ready | Opened | UnitOutput | Rebuilt | ChatOutput | UnitFailure
"""What one item has come to. A fatal `UnitFailure` may come instead of any result."""


class Model(Protocol):
    """The half of a model that has the weights. Only the threads of the device use it."""

    @property
    def constants(self) -> ModelConstants: ...

    def advance(self, items: Sequence[Item]) -> Iterator[Result]:
        """Do the work of one block for at most one item of each slot; yield results at once.

        The items are for one block (`engine.schedule.Block`): units to begin, or the same part of
        units, or of chats; FEED and DECODE of units, chats and prompts run together. An opening, a
        share of a rebuild, a settle and a voice come alone. A device with two lanes calls this from
        two threads at the same time, for different slots and for blocks of different lanes.

        Each item has at least one result. The slot has more work if its last result is
        `Unfinished`. A model need not divide its work: a unit may have its `UnitOutput` at once.
        The caller iterates to the end. If this raises, the state of all slots of the call is
        unknown, and they can only be closed. Raises ValueError and changes nothing if a slot may
        not do its item now. If an item has no result, or a result has a slot without an item, the
        caller closes the slots of the call.
        """
        ...

    def close(self, slot: int) -> None:
        """Remove all state of the slot. Can be repeated."""
        ...

    def is_clean(self, slot: int) -> bool:
        """Return whether no state of a conversation or chat is left in the slot."""
        ...


@dataclass(frozen=True)
class DeviceDescription:
    """A device, for operators. `memory_bytes` is 0 if it is unknown."""

    name: str
    description: str = ""
    memory_bytes: int = 0


class Device(Protocol):
    """The device that a model runs on.

    The first thread of the device calls all methods but `check` and `lane`, which both of its
    threads call, `description`, which any thread may call, and `load_preparer`.
    """

    def description(self) -> DeviceDescription: ...

    def load(self) -> tuple[Preparer, Model]:
        """Load the model, outside of the lanes. Raises LoadError, DeviceLostError.

        In an engine process, this preparer only prepares the units that warm up the model.
        """
        ...

    def load_preparer(self) -> Preparer:
        """Load the preparer alone, in any thread of the process that serves clients.

        Called instead of `load` if the model runs in an engine process. Raises LoadError.
        """
        ...

    def lane(self, name: str) -> AbstractContextManager[None]:
        """Return what a thread of a device with two lanes enters around each of its calls.

        The names are `llm` and `speech`; the model warms up and slots are closed in `llm`. The
        calls of the two lanes may overlap on the device. When a call is left, its work is complete,
        so that the other lane can use the results.
        """
        ...

    def memory_used_bytes(self) -> int:
        """Return the device's memory in use, or the model's memory if that is unknown."""
        ...

    def check(self) -> None:
        """Raise the device's error if the device cannot be used any more."""


OpenDevice = Callable[[Any], Device]
"""The entry point of a family, `open_device(settings)`. `settings` are the `WorkerSettings`."""
