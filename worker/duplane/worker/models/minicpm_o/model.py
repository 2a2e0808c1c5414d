"""`DuplexModel`: runs the units of conversations in slots; returns decisions, text and audio.

This module opens and closes conversations and chats; `launches` runs their parts. Two threads may
call `launch` at the same time, for different slots: one for parts of speech, the other for all
other parts. All other methods must be called alone.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

from duplane.worker.models.chat import ChatOutput
from duplane.worker.models.interface import Continue, Part, Result, Unfinished
from duplane.worker.models.minicpm_o import precision
from duplane.worker.models.minicpm_o.chat.chats import Chats
from duplane.worker.models.minicpm_o.chat.prompt import PreparedChat
from duplane.worker.models.minicpm_o.duplex.context_window import Window
from duplane.worker.models.minicpm_o.duplex.conversation import (
    Conversation,
    Opening,
    Status,
)
from duplane.worker.models.minicpm_o.duplex.hearing import Hearing
from duplane.worker.models.minicpm_o.duplex.pipeline import CONTEXT_FULL, Pipeline
from duplane.worker.models.minicpm_o.duplex.prompt import embed_prompt
from duplane.worker.models.minicpm_o.duplex.rebuild import Rebuilder
from duplane.worker.models.minicpm_o.duplex.sampling import DuplexSampling
from duplane.worker.models.minicpm_o.duplex.speech import SpeechStage
from duplane.worker.models.minicpm_o.duplex.unit_state import TurnState
from duplane.worker.models.minicpm_o.launches import Launches
from duplane.worker.models.minicpm_o.llm.language_model import PREFILL_ROWS
from duplane.worker.models.minicpm_o.llm.sampling import SeededUniforms, Uniforms
from duplane.worker.models.minicpm_o.loader import ModelParts, generated_rows, load_parts
from duplane.worker.models.minicpm_o.preparer import PreparedConversation, Preparer
from duplane.worker.models.minicpm_o.preparer_parts import PreparerParts
from duplane.worker.models.minicpm_o.probe import Probe
from duplane.worker.models.minicpm_o.tts.block import TalkBlock
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

_PARTS = list(Part)


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
        self.chats = Chats(parts, self.context_capacity, probe)
        self.has_chat = parts.tokens.has_chat_template
        self._launches = Launches(parts.llm, self._pipeline, self.chats, self._speech_stage, probe)
        self.conversations = self._launches.conversations
        for module in self._modules:
            module.requires_grad_(False).eval()

    @classmethod
    def load(  # noqa: PLR0913 - each parameter is a setting
        cls,
        directory: Path,
        *,
        slot_count: int,
        context_capacity: int = 8192,
        device: str = "cpu",
        dtype: str = "float32",
        turn_rows: int = TURN_ROWS,
        context_share: float = 1.0,
        cuda_graphs: bool = True,
        has_tf32_vocoder: bool = False,
        preparation: PreparerParts | None = None,
    ) -> DuplexModel:
        """Load a checkpoint directory; raises `CheckpointError` if it cannot be used.

        The talker's cache keeps at most `turn_rows` rows of a turn; a longer turn continues without
        its earlier rows. Each slot reserves `context_share` of the memory of its context. With
        `cuda_graphs`, and only on a CUDA device, the model calls `capture`.
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
                context_share=context_share,
                preparation=preparation,
            )
        )
        if cuda_graphs and torch.device(device).type == "cuda":
            model.capture(has_tf32_vocoder=has_tf32_vocoder)
        return model

    @torch.inference_mode()
    def capture(self, *, is_replayed: bool = True, has_tf32_vocoder: bool = False) -> None:
        """Capture passes of LLM and talker, audio encoder and vocoder, before any conversation.

        The module `llm.cuda_graphs` describes the passes. Without `is_replayed` the same passes of
        fixed sizes are called directly and not captured; this works on any device. With
        `has_tf32_vocoder`, the graphs of the vocoder compute in TF32.
        """
        self.llm.capture(is_replayed=is_replayed)
        if is_replayed:
            self.parts.audio.capture()
        if self.parts.talker is not None:
            TalkBlock(self.parts.talker).capture(is_replayed=is_replayed)
        if self.parts.vocoder is not None and is_replayed:
            with precision.tf32() if has_tf32_vocoder else nullcontext():
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
        first = self.begin(slot, self.preparer.conversation(options), uniforms=uniforms)
        (result,) = self._drive(iter([first]))
        if not isinstance(result, Opened):
            self.close(slot)
            raise RuntimeError(f"slot {slot} cannot be opened: {result}")
        return result

    @torch.inference_mode()
    def begin(
        self, slot: int, prepared: PreparedConversation, *, uniforms: Uniforms | None = None
    ) -> Unfinished | UnitFailure:
        """Begin a conversation in a clean slot. It is open when `launch` has fed its prompt.

        The prompt includes a voice. If the vocoder has not cached its own prompt of this voice, the
        open conversation has the part VOICE. `uniforms` replaces the numbers drawn from the
        options' seed. Returns a failure, and the slot stays clean, if other slots have borrowed the
        memory that the prompt needs beyond the slot's reservation.
        """
        self._check_free(slot)
        options, prompt = prepared.options, prepared.prompt
        if prepared.rows > (room := self.llm.cache.room(slot)):
            message = f"the prompt has {prepared.rows} rows, and there is memory for {room}"
            return UnitFailure(slot, CONTEXT_FULL, message, is_fatal=True)
        rows, heard = embed_prompt(self.parts, prompt)
        window = Window(prepared.rules, self.tokens, len(rows) - len(prompt.tail), prompt.tail)
        speech = None
        if self._speech_stage is not None and prepared.speaks:
            speech = self._speech_stage.new_buffer()
        max_tokens = options.max_new_speak_tokens_per_chunk
        conversation = self.conversations[slot] = Conversation(
            slot=slot,
            turn=TurnState(options.force_listen_count, max_tokens),
            sampling=self.sampling.open(slot, options, uniforms or SeededUniforms(options.seed)),
            window=window,
            generated_rows=generated_rows(max_tokens),
            speech=speech,
            hearing=Hearing(self.parts.audio.period_units),
            opening=Opening(slot, rows, heard, prepared.ignored),
        )
        try:
            self.llm.cache.hold(slot, len(rows))
            if self.parts.vocoder is not None and prepared.voice is not None:
                self.parts.vocoder.prime(slot, prepared.voice, seed=options.seed, is_quick=True)
                has_prompt = self.parts.vocoder.has_prompt(slot)
                conversation.awaits_voice = speech is not None and not has_prompt
        except BaseException:
            self.close(slot)
            raise
        return Unfinished(slot, Part.FEED, len(rows))

    def _check_free(self, slot: int) -> None:
        if slot in self.conversations or self.chats.has(slot):
            raise ValueError(f"slot {slot} has a conversation")

    @torch.inference_mode()
    def open_chat(
        self, slot: int, prepared: PreparedChat, *, uniforms: Uniforms | None = None
    ) -> Result:
        """Begin a chat in a clean slot, without feeding rows. Then `launch` runs it.

        Returns its only output if there is no memory for its prompt.
        """
        self._check_free(slot)
        self.chats.open(slot, prepared, uniforms=uniforms)
        return next(self.chats.results([self.chats.chat(slot)]))

    def _unfinished_chat(self, slot: int) -> Unfinished:
        chat = self.chats.chat(slot)
        return Unfinished(slot, chat.part or Part.FEED, chat.left)

    @torch.inference_mode()
    def accept(self, units: Sequence[Unit]) -> Generator[Result, None, None]:
        """Begin units of several slots, which `launch` then runs. Yield their first parts.

        A refused unit has a `UnitFailure`. If the audio of a unit is too short, it is refused, but
        the audio is kept for the next unit. Raises ValueError and changes nothing if a slot is
        named twice, has no conversation, or has one that is not ready (`Status`).
        """
        running = [self._pipeline.begin(one, self.conversations.get(one.slot)) for one in units]
        if len({unit.slot for unit in units}) < len(units):
            raise ValueError(f"a slot is named twice: {[unit.slot for unit in units]}")
        yield from self._pipeline.accept(running)

    @torch.inference_mode()
    def launch(self, items: Sequence[Continue]) -> Generator[Result, None, None]:
        """Do the work of one block; see `interface.Model.advance`.

        If a stage raises, only the slots that cause the error are lost; see `batch_isolation`.
        """
        yield from self._launches.run(items)

    def step(self, units: Sequence[Unit]) -> Generator[UnitOutput | UnitFailure, None, None]:
        """Run one unit per slot, part by part, all together. Yield each output or failure.

        Iterate over all results, then call `settle`. Raises ValueError like `accept`.
        """
        for result in self._drive(self.accept(units)):
            if isinstance(result, UnitOutput | UnitFailure):
                yield result

    def chat_step(self, slots: Sequence[int]) -> Generator[ChatOutput | UnitFailure, None, None]:
        """Run the chats in these slots until each has its next output. Yield these outputs.

        A chat is over after an output with `finish`, or a failure.
        """
        for result in self._drive(self._unfinished_chat(slot) for slot in slots):
            if isinstance(result, ChatOutput | UnitFailure):
                yield result

    def _drive(self, results: Iterable[Result]) -> Iterator[Result]:
        """Launch parts, the first part of all slots first, until each slot has an output.

        `results` are the first results of the slots.
        """
        going: dict[int, Unfinished] = {}
        done: set[int] = set()
        while True:
            for result in results:
                if not isinstance(result, Unfinished):
                    done.add(result.slot)
                    yield result
                elif result.slot not in done:
                    going[result.slot] = result
            if not going:
                return
            part = min((left.part for left in going.values()), key=_PARTS.index)
            items = [
                Continue(left.slot, part, min(left.rows, PREFILL_ROWS))
                for left in going.values()
                if left.part is part
            ]
            for item in items:
                del going[item.slot]
            results = self.launch(items)

    @torch.inference_mode()
    def settle(self, slots: Sequence[int], *, is_deferred: bool = True) -> list[UnitFailure]:
        """Run SETTLE of these slots, if there is any, and start the next turns that are quick.

        Without `is_deferred` all closing ids are fed, too, and not only with the next unit.
        Returns a failure for each slot that can now only be closed.
        """
        failures: list[UnitFailure] = []
        for slot in sorted(set(slots)):
            conversation = self.conversations[slot]
            results: list[Result] = []
            if conversation.status is Status.UNSETTLED:
                results += self.launch([Continue(slot, Part.SETTLE, 1)])
            elif conversation.status is Status.READY and not is_deferred:
                results += self._pipeline.feed_closing_ids(conversation)
            speech = self._speech_stage
            if speech and self._launches.part_of(slot) is Part.VOICE and speech.has_prompt(slot):
                results += self.launch([Continue(slot, Part.VOICE, 1)])
            failures += [result for result in results if isinstance(result, UnitFailure)]
        return failures

    def awaits_voice(self, slot: int) -> bool:
        """Whether the conversation's next turn is not started yet."""
        return self.conversations[slot].awaits_voice

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
