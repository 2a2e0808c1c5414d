"""`DuplexModel`: conversations in slots, units in, decisions with text and audio out.

Decides the order of the stages and what a conversation keeps; the stages decide the rest.
One thread at a time may use it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor, nn

from duplane.worker.model.chat import Chats, PreparedChat
from duplane.worker.model.chat_types import ChatOutput, ChatRequest
from duplane.worker.model.conversation import Conversation
from duplane.worker.model.duplex import UnitRules
from duplane.worker.model.generation import RunningUnit, TextGeneration
from duplane.worker.model.images import ImageError, PreparedImage
from duplane.worker.model.intake import Intake, UnitContent, refused
from duplane.worker.model.parts import CLOSING_ROWS, ModelParts, generated_rows, load_parts
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
from duplane.worker.model.windows import Window

_NO_AUDIO = np.zeros(0, np.float32)


class DuplexModel:
    """One model on one device, with a conversation per slot."""

    def __init__(self, parts: ModelParts, *, probe: Probe | None = None) -> None:
        """Put loaded parts together; all were made for the same slots."""
        self.parts, self.tokens, self.llm = parts, parts.tokens, parts.llm
        self.slot_count = parts.llm.cache.slot_count
        self.context_capacity = parts.llm.cache.capacity - parts.overhang
        self.name = parts.name
        self._device = parts.llm.model.norm.weight.device
        self._sampling = TextSampling(
            parts.tokens, parts.llm.vocabulary, self.slot_count, self._device
        )
        self._intake = Intake(parts)
        self._text = TextGeneration(parts.llm, self._sampling, probe)
        self._speaking = None
        self._voices = Voices(parts.voice_networks, parts.vocoder_voice)
        if parts.talker and parts.vocoder:
            self._speaking = Speaking(parts.talker, parts.vocoder, probe)
        self._conversations: list[Conversation | None] = [None] * self.slot_count
        self.chats = Chats(parts, self.context_capacity, self._voices, probe)
        self.has_chat = parts.chat_template is not None
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
        """The number of parameters of the LLM, the encoders and the talker."""
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
        caches = [parts.llm.cache, self._sampling, self.chats, parts.talker and parts.talker.cache]
        holders = [holder for holder in (*caches, parts.vocoder) if holder is not None]
        return fixed + sum(holder.memory_bytes for holder in holders)

    @property
    def _modules(self) -> list[nn.Module]:
        parts = self.parts
        every = (parts.llm, parts.audio, parts.vision, parts.talker)
        return [part for part in every if part is not None]

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
        self._check_free(slot)
        voice = self.parts.prompt_voice if options.llm_voice is None else options.llm_voice
        room = self.context_capacity - options.max_new_speak_tokens_per_chunk
        rules = self.parts.windows.chosen(options, self.context_capacity)
        prompt = embed_prompt(self.parts, options.system_prompt, voice, room)
        head_rows = len(prompt.rows) - len(prompt.tail)
        window = Window(rules, self.tokens, head_rows, prompt.tail)
        speech, tts_voice, ignored = self._speech(options)
        self._conversations[slot] = Conversation.begin(options, window, speech, uniforms)
        try:
            self._sampling.open(slot, options)
            self.llm.append_long(slot, prompt.rows)
            if self.parts.vocoder is not None and tts_voice is not None:
                self.parts.vocoder.prime(slot, tts_voice, seed=options.seed)
        except BaseException:
            self.close(slot)
            raise
        if self._probe is not None:
            self._probe.prepared(slot, prompt.voice)
        return Opened(self.context_length(slot), ignored, window.is_on)

    def _check_free(self, slot: int) -> None:
        if self._conversations[slot] is not None or self.chats.has(slot):
            raise ValueError(f"slot {slot} has a conversation")

    def prepare_chat(self, request: ChatRequest) -> PreparedChat:
        """Check a request and lay out its prompt, in any thread, as `Chats.prepare` does."""
        return self.chats.prepare(request)

    def prepare_picture(self, picture: Image, max_slices: int | None) -> PreparedImage:
        """Cut an RGB picture of a video for a chat, in any thread; raises `ImageError`."""
        if self.parts.vision is None:
            raise ImageError("this checkpoint does not see")
        return self.parts.vision.prepare_picture(picture, max_slices)

    @torch.inference_mode()
    def open_chat(
        self, slot: int, prepared: PreparedChat, *, uniforms: Uniforms | None = None
    ) -> None:
        """Begin a chat in a clean slot, as `Chats.open` does."""
        self._check_free(slot)
        self.chats.open(slot, prepared, uniforms=uniforms)

    def chat_step(self, slots: Sequence[int]) -> Generator[ChatOutput | UnitFailure, None, None]:
        """Do one short thing for the chats in these slots, as `Chats.step` does."""
        return self.chats.step(slots)

    def prepare_voice(self, options: ConversationOptions) -> None:
        """Read the conversation's voice ahead of `open`, which then finds it read.

        Runs on the CPU and touches neither slots nor the device: any thread may call it, at any
        time. Raises `OptionError` as `open` would.
        """
        if options.generate_audio and self._speaking is not None:
            self._voices.choose(options.tts_voice, options.llm_voice)

    def _speech(
        self, options: ConversationOptions
    ) -> tuple[SpeechTokens | None, VocoderVoice | None, tuple[str, ...]]:
        """The speech buffer and the voice, if there is to be audio; options without effect."""
        can_read = self._speaking is not None and self._voices.reads_clips
        ignored = ["tts_voice"] if options.tts_voice is not None and not can_read else []
        if not options.generate_audio:
            return None, None, tuple(ignored)
        voice = None
        if self._speaking is not None:
            voice = self._voices.choose(options.tts_voice, options.llm_voice)
        if self._speaking is None or voice is None:
            return None, None, (*ignored, "generate_audio")
        return self._speaking.buffer(), voice, tuple(ignored)

    @property
    def sees_frames(self) -> bool:
        """Whether units may have frames."""
        return self.parts.vision is not None

    def prepare(self, unit: UnitInput) -> UnitInput | UnitFailure:
        """Decode a unit's frames ahead of `step`, which does it otherwise; safe in any thread."""
        return self._intake.prepare(unit)

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
        for unit in sorted(units, key=lambda unit: unit.slot):
            taken = self._take(unit)
            if isinstance(taken, UnitFailure):
                yield taken
            else:
                running.append(taken)
        if not running:
            return
        logits = self._prefill(running, watch)
        self._interrupt([unit for unit in running if unit.is_interrupting])
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

    def _take(self, unit: UnitInput) -> RunningUnit | UnitFailure:
        """Take a unit in, or say why it cannot be run.

        A refused unit leaves the conversation as it was, but for audio that is too short, and
        for room that was made for it by dropping what the window drops first.
        """
        prepared = self._intake.prepare(unit)
        if isinstance(prepared, UnitFailure):
            return prepared
        content = self._intake.content(prepared)
        failure = self._make_room(unit, content)
        if failure is None and content.has_audio:
            failure = self._intake.hear(unit)
        if failure is not None:
            return failure
        conversation = self.conversation(unit.slot)
        is_interrupting = unit.force_listen and conversation.turn.is_open
        rules = UnitRules.begin(self.tokens, conversation.turn, force_listen=unit.force_listen)
        conversation.unsettled = rules
        conversation.unit_start = self.context_length(unit.slot)
        return RunningUnit(unit.slot, conversation, rules, content, is_interrupting)

    def _make_room(self, unit: UnitInput, content: UnitContent) -> UnitFailure | None:
        """See that the unit fits, whatever it leads to; a window drops what it must for that."""
        conversation = self.conversation(unit.slot)
        generated = generated_rows(conversation.options.max_new_speak_tokens_per_chunk)
        rows = self._intake.rows(content) + generated + conversation.window.spare_rows
        limit = min(self.llm.cache.capacity - rows, self.context_capacity - 1)
        while self.context_length(unit.slot) > limit:
            slide = conversation.window.slide(limit)
            if slide is None:
                held = self.context_length(unit.slot)
                message = f"{held} rows of {self.context_capacity}, the unit takes up to {rows}"
                return refused(unit, "CONTEXT_FULL", message)
            self.llm.splice(unit.slot, slide)
        return None

    def _prefill(self, running: Sequence[RunningUnit], watch: Stopwatch) -> Tensor:
        """Encode and feed what the units bring; the logits [units, ids]."""
        contents = [unit.content for unit in running]
        seen = self._intake.see(contents)
        if any(seen):
            watch.lap("vision")
        hearing = [unit.slot for unit in running if unit.content.has_audio]
        heard = list(self.parts.audio.encode(hearing).unbind()) if hearing else []
        watch.lap("audio")
        embeds = self._intake.lay_out(contents, seen, heard)
        slots = [unit.slot for unit in running]
        logits = self.llm.feed_units(slots, embeds)
        watch.lap("prefill")
        if self._probe is not None:
            self._show(self._probe, slots, seen, logits)
            for slot, rows in zip(hearing, heard, strict=True):
                self._probe.heard(slot, rows)
        return logits

    def _show(
        self, probe: Probe, slots: Sequence[int], seen: Sequence[list[Tensor]], logits: Tensor
    ) -> None:
        for slot, images, row in zip(slots, seen, logits.unbind(), strict=True):
            if images:
                probe.saw(slot, torch.cat(images))
            probe.prefilled(slot, row, self.context_length(slot))

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
            input_audio_count=self.parts.audio.unit_rows if unit.content.has_audio else 0,
            input_video_count=unit.content.piece_count * self._intake.frame_rows,
            input_mark_count=1 + 2 * unit.content.piece_count,
            stage_s={**laps, "settle": unit.conversation.settle_s},
        )

    @torch.inference_mode()
    def settle(self, slots: Sequence[int]) -> None:
        """Complete the units of these slots in the context: terminator, unit end, window.

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
        for slot, conversation, _ in pending:
            conversation.settle(self.context_length(slot))
            if slide := conversation.window.slide():
                self.llm.splice(slot, slide)
            if self._probe is not None:
                self._probe.settled(slot, self.context_length(slot))
        seconds = watch.lap("settle")
        for _, conversation, _ in pending:
            conversation.settle_s = seconds

    @torch.inference_mode()
    def close(self, slot: int) -> None:
        """Forget the slot's conversation and zero all state it used; a clean slot stays clean."""
        self._conversations[slot] = None
        self.chats.close(slot)
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
            and self.chats.is_clean(slot)
            and parts.llm.cache.is_clean(slot)
            and parts.audio.is_clean(slot)
            and self._sampling.is_clean(slot)
            and (parts.talker is None or parts.talker.cache.is_clean(slot))
            and (parts.vocoder is None or parts.vocoder.is_clean(slot))
        )
