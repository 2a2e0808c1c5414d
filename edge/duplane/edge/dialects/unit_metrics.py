"""The metrics of a unit and the tokens of a session, under the names of dialects B and C."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration

from duplane.edge.dialects.actions import Dropped
from duplane.fabric.v1 import session_pb2

# The protocols count one slice for every 64 tokens of pictures, whatever the model makes of them.
FRAME_SLICE_TOKENS = 64
BACKEND = "duplane"
_STAGES = (
    *("total", "audio", "vision", "prefill", "decode"),
    *("condition", "talker", "vocoder"),
)


def stage_metrics(times: session_pb2.StageTimes) -> dict[str, float]:
    """Return the durations of the stages, in milliseconds."""
    stage_ms: dict[str, float] = {}
    for stage in _STAGES:
        duration: Duration = getattr(times, stage)
        stage_ms[stage] = duration.seconds * 1e3 + duration.nanos / 1e6
    talker_ms, vocoder_ms = stage_ms["talker"], stage_ms["vocoder"]
    return {
        "wall_clock_ms": stage_ms["total"],
        "prefill_ms": stage_ms["audio"] + stage_ms["vision"] + stage_ms["prefill"],
        "generate_ms": stage_ms["decode"] + talker_ms + vocoder_ms,
        "cost_llm_ms": stage_ms["prefill"] + stage_ms["decode"],
        "cost_tts_prep_ms": stage_ms["condition"],
        "cost_tts_ms": talker_ms,
        "cost_token2wav_ms": vocoder_ms,
    }


def listen_metrics(delta: session_pb2.Delta) -> dict[str, object]:
    """Return the probability of listening under its public name; nothing if it is not known."""
    if not delta.HasField("listen_probability"):
        return {}
    return {"listen_probability": round(delta.listen_probability, 6)}


def metrics(delta: session_pb2.Delta, dropped: Dropped) -> dict[str, object]:
    """Return the `metrics` of a unit; times in milliseconds, 0 for a stage that did not run."""
    times, counts = delta.stage_times, delta.token_counts
    values: dict[str, object] = {
        "backend": BACKEND,
        "kv_cache_length": delta.context_token_count,
        **stage_metrics(times),
        "n_tokens": counts.output_text_token_count,
        "n_tts_tokens": counts.output_audio_token_count,
        "dropped_units": dropped.unit_count,
        **listen_metrics(delta),
    }
    if dropped.frame_count:
        values["dropped_frames"] = dropped.frame_count
    if counts.input_video_token_count:
        values["vision_tokens"] = counts.input_video_token_count
        values["vision_slices"] = counts.input_video_token_count // FRAME_SLICE_TOKENS
    return values


@dataclass(slots=True)
class Usage:
    """The numbers of tokens of each type that one unit, or a session so far, has used."""

    input_text: int = 0
    input_audio: int = 0
    input_video: int = 0
    output_text: int = 0
    output_audio: int = 0

    @classmethod
    def of_unit(cls, counts: session_pb2.TokenCounts) -> Usage:
        """Return the tokens that one unit used."""
        return cls(
            counts.input_text_token_count,
            counts.input_audio_token_count,
            counts.input_video_token_count,
            counts.output_text_token_count,
            counts.output_audio_token_count,
        )

    def add(self, other: Usage) -> None:
        """Add the tokens of `other`."""
        self.input_text += other.input_text
        self.input_audio += other.input_audio
        self.input_video += other.input_video
        self.output_text += other.output_text
        self.output_audio += other.output_audio

    def to_json(self) -> dict[str, object]:
        """Return the counts under the names that clients expect."""
        used_in = self.input_text + self.input_audio + self.input_video
        used_out = self.output_text + self.output_audio
        return {
            "total_tokens": used_in + used_out,
            "input_tokens": used_in,
            "output_tokens": used_out,
            "input_token_details": {
                "text_tokens": self.input_text,
                "audio_tokens": self.input_audio,
                "vision_tokens": self.input_video,
            },
            "output_token_details": {
                "text_tokens": self.output_text,
                "audio_tokens": self.output_audio,
            },
        }
