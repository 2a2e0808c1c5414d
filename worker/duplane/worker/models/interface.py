"""The seam between the worker and the families of models.

A family gives the worker a `Device`, which loads the two halves of a model:

- a `Preparer`, which needs no weights: tokenizer, pictures, layout of prompts, voices. Any thread
  may use it.
- a `Model`, which only the device thread uses. It holds the conversations and chats of the slots,
  and one method, `advance`, does all their work.

The work comes as items. Items and results are plain data without tensors of the device, which
`pickle` can copy, so that the two halves can run in two processes. A family implements these
protocols for the samples, rows and ids of its own; the worker only counts rows, and moves audio,
text and `UnitOutput.state`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

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
    """The part of a slot's work that is unfinished."""

    PROMPT = "prompt"  # of a conversation that opens
    PICTURES = "pictures"  # of a unit, and then the unit itself
    VOICE = "voice"  # of the next turn; no unit may run before it
    CHAT = "chat"  # of a chat that was started: prompt and answer


@dataclass(frozen=True, slots=True)
class Open:
    """Open a conversation in a clean slot.

    Results: `Unfinished` PROMPT while rows of the prompt are left, then `Opened`.
    """

    slot: int
    conversation: PreparedConversation

    @property
    def rows(self) -> int:
        return self.conversation.rows


@dataclass(frozen=True, slots=True)
class StartChat:
    """Start a chat in a clean slot, without feeding rows. Result: `Unfinished` CHAT."""

    slot: int
    chat: PreparedChat

    @property
    def rows(self) -> int:
        return self.chat.prompt_rows


@dataclass(frozen=True, slots=True)
class RunUnit:
    """Run a prepared unit of an open conversation.

    If the unit has pictures and more rows than the call may feed, some pictures are fed, and the
    result is `Unfinished` PICTURES. Its `rows` are at most the row budget if at most one picture is
    left, so that the unit runs next. Otherwise the unit runs. The result is a `UnitOutput` or
    `UnitFailure`. Then the unit is settled, and the conversation may have one more result: a fatal
    `UnitFailure` if it could not be settled, or `Unfinished` VOICE.
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
    """Continue the unfinished work of a slot: the result of the last item was `Unfinished`.

    The results are those of the item that began the work. For a part of a chat, the result is a
    `ChatOutput`, or none if other chats go first; the last output has `finish`. For a voice it is
    `VoiceReady`.
    """

    slot: int
    part: Part
    rows: int


Item = Open | StartChat | RunUnit | Rebuild | Continue
"""A piece of work of one slot. `rows` is the number of rows that it needs in all."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The slot's work is not finished. A `Continue` must come before other items.

    `rows` is the number of rows that are left: of the prompt for PROMPT and CHAT, of the unit for
    PICTURES, and at most of the prompt of the voice for VOICE. The worker returns it in
    `Continue.rows`, and compares it with the row budget for PICTURES only.
    """

    slot: int
    part: Part
    rows: int


@dataclass(frozen=True, slots=True)
class VoiceReady:
    """The voice of the slot's next turn is computed."""

    slot: int


Result = Unfinished | VoiceReady | Opened | UnitOutput | Rebuilt | ChatOutput | UnitFailure
"""What one item has come to. A fatal `UnitFailure` may come instead of any result."""


class Model(Protocol):
    """The half of a model that has the weights. Only the device thread uses it."""

    @property
    def constants(self) -> ModelConstants: ...

    def advance(self, items: Sequence[Item], row_budget: int) -> Iterator[Result]:
        """Do work for at most one item of each slot, and yield each result as soon as it is known.

        The items of one call run together where the model can batch them. `row_budget` is at least
        1. No prompt and no pictures of an item are fed with more rows than it; only a picture that
        alone has more rows is fed whole. A unit without pictures is not divided. The parts CHAT and
        VOICE and the shares of rebuilds have bounds of their own, which do not depend on
        `row_budget`. The caller iterates to the end. If this raises, the state of all slots of the
        call is unknown, and they can only be closed. Raises ValueError and changes nothing if a
        slot may not do its item now.

        Each item has at least one result; only a step of a chat may have none. Otherwise, or if a
        result has a slot without an item, the caller closes the slots of the call.
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

    The device thread calls all methods but `description`, which any thread may call, and
    `load_preparer`.
    """

    def description(self) -> DeviceDescription: ...

    def load(self) -> tuple[Preparer, Model]:
        """Load the model. Raises LoadError.

        In an engine process, this preparer only prepares the units that warm up the model.
        """
        ...

    def load_preparer(self) -> Preparer:
        """Load the preparer alone, in any thread of the process that serves clients.

        Called instead of `load` if the model runs in an engine process. Raises LoadError.
        """
        ...

    def memory_used_bytes(self) -> int:
        """Return the device's memory in use, or the model's memory if that is unknown."""
        ...

    def check(self) -> None:
        """Raise the device's error if the device cannot be used any more."""


OpenDevice = Callable[[Any], Device]
"""The entry point of a family, `open_device(settings)`. `settings` are the `WorkerSettings`."""
