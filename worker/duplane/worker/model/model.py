"""`DuplexModel`: conversations in slots, units in, decisions with text and audio out.

Decides the order of the stages and what a conversation keeps; the stages decide the rest.
One thread at a time may use it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from duplane.worker.model.conversation import Conversation
from duplane.worker.model.duplex import UnitRules
from duplane.worker.model.generation import RunningUnit, TextGeneration
from duplane.worker.model.mel import AudioBacklogError
from duplane.worker.model.parts import UNIT_OVERHANG, ModelParts, load_parts
from duplane.worker.model.probe import Probe
from duplane.worker.model.prompt import embed_prompt
from duplane.worker.model.sampling import TextSampling, Uniforms
from duplane.worker.model.speaking import Speaking
from duplane.worker.model.speech_tokens import SpeechTokens
from duplane.worker.model.stopwatch import Stopwatch
from duplane.worker.model.types import (
    ConversationOptions,
    FloatArray,
    Opened,
    UnitFailure,
    UnitInput,
    UnitOutput,
)
from duplane.worker.model.vocoder import VocoderVoice
from duplane.worker.model.voices import Voices

PREFILL_ROWS = 512
"""Rows of a prompt that are fed at once."""
CLOSING_ROWS = 2
_NO_AUDIO = np.zeros(0, np.float32)


class DuplexModel:
    """One model on one device, with a conversation per slot."""

    def __init__(self, parts: ModelParts, *, probe: Probe | None = None) -> None:
        """Put loaded parts together; all were made for the same slots."""
        self.parts, self.tokens, self.llm = parts, parts.tokens, parts.llm
        self.slot_count = parts.llm.cache.slot_count
        self.context_capacity = parts.llm.cache.capacity - UNIT_OVERHANG
        self.name = parts.name
        self._device = parts.llm.model.norm.weight.device
        self._sampling = TextSampling(
            parts.tokens, parts.llm.vocabulary, self.slot_count, self._device
        )
        self._text = TextGeneration(parts.llm, self._sampling, probe)
        self._speaking = None
        self._voices = Voices(parts.voice_networks, parts.vocoder_voice)
        if parts.talker and parts.vocoder:
            self._speaking = Speaking(parts.talker, parts.vocoder, probe)
        self._conversations: list[Conversation | None] = [None] * self.slot_count
        self._probe = probe
        for module in self._modules:
            module.requires_grad_(False).eval()

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        slot_count: int,
        context_capacity: int = 8192,
        device: str = "cpu",
        dtype: str = "float32",
    ) -> DuplexModel:
        """Load a checkpoint directory; `CheckpointError` says what is wrong with it."""
        return cls(
            load_parts(
                directory,
                slot_count=slot_count,
                context_capacity=context_capacity,
                device=device,
                dtype=dtype,
            )
        )

    @property
    def parameter_count(self) -> int:
        """The number of parameters of the LLM, the audio encoder and the talker."""
        return sum(tensor.numel() for module in self._modules for tensor in module.parameters())

    @property
    def memory_bytes(self) -> int:
        """The size of all tensors that stay: parameters, buffers, caches."""
        fixed = sum(
            tensor.nbytes
            for module in self._modules
            for tensor in (*module.parameters(), *module.buffers())
        )
        parts = self.parts
        caches = [parts.llm.cache, self._sampling, parts.talker and parts.talker.cache]
        holders = [holder for holder in (*caches, parts.vocoder) if holder is not None]
        return fixed + sum(holder.memory_bytes for holder in holders)

    @property
    def _modules(self) -> list[nn.Module]:
        parts = self.parts
        return [part for part in (parts.llm, parts.audio, parts.talker) if part is not None]

    def context_length(self, slot: int) -> int:
        """Rows of the slot's context."""
        return self.llm.cache.length(slot)

    @torch.inference_mode()
    def open(
        self, slot: int, options: ConversationOptions, *, uniforms: Uniforms | None = None
    ) -> Opened:
        """Begin a conversation in a clean slot: feed the prompt and the voice in it.

        `uniforms` replaces the draws of `options.seed`. Raises `OptionError` for a prompt that
        does not fit or a voice that cannot be read, and leaves the slot clean then.
        """
        if self._conversations[slot] is not None:
            raise ValueError(f"slot {slot} has a conversation")
        voice = self.parts.prompt_voice if options.llm_voice is None else options.llm_voice
        room = self.context_capacity - options.max_new_speak_tokens_per_chunk
        embeds, heard = embed_prompt(self.parts, options.system_prompt, voice, room)
        speech, tts_voice, ignored = self._speech(options)
        conversation = Conversation.begin(options, speech, uniforms)
        self._conversations[slot] = conversation
        try:
            self._sampling.open(slot, options)
            for start in range(0, len(embeds), PREFILL_ROWS):
                rows = embeds[start : start + PREFILL_ROWS]
                self.llm.append([(slot, len(rows))], rows)
            if self.parts.vocoder is not None and tts_voice is not None:
                self.parts.vocoder.prime(slot, tts_voice, seed=options.seed)
        except BaseException:
            self.close(slot)
            raise
        conversation.prompt_length = self.context_length(slot)
        if self._probe is not None:
            self._probe.prepared(slot, heard)
        return Opened(conversation.prompt_length, ignored)

    def prepare(self, options: ConversationOptions) -> None:
        """Read the conversation's voice ahead of `open`, which then finds it read.

        Runs on the CPU and touches neither slots nor the device: any thread may call it, at any
        time. Raises `OptionError` as `open` would.
        """
        if options.generate_audio and self._speaking is not None:
            self._voices.choose(options)

    def _speech(
        self, options: ConversationOptions
    ) -> tuple[SpeechTokens | None, VocoderVoice | None, tuple[str, ...]]:
        """The speech buffer and the voice, if there is to be audio; options without effect."""
        can_read = self._speaking is not None and self._voices.reads_clips
        ignored = ["tts_voice"] if options.tts_voice is not None and not can_read else []
        if not options.generate_audio:
            return None, None, tuple(ignored)
        voice = None if self._speaking is None else self._voices.choose(options)
        if self._speaking is None or voice is None:
            return None, None, (*ignored, "generate_audio")
        return self._speaking.buffer(), voice, tuple(ignored)

    @torch.inference_mode()
    def step(self, units: Sequence[UnitInput]) -> Generator[UnitOutput | UnitFailure, None, None]:
        """Run one unit per slot, together; one output or failure for each, as they are done.

        Units that listen come before the talker and the vocoder run for those that speak. Run
        it to its end, then settle; a slot whose unit was abandoned can only be closed. Audio of
        a unit that is refused as too short is kept and counts towards the next. Raises
        ValueError for a slot that is named twice, has no conversation or was not settled,
        before anything is done.
        """
        self._check(units)
        watch = Stopwatch(self._device)
        running: list[RunningUnit] = []
        interrupted: list[RunningUnit] = []
        for unit in sorted(units, key=lambda unit: unit.slot):
            failure = self._refusal(unit)
            if failure is not None:
                yield failure
                continue
            begun = self._begin(unit)
            if unit.force_listen and begun.conversation.turn.is_open:
                interrupted.append(begun)
            running.append(begun)
        if not running:
            return
        embeds = self.parts.audio.encode([unit.slot for unit in running])
        watch.lap("audio")
        logits = self._prefill(running, embeds)
        watch.lap("prefill")
        self._interrupt(interrupted)
        speaking: list[RunningUnit] = []
        for unit in self._text.run(running, logits):
            if unit.is_broken:
                yield UnitFailure(unit.slot, "NOT_FINITE", "the logits are not finite", True)
            elif unit.rules.is_listen or unit.conversation.speech is None:
                yield self._output(unit, {**watch.laps, "decode": watch.read()})
            else:
                speaking.append(unit)
        watch.lap("decode")
        yield from self._speak(sorted(speaking, key=lambda unit: unit.slot), watch)

    def _check(self, units: Sequence[UnitInput]) -> None:
        slots = [unit.slot for unit in units]
        if len(set(slots)) < len(slots):
            raise ValueError(f"a slot is named twice: {slots}")
        for slot in slots:
            if self.conversation(slot).unsettled is not None:
                raise ValueError(f"slot {slot} was not settled")

    def conversation(self, slot: int) -> Conversation:
        """The slot's conversation; ValueError if it has none."""
        conversation = self._conversations[slot]
        if conversation is None:
            raise ValueError(f"slot {slot} has no conversation")
        return conversation

    def _refusal(self, unit: UnitInput) -> UnitFailure | None:
        """Take the unit's audio, or say why it cannot be run; nothing else has changed then."""
        if unit.frames:
            return _refused(unit, "FRAMES_UNSUPPORTED", "this model does not see frames")
        options = self.conversation(unit.slot).options
        rows = self.parts.audio.unit_rows + options.max_new_speak_tokens_per_chunk + CLOSING_ROWS
        held = self.context_length(unit.slot)
        if held >= self.context_capacity or held + rows + 2 > self.llm.cache.capacity:
            return _refused(unit, "CONTEXT_FULL", f"{held} rows of {self.context_capacity}")
        try:
            is_ready = self.parts.audio.push(unit.slot, unit.audio)
        except AudioBacklogError as error:
            return _refused(unit, "AUDIO_BACKLOG", str(error))
        except ValueError as error:
            return _refused(unit, "AUDIO_INVALID", str(error))
        if not is_ready:
            buffered = self.parts.audio.buffered(unit.slot)
            return _refused(unit, "AUDIO_TOO_SHORT", f"{buffered} samples are no whole unit yet")
        return None

    def _begin(self, unit: UnitInput) -> RunningUnit:
        conversation = self.conversation(unit.slot)
        rules = UnitRules.begin(self.tokens, conversation.turn, force_listen=unit.force_listen)
        conversation.unsettled = rules
        conversation.unit_start = self.context_length(unit.slot)
        return RunningUnit(unit.slot, conversation, rules)

    def _prefill(self, running: Sequence[RunningUnit], embeds: Tensor) -> Tensor:
        """Feed `<unit>` and the audio rows `[units, rows, hidden]`; the logits [units, ids]."""
        mark = self.llm.embed([self.tokens.unit]).expand(len(running), 1, -1)
        rows = torch.cat((mark, embeds.to(mark.dtype)), dim=1)
        counts = [(unit.slot, rows.shape[1]) for unit in running]
        _, logits = self.llm.feed(counts, rows.flatten(0, 1))
        if self._probe is not None:
            for index, unit in enumerate(running):
                length = self.context_length(unit.slot)
                self._probe.prefilled(unit.slot, embeds[index], logits[index], length)
        return logits

    def _interrupt(self, units: Sequence[RunningUnit]) -> None:
        """Close the turns that a forced listen cuts off, and what they were saying."""
        self._text.interrupt(units)
        for unit in units:
            if self._speaking is not None and unit.conversation.speech is not None:
                self._speaking.end_turn(unit)

    def _speak(self, units: Sequence[RunningUnit], watch: Stopwatch) -> Iterator[UnitOutput]:
        """The outputs of the units that are heard."""
        if not units or self._speaking is None:
            return
        tokens = self._speaking.tokens(units)
        watch.lap("talker")
        samples = self._speaking.samples(units, tokens)
        watch.lap("vocoder")
        for unit, spoken, audio in zip(units, tokens, samples, strict=True):
            yield self._output(unit, watch.laps, audio, len(spoken))

    def _output(
        self,
        unit: RunningUnit,
        laps: dict[str, float],
        audio: FloatArray = _NO_AUDIO,
        audio_token_count: int = 0,
    ) -> UnitOutput:
        rules = unit.rules
        return UnitOutput(
            slot=unit.slot,
            is_listen=rules.is_listen,
            text="" if rules.is_listen else self.tokens.decode(rules.said),
            audio=audio,
            end_of_turn=rules.end_of_turn and not rules.is_listen,
            context_length=self.context_length(unit.slot),
            token_ids=tuple(rules.added),
            text_token_count=len(rules.said),
            audio_token_count=audio_token_count,
            stage_s={**laps, "settle": unit.conversation.settle_s},
        )

    @torch.inference_mode()
    def settle(self, slots: Sequence[int]) -> None:
        """Complete the units of these slots in the context: terminator and unit end.

        Slots whose unit failed, or was settled, are left as they are; after a fatal failure a
        slot can only be closed.
        """
        watch = Stopwatch(self._device)
        held = [(slot, self.conversation(slot)) for slot in sorted(set(slots))]
        pending = [
            (slot, conversation, conversation.unsettled)
            for slot, conversation in held
            if conversation.unsettled is not None and conversation.unsettled.is_over
        ]
        if not pending:
            return
        ids = [token for _, _, rules in pending for token in rules.closing()]
        self.llm.append([(slot, CLOSING_ROWS) for slot, _, _ in pending], self.llm.embed(ids))
        seconds = watch.lap("settle")
        for slot, conversation, _ in pending:
            length = self.context_length(slot)
            conversation.settle(length, seconds)
            if self._probe is not None:
                self._probe.settled(slot, length)

    @torch.inference_mode()
    def close(self, slot: int) -> None:
        """Forget the slot's conversation and zero all state it used; a clean slot stays clean."""
        self._conversations[slot] = None
        parts = self.parts
        parts.llm.cache.reset(slot)
        parts.audio.reset(slot)
        self._sampling.reset(slot)
        if parts.talker is not None:
            parts.talker.cache.reset(slot)
        if parts.vocoder is not None:
            parts.vocoder.reset(slot)

    @torch.inference_mode()
    def is_clean(self, slot: int) -> bool:
        """Verify that nothing of any conversation is left in the slot."""
        parts = self.parts
        return (
            self._conversations[slot] is None
            and parts.llm.cache.is_clean(slot)
            and parts.audio.is_clean(slot)
            and self._sampling.is_clean(slot)
            and (parts.talker is None or parts.talker.cache.is_clean(slot))
            and (parts.vocoder is None or parts.vocoder.is_clean(slot))
        )


def _refused(unit: UnitInput, reason: str, message: str) -> UnitFailure:
    """A failure that has not touched the conversation."""
    return UnitFailure(unit.slot, reason, message, is_fatal=False)
