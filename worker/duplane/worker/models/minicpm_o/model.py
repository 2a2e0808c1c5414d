"""`DuplexModel`: runs the units of conversations in slots; returns decisions, text and audio.

This module opens and closes the conversations of slots; `pipeline` runs their units, and `settle`
settles them. Only one thread at a time may use a model.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path

import torch
from torch import nn

from duplane.worker.models.chat import ChatOutput
from duplane.worker.models.minicpm_o.chat.chats import Chats
from duplane.worker.models.minicpm_o.chat.prompt import PreparedChat
from duplane.worker.models.minicpm_o.duplex.context_window import Window
from duplane.worker.models.minicpm_o.duplex.conversation import (
    Conversation,
    Opening,
    RunningUnit,
    Status,
)
from duplane.worker.models.minicpm_o.duplex.hearing import Hearing
from duplane.worker.models.minicpm_o.duplex.pipeline import Pipeline
from duplane.worker.models.minicpm_o.duplex.prompt import embed_prompt
from duplane.worker.models.minicpm_o.duplex.rebuild import Rebuilder
from duplane.worker.models.minicpm_o.duplex.sampling import DuplexSampling
from duplane.worker.models.minicpm_o.duplex.settle import settle
from duplane.worker.models.minicpm_o.duplex.speech import SpeechStage
from duplane.worker.models.minicpm_o.duplex.unit_state import TurnState
from duplane.worker.models.minicpm_o.llm.language_model import PREFILL_ROWS
from duplane.worker.models.minicpm_o.llm.sampling import SeededUniforms, Uniforms
from duplane.worker.models.minicpm_o.loader import ModelParts, generated_rows, load_parts
from duplane.worker.models.minicpm_o.preparer import PreparedConversation, Preparer
from duplane.worker.models.minicpm_o.preparer_parts import PreparerParts
from duplane.worker.models.minicpm_o.probe import Probe
from duplane.worker.models.minicpm_o.tts.talker import TURN_ROWS
from duplane.worker.models.types import (
    ConversationOptions,
    Opened,
    PastUnit,
    Rebuilt,
    Unit,
    UnitFailure,
    UnitOutput,
)


class DuplexModel:
    """One model on one device. `conversations` has the open conversations, by slot."""

    def __init__(self, parts: ModelParts, *, probe: Probe | None = None) -> None:
        """Combine loaded parts; all must have the same number of slots."""
        self.parts, self.tokens, self.llm = parts, parts.tokens, parts.llm
        self.slot_count = parts.llm.cache.slot_count
        self.context_capacity = parts.llm.cache.capacity - parts.overhang
        self.name, self.digest = parts.name, parts.digest
        device = parts.llm.model.norm.weight.device
        self.sampling = DuplexSampling(parts.tokens, parts.llm.vocabulary, self.slot_count, device)
        self._speech_stage = None
        self.preparer = Preparer(parts.preparation, self.context_capacity)
        if parts.talker and parts.vocoder:
            self._speech_stage = SpeechStage(parts.talker, parts.vocoder, probe)
        self._pipeline = Pipeline(parts, self.sampling, self._speech_stage, probe)
        self._rebuilder = Rebuilder(parts, self.sampling, self._pipeline, self._speech_stage)
        self.conversations: dict[int, Conversation] = {}
        self.chats = Chats(parts, self.context_capacity, probe)
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
        preparation: PreparerParts | None = None,
    ) -> DuplexModel:
        """Load a checkpoint directory; raises `CheckpointError` if it cannot be used.

        The talker's cache keeps at most `turn_rows` rows of a turn; a longer turn continues without
        its earlier rows. With `cuda_graphs`, and only on a CUDA device, the model calls `capture`.
        `preparation` is what `load_preparer_parts` has read from the directory before.
        """
        model = cls(
            load_parts(
                directory,
                slot_count=slot_count,
                context_capacity=context_capacity,
                device=device,
                dtype=dtype,
                turn_rows=turn_rows,
                preparation=preparation,
            )
        )
        if cuda_graphs and torch.device(device).type == "cuda":
            model.capture()
        return model

    @torch.inference_mode()
    def capture(self, *, is_replayed: bool = True) -> None:
        """Capture passes of LLM and talker, audio encoder and vocoder, before any conversation.

        The module `llm.cuda_graphs` describes the passes. Without `is_replayed` the same passes of
        fixed sizes are called directly and not captured; this works on any device.
        """
        self.llm.capture(is_replayed=is_replayed)
        if is_replayed:
            self.parts.audio.capture()
        if self.parts.talker is not None:
            self.parts.talker.capture(is_replayed=is_replayed)
        if self.parts.vocoder is not None and is_replayed:
            self.parts.vocoder.capture()

    @property
    def parameter_count(self) -> int:
        """The number of parameters of the LLM, the encoders and the talker."""
        return sum(tensor.numel() for module in self._modules for tensor in module.parameters())

    @property
    def memory_bytes(self) -> int:
        """The size of all permanent tensors: parameters, buffers and caches."""
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
        """Return the number of rows of the slot's context, including pending ids."""
        conversation = self.conversations.get(slot)
        pending = () if conversation is None else conversation.pending_ids
        return self.llm.cache.length(slot) + len(pending)

    @torch.inference_mode()
    def open(
        self, slot: int, options: ConversationOptions, *, uniforms: Uniforms | None = None
    ) -> Opened:
        """Prepare and begin a conversation, and feed its whole prompt; see `begin`.

        If this raises, the slot is clean.
        """
        self.begin(slot, self.preparer.conversation(options), uniforms=uniforms)
        try:
            while (opened := self.feed_prompt(slot, PREFILL_ROWS)) is None:
                pass
        except BaseException:
            self.close(slot)
            raise
        return opened

    @torch.inference_mode()
    def begin(
        self, slot: int, prepared: PreparedConversation, *, uniforms: Uniforms | None = None
    ) -> None:
        """Begin a conversation in a clean slot. Then call `feed_prompt` until it is open.

        The prompt includes a voice. `uniforms` replaces the numbers drawn from the options' seed.
        """
        self._check_free(slot)
        options, prompt = prepared.options, prepared.prompt
        rows, heard = embed_prompt(self.parts, prompt)
        window = Window(prepared.rules, self.tokens, len(rows) - len(prompt.tail), prompt.tail)
        speech = None
        if self._speech_stage is not None and prepared.speaks:
            speech = self._speech_stage.new_buffer()
        max_tokens = options.max_new_speak_tokens_per_chunk
        self.conversations[slot] = Conversation(
            slot=slot,
            turn=TurnState(options.force_listen_count, max_tokens),
            sampling=self.sampling.open(slot, options, uniforms or SeededUniforms(options.seed)),
            window=window,
            generated_rows=generated_rows(max_tokens),
            speech=speech,
            hearing=Hearing(self.parts.audio.period_units),
            opening=Opening(rows, heard, prepared.ignored),
        )
        try:
            if self.parts.vocoder is not None and prepared.voice is not None:
                self.parts.vocoder.prime(slot, prepared.voice, seed=options.seed)
        except BaseException:
            self.close(slot)
            raise

    @torch.inference_mode()
    def feed_prompt(self, slot: int, row_count: int) -> Opened | None:
        """Feed the next rows of the prompt of a conversation that `begin` began.

        Returns None if more than `row_count` rows were left, so that this must be called again.
        """
        conversation = self.conversations[slot]
        opening = conversation.opening
        if opening is None:
            raise ValueError(f"slot {slot} is open")
        self.llm.append_long(slot, opening.rows[:row_count])
        opening.rows = opening.rows[row_count:]
        if len(opening.rows):
            return None
        conversation.opening, conversation.status = None, Status.READY
        if self._probe is not None:
            self._probe.prepared(slot, opening.voice)
        return Opened(slot, self.context_length(slot), opening.ignored, conversation.window.is_on)

    def _check_free(self, slot: int) -> None:
        if slot in self.conversations or self.chats.has(slot):
            raise ValueError(f"slot {slot} has a conversation")

    @torch.inference_mode()
    def open_chat(
        self, slot: int, prepared: PreparedChat, *, uniforms: Uniforms | None = None
    ) -> None:
        """Begin a chat in a clean slot; see `Chats.open`."""
        self._check_free(slot)
        self.chats.open(slot, prepared, uniforms=uniforms)

    def chat_step(self, slots: Sequence[int]) -> Generator[ChatOutput | UnitFailure, None, None]:
        """Run one short step of the chats in these slots; see `Chats.step`."""
        return self.chats.step(slots)

    @torch.inference_mode()
    def step(
        self, units: Sequence[Unit], *, begun: Sequence[int] = ()
    ) -> Generator[UnitOutput | UnitFailure, None, None]:
        """Run one unit per slot, together. Yield the output or failure of each when it is done.

        `begun` are further slots, whose units `feed_ahead` has begun. Units that listen are yielded
        before the talker and the vocoder run for the others. Iterate over all results, then call
        `settle`; otherwise the slots of the remaining units can only be closed. If a unit is
        refused because its audio is too short, the audio is kept for the next unit. Raises
        ValueError and changes nothing if a slot is named twice, has no conversation, or has one
        that is not ready (`Status`). If a stage raises, only the conversations that cause the error
        are lost; see `batch_isolation`.
        """
        begin, conversations = self._pipeline.begin, self.conversations
        running = {slot: self._ahead(slot) for slot in begun}
        running |= {unit.slot: begin(unit, conversations.get(unit.slot)) for unit in units}
        if len(running) < len(units) + len(begun):
            raise ValueError(f"a slot is named twice: {[*begun, *(unit.slot for unit in units)]}")
        yield from self._pipeline.run([running[slot] for slot in sorted(running)])

    @torch.inference_mode()
    def feed_ahead(self, unit: Unit, row_count: int) -> int | UnitFailure:
        """Encode and feed the first images of a unit, before `step` runs it as a `begun` unit.

        A call feeds images with at most `row_count` rows, or a single image. Returns the number of
        rows that are left. While they are more than `row_count`, call `feed_more`, which does the
        same. If only the last image is left, the result is at most `row_count`. Returns the failure
        if the unit cannot run. Raises ValueError like `step`.
        """
        running = self._pipeline.begin(unit, self.conversations.get(unit.slot))
        return self._pipeline.feed_ahead(running, row_count)

    @torch.inference_mode()
    def feed_more(self, slot: int, row_count: int) -> int | UnitFailure:
        """Feed the next images of a unit that `feed_ahead` has begun."""
        return self._pipeline.feed_ahead(self._ahead(slot), row_count)

    def _ahead(self, slot: int) -> RunningUnit:
        conversation = self.conversations.get(slot)
        if conversation is None or conversation.ahead is None:
            raise ValueError(f"slot {slot} has begun no unit")
        return conversation.ahead

    @torch.inference_mode()
    def settle(self, slots: Sequence[int], *, is_deferred: bool = True) -> list[UnitFailure]:
        """Complete the last unit of each of these slots: add its closing ids, apply the window.

        Normally the closing ids are fed with the next unit, which saves a pass over the weights. If
        a window drops units, the closing ids are fed first, because they must be computed while
        these units are in the context. Without `is_deferred` all closing ids are fed now. Returns
        a failure for each slot that could not be settled and can now only be closed. A slot whose
        unit has failed or was settled before does not change.
        """
        conversations = [self.conversations[slot] for slot in sorted(set(slots))]
        units = settle(conversations, self.llm.cache, self._pipeline, is_deferred=is_deferred)
        failures = [unit.failure for unit in units if unit.failure is not None]
        if self._probe is not None:
            for unit in units:
                if unit.failure is None:
                    self._probe.settled(unit.slot, self.context_length(unit.slot))
        return failures

    def awaits_voice(self, slot: int) -> bool:
        """Whether the conversation's next turn needs a prompt of its voice that is not cached."""
        return self.conversations[slot].awaits_voice

    def start_turn(self, slot: int) -> None:
        """Start the next turn of a conversation that `awaits_voice`; see `SpeechStage`."""
        if self._speech_stage is None:
            raise ValueError("the model does not speak")
        self._speech_stage.start_turn(self.conversations[slot])

    @torch.inference_mode()
    def rebuild(self, slot: int, units: Sequence[PastUnit]) -> Rebuilt | UnitFailure:
        """Do a bounded share of the work to rebuild a conversation from past units.

        Call this again with the remaining units until the result `is_complete`. Then the
        conversation is, up to rounding, as if it had run the past units: units may run, or more
        past units may follow. After a failure the conversation is lost. Raises ValueError if the
        slot has no conversation, or one that is lost or not settled.
        """
        conversation = self.conversations.get(slot)
        if conversation is None:
            raise ValueError(f"slot {slot} has no conversation")
        if conversation.status not in (Status.READY, Status.REBUILDING):
            raise ValueError(f"slot {slot} is {conversation.status.value}")
        if wrong := {past.unit.slot for past in units} - {slot}:
            raise ValueError(f"past units of slots {sorted(wrong)} are not of slot {slot}")
        return self._rebuilder.run(conversation, units)

    @torch.inference_mode()
    def close(self, slot: int) -> None:
        """Remove the slot's conversation or chat and zero its state. Can be repeated."""
        self.conversations.pop(slot, None)
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
        """True if no state of a conversation or chat is left in the slot."""
        parts = self.parts
        return (
            slot not in self.conversations
            and self.chats.is_clean(slot)
            and parts.llm.cache.is_clean(slot)
            and parts.audio.is_clean(slot)
            and self.sampling.is_clean(slot)
            and (parts.talker is None or parts.talker.cache.is_clean(slot))
            and (parts.vocoder is None or parts.vocoder.is_clean(slot))
        )
