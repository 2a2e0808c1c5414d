"""The format of a model's sound, its name, and whether two models are the same. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from duplane.fabric.audio import INPUT_RATE_HERTZ, OUTPUT_RATE_HERTZ, SAMPLE_BYTES
from duplane.fabric.v1 import lease_pb2, model_pb2, session_pb2

_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """The duration of a model's units, and the sample rates of what it hears and speaks.

    The defaults apply to fields that a `Model` lacks: all of them if an older worker or scheduler
    has sent the record, or none.
    """

    unit_ns: int = _NS_PER_S
    input_rate_hertz: int = INPUT_RATE_HERTZ
    output_rate_hertz: int = OUTPUT_RATE_HERTZ

    @classmethod
    def of(cls, model: model_pb2.Model) -> ModelFormat:
        """Return the format of a model, from its checked description."""
        duration = model.unit_duration
        return cls(
            duration.seconds * _NS_PER_S + duration.nanos or cls().unit_ns,
            model.input_rate_hertz or INPUT_RATE_HERTZ,
            model.output_rate_hertz or OUTPUT_RATE_HERTZ,
        )

    @property
    def unit_s(self) -> float:
        """The duration of a unit in seconds."""
        return self.unit_ns / _NS_PER_S

    @property
    def unit_sample_count(self) -> int:
        """The number of samples of a unit at the model's input rate, at least 1."""
        return self.samples_of_unit(self.input_rate_hertz)

    def samples_of_unit(self, rate_hertz: int) -> int:
        """Return the number of samples, at least 1, that last about one unit at some rate."""
        return max(1, round(self.unit_ns * rate_hertz / _NS_PER_S))

    def unit_count(self, seconds: float) -> int:
        """Return the number of units that last at least `seconds`."""
        return -int(-seconds * _NS_PER_S // self.unit_ns)

    def speech_s(self, speech: session_pb2.Speech) -> float:
        """Return the duration of a unit's speech in seconds."""
        # Only workers of older releases leave `sample_count` out. Reading `audio` copies it.
        count = speech.sample_count or len(speech.audio) // SAMPLE_BYTES
        return count / self.output_rate_hertz


DEFAULT_FORMAT = ModelFormat()


def name_of(granted: lease_pb2.Granted) -> str:
    """Return the name by which a client can ask for the model of a grant; empty if unknown."""
    return granted.model_label or granted.model.name


def is_same_model(first: model_pb2.Model, second: model_pb2.Model) -> bool:
    """Return whether a conversation can move between workers with these models.

    A field that only one of the records has cannot be compared; older workers lack some fields.
    The worker itself also compares the digest when it rebuilds a conversation.
    """
    return (
        first.name == second.name
        and first.parameter_count == second.parameter_count
        and first.context_token_limit == second.context_token_limit
        and ModelFormat.of(first) == ModelFormat.of(second)
        and _agree(first.digest, second.digest)
        and (
            first.accepts_pictures == second.accepts_pictures
            or not (first.HasField("accepts_pictures") and second.HasField("accepts_pictures"))
        )
    )


def _agree(first: str, second: str) -> bool:
    return first == second or not (first and second)
