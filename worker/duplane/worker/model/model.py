"""`DuplexModel`: conversations in slots, units in, decisions with text and audio out.

Decides who has a conversation and what begins and ends with it; what becomes of its units is
`pipeline`'s matter.
One thread at a time may use it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path

import torch
from PIL.Image import Image
from torch import nn

from duplane.worker.model.chat import Chats, PreparedChat
from duplane.worker.model.chat_prompt import Check, go_on
from duplane.worker.model.chat_types import ChatOutput, ChatRequest
from duplane.worker.model.conversation import Conversation
from duplane.worker.model.images import ImageError, PreparedImage
from duplane.worker.model.parts import ModelParts, load_parts
from duplane.worker.model.pipeline import Pipeline
from duplane.worker.model.probe import Probe
from duplane.worker.model.prompt import embed_prompt
from duplane.worker.model.sampling import TextSampling, Uniforms
from duplane.worker.model.speaking import Speaking
from duplane.worker.model.speech_tokens import SpeechTokens
from duplane.worker.model.talker import TURN_ROWS
from duplane.worker.model.types import (
    ConversationOptions,
    Opened,
    UnitFailure,
    UnitInput,
    UnitOutput,
)
from duplane.worker.model.vocoder import VocoderVoice
from duplane.worker.model.voices import Voices
from duplane.worker.model.windows import Window


class DuplexModel:
    """One model on one device, with a conversation per slot."""

    def __init__(self, parts: ModelParts, *, probe: Probe | None = None) -> None:
        """Put loaded parts together; all were made for the same slots."""
        self.parts, self.tokens, self.llm = parts, parts.tokens, parts.llm
        self.slot_count = parts.llm.cache.slot_count
        self.context_capacity = parts.llm.cache.capacity - parts.overhang
        self.name = parts.name
        device = parts.llm.model.norm.weight.device
        self.sampling = TextSampling(parts.tokens, parts.llm.vocabulary, self.slot_count, device)
        self._speaking = None
        self._voices = Voices(parts.voice_networks, parts.vocoder_voice)
        if parts.talker and parts.vocoder:
            self._speaking = Speaking(parts.talker, parts.vocoder, probe)
        self._pipeline = Pipeline(parts, self.sampling, self._speaking, probe)
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
        turn_rows: int = TURN_ROWS,
        cuda_graphs: bool = True,
    ) -> DuplexModel:
        """Load a checkpoint directory; `CheckpointError` says what is wrong with it.

        A turn of more than `turn_rows` rows of the talker goes on without what it had spoken.
        On a CUDA device, and only there, `cuda_graphs` captures the steps that are short.
        """
        model = cls(
            load_parts(
                directory,
                slot_count=slot_count,
                context_capacity=context_capacity,
                device=device,
                dtype=dtype,
                turn_rows=turn_rows,
            )
        )
        if cuda_graphs and torch.device(device).type == "cuda":
            model.capture()
        return model

    @torch.inference_mode()
    def capture(self, *, is_replayed: bool = True) -> None:
        """Capture the decode step and the talker's, before any conversation; see `graphs`.

        Without `is_replayed` the same steps of fixed sizes are called instead, on any device.
        """
        self.llm.capture(is_replayed=is_replayed)
        if self.parts.talker is not None:
            self.parts.talker.capture(is_replayed=is_replayed)

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
        caches = [parts.llm.cache, self.sampling, self.chats, parts.talker and parts.talker.cache]
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
            self.sampling.open(slot, options)
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

    def prepare_chat(self, request: ChatRequest, check: Check = go_on) -> PreparedChat:
        """Check a request and lay out its prompt, in any thread, as `Chats.prepare` does."""
        return self.chats.prepare(request, check)

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
        return self._pipeline.intake.prepare(unit)

    @torch.inference_mode()
    def step(self, units: Sequence[UnitInput]) -> Generator[UnitOutput | UnitFailure, None, None]:
        """Run one unit per slot, together; one output or failure for each, as they are done.

        Units that listen come before the talker and the vocoder run for those that speak. Run
        it to its end, then settle; a slot whose unit was abandoned can only be closed. Audio of
        a unit that is refused as too short is kept and counts towards the next. Raises
        ValueError for a slot that is named twice, has no conversation or was not settled,
        before anything is done. Where a stage raises, only the conversations that make it raise
        are lost, as `faults` has it.
        """
        self._check(units)
        ordered = sorted(units, key=lambda unit: unit.slot)
        yield from self._pipeline.run([(unit, self.conversation(unit.slot)) for unit in ordered])

    def _check(self, units: Sequence[UnitInput]) -> None:
        slots = [unit.slot for unit in units]
        if len(set(slots)) < len(slots):
            raise ValueError(f"a slot is named twice: {slots}")
        for slot in slots:
            conversation = self.conversation(slot)
            if conversation.is_lost:
                raise ValueError(f"slot {slot} has lost its conversation")
            if conversation.unsettled is not None:
                raise ValueError(f"slot {slot} was not settled")

    def conversation(self, slot: int) -> Conversation:
        """The slot's conversation; ValueError if it has none."""
        conversation = self._conversations[slot]
        if conversation is None:
            raise ValueError(f"slot {slot} has no conversation")
        return conversation

    @torch.inference_mode()
    def settle(self, slots: Sequence[int]) -> list[UnitFailure]:
        """Complete the units of these slots in the context: terminator, unit end, window.

        Returns a failure for each slot that it failed for. Slots whose unit failed, or was
        settled, are left as they are; after a fatal failure a slot can only be closed.
        """
        return self._pipeline.settle(
            [(slot, self.conversation(slot)) for slot in sorted(set(slots))]
        )

    @torch.inference_mode()
    def close(self, slot: int) -> None:
        """Forget the slot's conversation and zero all state it used; a clean slot stays clean."""
        self._conversations[slot] = None
        self.chats.close(slot)
        parts = self.parts
        parts.llm.cache.reset(slot)
        parts.audio.reset(slot)
        self.sampling.reset(slot)
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
            and self.sampling.is_clean(slot)
            and (parts.talker is None or parts.talker.cache.is_clean(slot))
            and (parts.vocoder is None or parts.vocoder.is_clean(slot))
        )
