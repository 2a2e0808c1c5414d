"""Replays sessions/duplex_*: whole conversations, with every decision and every cache length."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from duplane.tools.golden_replay.audio import read_audio, read_clip
from duplane.tools.golden_replay.check import Check, Verdict, compare, differs, same, worst
from duplane.tools.golden_replay.forcing import TeacherForcing
from duplane.tools.golden_replay.recording import (
    NO_VOICE,
    CountingVocoder,
    RecordedUniforms,
    Recorder,
    SeenUnit,
)
from duplane.tools.golden_replay.target import CPU_TARGET, ReplayTarget
from duplane.worker.models.minicpm_o.loader import ModelParts, load_parts
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.vocoder.voice import Voices
from duplane.worker.models.types import (
    ConversationOptions,
    DecodeMode,
    FloatArray,
    Unit,
    UnitFailure,
    UnitOutput,
    WindowMode,
)

TOLERANCE = 1e-4
SLOT = 0
PROMPT_HEAD, PROMPT_TAIL = "<|im_start|>system\n", "\n<|audio_start|>"
_WINDOW_NUMBERS = (
    *("basic_window_high_tokens", "basic_window_low_tokens"),
    *("context_max_units", "context_previous_max_tokens"),
)


def checks(golden: Path, target: ReplayTarget = CPU_TARGET) -> Iterator[Check]:
    """Yield all checks of the duplex sessions that the directory has."""
    traces = {
        path: orjson.loads(path.read_bytes())
        for path in sorted((golden / "sessions").glob("duplex_*.json"))
    }
    if not traces:
        return
    rows = max(unit["kv_after_generate"] for trace in traces.values() for unit in trace["units"])
    loaded = load_parts(
        golden / "checkpoint",
        slot_count=1,
        context_capacity=rows + 1,
        device=target.device_name,
        dtype=target.dtype_name,
    )
    target.capture(loaded)
    for path, trace in traces.items():
        arrays = np.load(path.with_suffix(".npz"))
        forcing = None if target.is_exact else TeacherForcing()
        yield from SessionReplay(golden, loaded, trace, arrays, forcing).checks()


class SessionReplay:
    """One recorded session, replayed through its own model."""

    def __init__(
        self,
        golden: Path,
        loaded: ModelParts,
        trace: dict[str, Any],
        arrays: Any,
        forcing: TeacherForcing | None = None,
    ) -> None:
        self._trace, self._arrays = trace, arrays
        self._name = trace["name"]
        self._units: list[dict[str, Any]] = trace["units"]
        self._recorder = Recorder()
        buffers = [unit["token2wav_buffer_before"] for unit in self._units]
        silence = next((buffer[0] for buffer in buffers if buffer), 0)
        parts = replace(loaded, vocoder=CountingVocoder(silence), voices=Voices(None, NO_VOICE))
        self._model = DuplexModel(parts, probe=self._recorder)
        draws = [draw["u"] for unit in self._units for draw in unit.get("multinomial", [])]
        self._uniforms = RecordedUniforms(draws)
        self._voice = _voice(golden, trace)
        last = max(_audio_end(unit) for unit in self._units)
        self._images = golden / "images"
        self._audio = read_audio(golden / "audio" / trace["audio"], last)
        self._forcing = forcing
        self._ids: list[int] = []
        self._seen: dict[str, list[Check]] = {}

    def checks(self) -> Iterator[Check]:
        """Yield one check per kind of comparison, combined over all units."""
        with ExitStack() as stack:
            stack.callback(self._model.close, SLOT)
            if self._forcing is not None:
                stack.enter_context(self._forcing.of(self._model))
            yield from self._prepare()
            # A stop ends the session: the worker sends no more units to the model.
            units = list(takewhile(lambda unit: not unit["stop"], self._units))
            for unit in units:
                self._play(unit, is_last=unit is units[-1])
            for kind, found in self._seen.items():
                yield _fold(f"{self._name} {kind}", found)
            yield from self._finish()

    def _prepare(self) -> Iterator[Check]:
        trace, name = self._trace, self._name
        opened = self._model.open(SLOT, _options(trace, self._voice), uniforms=self._uniforms)
        yield same(f"{name} prepare kv", opened.context_length, trace["prepare"]["kv"])
        preserved = trace["prepare"]["system_preserve_length"]
        yield same(f"{name} system_preserve_length", opened.context_length, preserved)
        yield from self._array("prepare_ref_embeds", self._recorder.voices.get(SLOT))

    def _play(self, unit: dict[str, Any], *, is_last: bool) -> None:
        """Run one unit, and compare its results with all recorded values.

        The last unit is settled immediately, so that the final caches can be compared.
        """
        seen = self._recorder.begin_unit(SLOT)
        before = self._model.context_length(SLOT)
        buffered = self._pending_speech()
        end = _audio_end(unit)
        audio = self._audio[end - unit["audio_samples"] : end]
        frames = tuple((self._images / name).read_bytes() for name in unit["frames"])
        if self._forcing is not None:
            self._forcing.begin_unit(unit)
        played = Unit(SLOT, audio, unit["force_listen"], frames, unit["max_slice_nums"])
        (result,) = self._model.step([played])
        match result:
            case UnitOutput():
                self._ids += result.token_ids
                self._model.settle([SLOT], is_deferred=not is_last)
                found = [
                    *self._lengths(unit, seen, before, result),
                    *self._decisions(unit, seen, result),
                    *self._tensors(unit, seen),
                    *self._speech(unit, seen, result, buffered),
                ]
            case UnitFailure():
                found = list(self._failed(unit, result))
        for check in found:
            labelled = replace(check, note=f"unit {unit['unit']}: {check.note}".rstrip(": "))
            self._seen.setdefault(check.name, []).append(labelled)

    def _failed(self, unit: dict[str, Any], failure: UnitFailure) -> Iterator[Check]:
        """Check a unit that was too short.

        The reference keeps a `<unit>` row for such a unit; our model does not. The replay feeds
        this row, so that the following units have the recorded context.
        """
        yield same("prefill_success", False, unit["prefill_success"])
        yield same("failure", failure.reason, "AUDIO_TOO_SHORT")
        yield differs("short unit", "adds no row to the context; the replay added it")
        self._model.conversations[SLOT].pending_ids += (self._model.tokens.unit,)
        yield same("kv_after_finalize", self._model.context_length(SLOT), unit["kv_after_finalize"])
        buffered = self._model.parts.audio.mel.buffered(SLOT)
        yield same("buffer_left", buffered, unit["whisper_buffer_left"])

    def _lengths(
        self, unit: dict[str, Any], seen: SeenUnit, before: int, output: UnitOutput
    ) -> Iterator[Check]:
        audio = self._model.parts.audio
        yield same("prefill_success", True, unit["prefill_success"])
        yield same("kv_before", before, unit["kv_before"])
        yield same("kv_after_prefill", seen.prefilled, unit["kv_after_prefill"])
        yield same("kv_after_generate", output.context_length, unit["kv_after_generate"])
        yield same("kv_after_finalize", seen.settled, unit["kv_after_finalize"])
        yield same("audio_encoder_kv", audio.cache_length(SLOT), unit["audio_encoder_kv"])
        yield same("buffer_left", audio.mel.buffered(SLOT), unit["whisper_buffer_left"])

    def _decisions(
        self, unit: dict[str, Any], seen: SeenUnit, output: UnitOutput
    ) -> Iterator[Check]:
        conversation = self._model.conversations[SLOT]
        yield same("decoded_ids", seen.decided, unit["decoded_ids"])
        for name in ("is_listen", "text", "end_of_turn"):
            yield same(name, getattr(output, name), unit[name])
        yield same("n_tokens", output.text_token_count, unit["n_tokens"])
        yield same("n_tts_tokens", output.audio_token_count, unit["n_tts_tokens"])
        yield same("current_time", conversation.turn.unit_count, unit["current_time"])
        yield same("current_turn_ended", not conversation.turn.is_open, unit["current_turn_ended"])
        window = conversation.window
        history = [[record.number, record.row_count, record.is_listen] for record in window.units]
        yield same("unit_history", history, unit["unit_history"])
        yield same("preserved", window.preserved_rows, unit["system_preserve_length"])
        yield same("previous_token_ids", list(window.previous), unit["previous_token_ids"])

    def _tensors(self, unit: dict[str, Any], seen: SeenUnit) -> Iterator[Check]:
        key = f"u{unit['unit']}"
        yield from self._array(f"{key}_audio_embeds", seen.embeds, "audio_embeds")
        yield from self._array(f"{key}_vision_embeds", seen.vision, "vision_embeds")
        yield from self._array(f"{key}_pending_logits", seen.pending, "pending_logits")
        if seen.hidden:
            yield from self._array(f"{key}_fed_hidden", np.stack(seen.hidden), "fed_hidden")
        if seen.pending is not None:
            yield from self._at(f"{key}_pending_top24", seen.pending, "pending_logits")
        if seen.logits:
            yield from self._at(f"{key}_step_topk", np.stack(seen.logits), "step_logits")

    def _speech(
        self,
        unit: dict[str, Any],
        seen: SeenUnit,
        output: UnitOutput,
        buffered: list[int],
    ) -> Iterator[Check]:
        talker = self._model.parts.talker
        recorded = unit.get("tts")
        yield same("tts runs", seen.speech is not None, recorded is not None)
        if seen.speech is not None and recorded is not None:
            yield same("tts text_start_pos", seen.speech.start, recorded["text_start_pos"])
            yield same("tts tokens", seen.speech.tokens, recorded["tokens"])
            yield same("tts kv_after", seen.speech.length, recorded["kv_after"])
            key = f"u{unit['unit']}_tts_condition"
            yield from self._array(key, seen.speech.condition, "tts_condition")
        if talker is not None:
            length = talker.cache.length(SLOT)
            yield same("tts text_start_pos_after", length, unit["tts_text_start_pos_after"])
        calls = [
            (call["tokens"], call["last"], call["samples"]) for call in unit["token2wav_calls"]
        ]
        yield same("token2wav_calls", seen.pieces, calls)
        yield same("token2wav_buffer_before", buffered, unit["token2wav_buffer_before"])
        yield same("token2wav_buffer_after", self._pending_speech(), unit["token2wav_buffer_after"])
        # If no speech was decoded, the reference returns a second of silence; we return no audio.
        heard = unit["out_audio_samples"] if calls else 0
        yield same("out_audio_samples", len(output.audio), heard)
        draws = [
            draw for done in self._units[: unit["unit"] + 1] for draw in done.get("multinomial", [])
        ]
        yield same("draws", self._uniforms.used_count, len(draws))

    def _finish(self) -> Iterator[Check]:
        name, cache = self._name, self._model.llm.cache
        if self._forcing is not None:
            yield self._forcing.check(f"{name} own ids")
        yield same(f"{name} all_token_ids", self._ids, self._trace["all_token_ids"])
        keys, values = cache.read(SLOT)
        for key in self._arrays.files:
            if key.startswith(("final_k_l", "final_v_l")):
                held = keys if key.startswith("final_k") else values
                rows = self._arrays[key].shape[1]
                layer = int(key.removeprefix("final_k_l").removeprefix("final_v_l"))
                last = held[layer, :, -rows:]
                yield compare(f"{name} {key}", last, self._arrays[key], TOLERANCE)

    def _pending_speech(self) -> list[int]:
        speech = self._model.conversations[SLOT].speech
        return [] if speech is None else list(speech.pending)

    def _array(
        self, key: str, got: NDArray[np.float32] | Tensor | None, name: str = ""
    ) -> Iterator[Check]:
        """Compare `got` with the recorded array, which may hold only every eighth channel."""
        forms: dict[str, ArrayLike | Tensor | None] = {key: got}
        if got is not None:
            forms[f"{key}_c8"] = got[..., ::8]
        for form, value in forms.items():
            if form in self._arrays and value is not None:
                label = name or f"{self._name} {key}"
                yield compare(label, value, self._arrays[form], TOLERANCE)

    def _at(self, key: str, got: NDArray[np.float32], name: str) -> Iterator[Check]:
        """Return the logits of the recorded ids."""
        if f"{key}_ids" in self._arrays:
            ids, values = self._arrays[f"{key}_ids"], self._arrays[f"{key}_values"]
            if got.shape[:-1] == ids.shape[:-1]:
                got = np.take_along_axis(got, ids.astype(np.int64), axis=-1)
            yield compare(name, got, values, TOLERANCE)


def _audio_end(unit: dict[str, Any]) -> int:
    """Return the sample at which the unit ends. A unit without audio has no recorded offset."""
    return (unit["audio_offset"] or 0) + unit["audio_samples"]


def _fold(name: str, found: list[Check]) -> Check:
    different = [check for check in found if check.verdict is Verdict.DIFFERS]
    return replace(different[0], name=name) if different else worst(name, found)


def _options(trace: dict[str, Any], voice: FloatArray | None) -> ConversationOptions:
    """Return the options of a recorded session.

    The reference accepts sampling parameters in its constructor and then ignores them, so these
    parameters are left out.
    """
    prefix: str = trace["prefix"]
    prompt = prefix.removeprefix(PROMPT_HEAD).removesuffix(PROMPT_TAIL)
    if f"{PROMPT_HEAD}{prompt}{PROMPT_TAIL}" != prefix:
        raise ValueError(f"{trace['name']}: the prompt {prefix!r} has an unexpected form")
    chosen = {"force_listen_count": 0, **trace["duplex_config"]}
    fixed = {
        name: chosen[name]
        for name in ("generate_audio", "force_listen_count", "tts_temperature", *_WINDOW_NUMBERS)
        if name in chosen
    }
    window = WindowMode(chosen.get("sliding_window_mode", "off"))
    sampling = {**trace["generate_params"]}
    mode = DecodeMode(sampling.pop("decode_mode", "sampling"))
    return ConversationOptions(
        system_prompt=prompt,
        llm_voice=voice,
        decode_mode=mode,
        sliding_window_mode=window,
        **fixed,
        **sampling,
    )


def _voice(golden: Path, trace: dict[str, Any]) -> FloatArray | None:
    name = trace["ref_audio"]
    return None if name is None else read_clip(golden / "audio" / name)
