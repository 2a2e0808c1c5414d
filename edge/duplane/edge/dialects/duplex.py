"""Base class of the duplex dialects: decodes settings and audio, renders the output of units."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import orjson

from duplane.edge.client_errors import ErrorCode, name_fault
from duplane.edge.clock import Moment
from duplane.edge.close import CloseReason
from duplane.edge.dialects.actions import (
    Append,
    Command,
    Configure,
    Dropped,
    Speak,
    SpeechEnding,
    Tag,
)
from duplane.edge.dialects.dialect import Dialect, Phase
from duplane.fabric.resampler import Resampler
from duplane.fabric.v1 import session_pb2

# Reasons for which the client is at fault if a unit fails; for all others the server is.
FAILURES: Mapping[str, ErrorCode] = {
    "INVALID_FIELD": ErrorCode.INVALID_PAYLOAD,
    "UNIT_TOO_LONG": ErrorCode.INVALID_PAYLOAD,
    "PAUSED": ErrorCode.NOT_READY,
}


class RestoredSettings(NamedTuple):
    """The settings of a session that later events need, as they were at another edge."""

    paths: Mapping[str, str]
    max_slice_count: int | None


class DuplexDialect(Dialect):
    """A dialect for full duplex: audio flows in both directions at the same time."""

    # True if every append has exactly one reply; false if every unit has one.
    replies_to_appends: ClassVar[bool] = False
    # The close reason if the worker is lost before the conversation is ready.
    lost_while_opening: ClassVar[CloseReason] = CloseReason.FAILED
    # If not 0, the first append opens the conversation, after so many seconds without events that
    # change its settings (`settling`).
    grace_s: ClassVar[float] = 0.0
    settling: ClassVar[frozenset[str]] = frozenset()

    unsupported: ClassVar[ErrorCode] = ErrorCode.INVALID_PAYLOAD  # the model cannot do this

    must_listen = False  # the model must listen to the next append; the session takes this back

    # Field of the contract's Unit -> the client's name for it, where the names differ.
    unit_paths: ClassVar[Mapping[str, str]] = {}

    # Returns the digits that name a turn that begins with a unit; None if names are drawn.
    turn_names: Callable[[int], str] | None = None

    _paths: Mapping[str, str] = {}  # field of the settings -> its path in the client's event
    _max_slice_count: int | None = None  # for pictures whose append does not set it

    def _configure(self, settings: Configure) -> None:
        super()._configure(settings)
        self._paths = settings.paths
        self._max_slice_count = settings.max_slice_count

    def appended(self, append: Append) -> list[bytes]:
        """Note that an append is applied, whose decoding has changed nothing. Render its effect."""
        del append
        return []

    def open_settings(self) -> session_pb2.Open:
        """Return the settings of the conversation, which no later event changes.

        Only for a dialect with `grace_s`.
        """
        raise AssertionError(f"the settings of {self.name} come in one event")

    def answer(self, command: Command, now: Moment) -> list[bytes]:
        """Render the answer to an event that was accepted."""
        raise AssertionError(f"{self.name} has no command {command.kind} at {now}")

    @abstractmethod
    def delta(
        self, delta: session_pb2.Delta, tag: Tag, dropped: Dropped, now: Moment
    ) -> list[bytes]:
        """Render the output of one unit; `dropped` counts input dropped since the last output."""

    def _speech_audio(self, delta: session_pb2.Delta) -> bytes:
        """Return the audio of a unit. Call this exactly once for each unit.

        Each access to the field makes a copy. If the audio is resampled, the last milliseconds of a
        unit come with the next speech or with the end of the turn. If the turn ends because the
        model must listen, they are dropped.
        """
        audio = delta.speech.audio
        if self._resampler:
            audio = self._resampled(delta, self._resampler)
        return audio

    def _resampled(self, delta: session_pb2.Delta, stream: Resampler) -> bytes:
        audio = stream.add(delta.speech.audio)
        if delta.end_of_turn:
            audio += stream.end()
        return audio if delta.HasField("speech") else b""

    def moving(self, within_s: float, now: Moment) -> list[bytes]:
        """Render the note that the worker is lost; nothing if the dialect has no such note.

        The session continues at another worker within `within_s` seconds, or ends.
        """
        del within_s, now
        return []

    def notice(self, kind: str, fields: Mapping[str, object], now: Moment) -> bytes:
        """Render an event about the socket of a resumable session."""
        del now
        return orjson.dumps({"type": f"{self.queue_prefix}{kind}", **fields})

    def state(self) -> Sequence[object]:
        """Return, as JSON, what `restore` needs to render the next units as this dialect would."""
        return ()

    def restore(self, state: Sequence[Any], settings: RestoredSettings) -> None:
        """Go on as the dialect whose state this is. Its conversation is ready."""
        del state
        self.phase = Phase.ACTIVE
        self._paths, self._max_slice_count = settings.paths, settings.max_slice_count

    def kept_settings(self) -> RestoredSettings:
        """Return the settings that later events need."""
        return RestoredSettings(self._paths, self._max_slice_count)

    def incomplete(self, tag: Tag, now: Moment) -> list[bytes]:
        """Render the reply to an append that completed no unit, if the dialect has one."""
        del tag, now
        return []

    def speech_added(self, speak: Speak, now: Moment) -> list[bytes]:
        """Render that a requested text is now a part of the conversation."""
        del speak, now
        return []

    def speech_ended(
        self, speak: Speak, ending: SpeechEnding, message: str, now: Moment
    ) -> list[bytes]:
        """Render the end of a requested text. `message` says why the text was refused."""
        del speak, ending, message, now
        return []

    def setting_path(self, field: str) -> str:
        """Return the path of a settings field in the client's event."""
        return self._paths.get(field, field)

    def _without_effect(self, opened: session_pb2.Opened) -> list[str]:
        """Return the client's paths of all settings that have no effect, each once."""
        paths = [*self._ignored, *map(self.setting_path, opened.ignored_fields)]
        return list(dict.fromkeys(paths))

    def failed(
        self, failed: session_pb2.Failed, now: Moment, input_id: str | None = None
    ) -> list[bytes]:
        """Render the error for a unit that failed."""
        code = FAILURES.get(failed.reason, ErrorCode.INFERENCE_ERROR)
        # A unit may hold the pictures of several appends, so an index means nothing to the client.
        field = failed.field.partition("[")[0]
        message = name_fault(failed.field, failed.message or "the unit could not be used")
        message = self.unit_paths.get(field, field) + message.removeprefix(failed.field)
        return [self.error(code, message, now, input_id)]


def drop_metrics(dropped: Dropped) -> dict[str, object]:
    """Return the counts of dropped units and pictures, under their public names, without zeros."""
    counts = {"dropped_units": dropped.unit_count, "dropped_frames": dropped.frame_count}
    return {name: count for name, count in counts.items() if count}
