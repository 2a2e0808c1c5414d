"""Chats in slots: feeds prompts and generates answers, in steps.

A step is short, so that duplex conversations on the same device do not wait long. It feeds some
rows of prompts, or generates some ids of answers, or makes a second of their speech. The rules are
those of the reference, except where the reference fails or changes the request:

- The reference fails without streaming. Here every answer is generated with streaming.
- The reference fails if the first id is a terminator. Here the answer is empty.
- The reference removes `<|listen|>` from prompts, which shifts later rows. Here nothing is removed.
- In the reference, the text of answers contains names of special tokens. Here it omits them.
- The reference exceeds `max_new_tokens` by up to ten ids. Here the bound is exact.
- The reference truncates a prompt that is too long. Here such a prompt is refused.

The prompt has `<|im_end|>` twice before the answer, as in the reference. Source: `MiniCPMO` in
`MiniCPMO45/modeling_minicpmo_unified.py` of OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from duplane.worker.models.chat import ChatOptions, ChatOutput, Finish
from duplane.worker.models.minicpm_o.batch_isolation import run_stage, stage_failure
from duplane.worker.models.minicpm_o.chat.prompt import (
    ChatPrompt,
    PreparedChat,
    answer_mark,
    prompt_room,
)
from duplane.worker.models.minicpm_o.chat.prompt_rows import PromptRows
from duplane.worker.models.minicpm_o.chat.sampling import NOT_FINITE, ChatSampling
from duplane.worker.models.minicpm_o.chat.state import Chat, ChatSpeech, Stage
from duplane.worker.models.minicpm_o.llm.sampling import SeededUniforms, Uniforms
from duplane.worker.models.minicpm_o.loader import ModelParts, SpeechVocoder
from duplane.worker.models.minicpm_o.probe import Probe
from duplane.worker.models.minicpm_o.stopwatch import Stopwatch
from duplane.worker.models.minicpm_o.transfer import upload
from duplane.worker.models.minicpm_o.tts.passages import SpeechStream, advance
from duplane.worker.models.minicpm_o.vocoder.token_buffer import WINDOW_TOKENS, SpeechTokens
from duplane.worker.models.minicpm_o.vocoder.vocoder import VocoderChunk, VocoderVoice
from duplane.worker.models.types import FloatArray, UnitFailure

_log = logging.getLogger(__name__)

CHUNK_IDS = 10
"""Ids of the answer that are fed in one step."""
PREFILL_ROWS = 512
"""Maximum number of rows of prompts that are fed in one step, for all chats together."""
_ROTATION = (Stage.PREFILL, Stage.TEXT, Stage.SPEECH)

Results = Iterator[ChatOutput | UnitFailure]


class Chats:
    """The chats of all slots. They use the same model parts as duplex conversations."""

    def __init__(self, parts: ModelParts, capacity: int, probe: Probe | None = None) -> None:
        """Limit each context to `capacity` rows."""
        self._parts, self._capacity, self._probe = parts, capacity, probe
        self._device = parts.llm.model.norm.weight.device
        slots = parts.llm.cache.slot_count
        self._sampling = ChatSampling(parts.tokens, parts.llm.vocabulary, slots, self._device)
        self._chats: dict[int, Chat] = {}  # in the order in which they were opened
        self._latest = Stage.SPEECH

    @property
    def memory_bytes(self) -> int:
        """The size of the permanent tensors."""
        return self._sampling.memory_bytes

    def has(self, slot: int) -> bool:
        """Whether the slot has a chat."""
        return slot in self._chats

    def _chat(self, slot: int) -> Chat:
        if slot not in self._chats:
            raise ValueError(f"slot {slot} has no chat")
        return self._chats[slot]

    def open(self, slot: int, prepared: PreparedChat, *, uniforms: Uniforms | None = None) -> None:
        """Begin a chat in a clean slot, without feeding rows."""
        self.begin(slot, prepared.options, voice=prepared.voice, uniforms=uniforms)
        self.answer(slot, prepared.prompt)

    def prompt_room(self, options: ChatOptions) -> int:
        """Return the largest number of rows of a prompt after which at least one id fits."""
        return prompt_room(self._parts.tokens, options, self._capacity)

    def begin(
        self,
        slot: int,
        options: ChatOptions,
        *,
        voice: VocoderVoice | None = None,
        uniforms: Uniforms | None = None,
    ) -> None:
        """Begin a chat in a clean slot. Its answers are spoken with `voice`, if there is one."""
        if slot in self._chats:
            raise ValueError(f"slot {slot} has a chat")
        uniforms = uniforms or SeededUniforms(options.seed)
        vocoder, speech = self._parts.vocoder, None
        if vocoder is not None and voice is not None:
            speech = _speech(slot, options, uniforms, vocoder)
        self._chats[slot] = Chat(
            slot, options, uniforms, speech, PromptRows(self._parts, ChatPrompt())
        )
        try:
            self._sampling.open(slot, options)
            if vocoder is not None and voice is not None:
                vocoder.prime(slot, voice, seed=options.seed)
        except BaseException:
            self.close(slot)
            raise

    def answer(self, slot: int, prompt: ChatPrompt) -> None:
        """Begin an answer to `prompt`, which is fed after the rows of the slot's context."""
        chat = self._chat(slot)
        rows = PromptRows(self._parts, prompt, answer_mark(self._parts.tokens, chat.options))
        room = self._capacity - self._parts.llm.cache.length(slot) - len(rows)
        is_short = chat.options.max_new_tokens > room
        full = Finish.CONTEXT_FULL if is_short else Finish.LENGTH
        chat.begin(rows, min(room, chat.options.max_new_tokens), full)
        self._sampling.begin_chunk(slot, [])
        if chat.speech is not None and self._parts.talker and self._parts.vocoder:
            self._parts.talker.cache.truncate(slot, 0)
            self._parts.vocoder.start_turn(slot)
            chat.speech.tokens.reset()
            chat.speech.stream.reset()

    @torch.inference_mode()
    def step(self, slots: Sequence[int]) -> Generator[ChatOutput | UnitFailure, None, None]:
        """Run one stage, for those chats in these slots that are at this stage.

        The stages alternate from step to step. Yields at most one result per slot: none for chats
        at other stages, and none for prompts that wait until others are fed. A chat is over after
        an output with `finish`, or a failure. If a stage raises, the chats that cause the error
        fail. If the cause is not known, all chats of the stage without an output in this step fail.
        """
        chats = [self._chat(slot) for slot in sorted(set(slots))]
        waiting = {chat.stage for chat in chats} & set(_ROTATION)
        if not waiting:
            return
        after = _ROTATION.index(self._latest) + 1
        stage = next(s for s in (*_ROTATION[after:], *_ROTATION) if s in waiting)
        self._latest = stage
        run = {Stage.PREFILL: self._prefill, Stage.TEXT: self._generate, Stage.SPEECH: self._speak}
        going = [chat for chat in chats if chat.stage is stage]
        try:
            for result in run[stage](going):
                going = [chat for chat in going if chat.slot != result.slot]
                yield result
        except torch.AcceleratorError:
            raise
        except Exception:  # noqa: BLE001 - any fault of a stage is logged and ends its chats
            _log.exception("%s failed for slots %s", stage.value, [chat.slot for chat in going])
            for chat in going:
                chat.failure = stage_failure(chat.slot, stage.value)
                yield self._result(chat, {})

    def _prefill(self, chats: Sequence[Chat]) -> Results:
        """Feed rows of prompts, oldest first; choose the first answer ids of complete prompts.

        If the oldest prompt has sounds that must be encoded first, the step encodes one batch of
        them instead.
        """
        watch = Stopwatch(self._device)
        opened = list(self._chats)
        waiting = sorted(chats, key=lambda chat: opened.index(chat.slot))
        if sounds := waiting[0].prompt.unencoded_sounds(PREFILL_ROWS):
            run_stage("audio", waiting[:1], lambda _: sounds.encode_next())
            watch.lap("audio")
            yield self._result(waiting[0], watch.seconds())
            return
        embeds = self._prompt_rows(waiting)
        feeding = [chat for chat in chats if chat.slot in embeds]

        def feed(some: Sequence[Chat]) -> tuple[Tensor, Tensor]:
            rows = [embeds[chat.slot] for chat in some]
            counts = [(chat.slot, len(own)) for chat, own in zip(some, rows, strict=True)]
            return self._parts.llm.feed(counts, torch.cat(rows))

        for fed, (_, logits) in run_stage("prefill", feeding, feed, cache=self._parts.llm.cache):
            complete = [index for index, chat in enumerate(fed) if chat.prompt.is_fed]
            if complete:
                last = upload(complete, logits.device)
                self._choose([fed[index] for index in complete], logits[last])
        watch.lap("prefill")
        for chat in chats:
            if chat.slot in embeds and chat.prompt.is_fed:
                chat.stage = Stage.TEXT if chat.finish is None else Stage.DONE
            if chat.slot in embeds or chat.failure is not None:
                yield self._result(chat, watch.seconds())

    def _prompt_rows(self, waiting: Sequence[Chat]) -> dict[int, Tensor]:
        """Return, for each slot, the prompt rows [rows, hidden] to feed in one step."""
        room, embeds = PREFILL_ROWS, dict[int, Tensor]()

        def take(some: Sequence[Chat]) -> Tensor:
            return some[0].prompt.take(room)

        for chat in waiting:
            if not room or chat.prompt.unencoded_sounds(room):
                break
            for _, rows in run_stage("prompt", [chat], take):
                embeds[chat.slot] = rows
                room -= len(rows)
        return embeds

    def _choose(self, chats: Sequence[Chat], logits: Tensor) -> None:
        """Choose the next id of each answer from `logits` [chats, ids]."""
        slots, uniforms = [chat.slot for chat in chats], [chat.uniforms for chat in chats]
        try:
            chosen = self._sampling.choose(slots, logits, uniforms)
        except torch.AcceleratorError:
            raise
        except Exception:  # noqa: BLE001 - any fault of a stage is logged and ends its chats
            _log.exception("choosing ids failed for slots %s", slots)
            for chat in chats:
                chat.failure = stage_failure(chat.slot, "choice")
            return
        for row, (chat, token) in enumerate(zip(chats, chosen, strict=True)):
            if self._probe is not None:
                self._probe.chosen(chat.slot, logits[row], token)
            if token == NOT_FINITE:
                message = "the logits are not finite"
                chat.failure = UnitFailure(chat.slot, "NOT_FINITE", message, is_fatal=True)
            else:
                chat.choose(token, self._sampling.terminators)

    def _generate(self, chats: Sequence[Chat]) -> Results:
        """Feed ids of the answers, choose the next ids, and begin to speak the new ids."""
        watch = Stopwatch(self._device)
        for chat in chats:
            if chat.fed_count:
                self._sampling.begin_chunk(chat.slot, chat.answer)
        going = list(chats)
        for _ in range(CHUNK_IDS):
            self._feed_ids(going)
            going = [chat for chat in going if chat.is_answering]
        watch.lap("decode")
        for chat in chats:
            run_stage("talker", [chat], self._begin_passages)
            if chat.speech is not None:
                watch.lap("talker", "condition")
            yield self._result(chat, watch.seconds())

    def _feed_ids(self, chats: Sequence[Chat]) -> None:
        """Feed the latest id of each answer, and choose the next id of the answer."""
        llm = self._parts.llm

        def feed(some: Sequence[Chat]) -> tuple[Tensor, Tensor]:
            embeds = llm.embed([chat.answer[-1] for chat in some])
            return llm.feed([(chat.slot, 1) for chat in some], embeds)

        for fed, (hidden, logits) in run_stage("decode", chats, feed, cache=llm.cache):
            for chat, state in zip(fed, hidden.unbind(), strict=True):
                chat.record_fed(state)
                if self._probe is not None:
                    self._probe.fed(chat.slot, chat.answer[-1], state)
            self._choose(fed, logits)

    def _begin_passages(self, chats: Sequence[Chat]) -> None:
        """Begin to speak the new ids. In a chat without speech, finish the answer with its text."""
        for chat in chats:
            if chat.speech is not None and self._parts.talker is not None:
                is_end = chat.finish is Finish.STOP
                condition = self._parts.talker.condition(
                    chat.new_ids, chat.hidden, is_text_end=is_end
                )
                chat.speech.stream.begin(condition)
                chat.stage = Stage.SPEECH
            elif chat.finish is not None:
                chat.stage = Stage.DONE

    def _speak(self, chats: Sequence[Chat]) -> Results:
        """Draw speech tokens for the chats' passages; decode the token chunks that are complete."""
        watch, parts = Stopwatch(self._device), self._parts
        if parts.talker is None or parts.vocoder is None:
            raise ValueError("the model does not speak")
        speeches = [chat.speech for chat in chats if chat.speech is not None]
        drawn = advance(parts.talker, [speech.stream for speech in speeches])
        watch.lap("talker")
        samples: dict[int, list[FloatArray]] = {chat.slot: [] for chat in chats}
        chunks: list[VocoderChunk] = []
        for chat, speech, tokens in zip(chats, speeches, drawn, strict=True):
            if speech.stream.is_done:
                chat.stage = Stage.DONE if chat.finish else Stage.TEXT
            cut = speech.tokens.push(tokens, end_of_turn=chat.stage is Stage.DONE)
            chunks += [VocoderChunk(chat.slot, chunk.tokens, chunk.is_last) for chunk in cut]
        for chunk, decoded in zip(chunks, parts.vocoder.decode(chunks), strict=True):
            samples[chunk.slot].append(decoded)
            if self._probe is not None:
                self._probe.vocoded(chunk.slot, list(chunk.tokens), chunk.is_last, len(decoded))
        watch.lap("vocoder")
        for chat, tokens in zip(chats, drawn, strict=True):
            audio = np.concatenate([np.zeros(0, np.float32), *samples[chat.slot]])
            yield self._result(chat, watch.seconds(), audio=audio, audio_token_count=len(tokens))

    def _result(
        self,
        chat: Chat,
        stage_s: dict[str, float],
        *,
        audio: FloatArray | None = None,
        audio_token_count: int = 0,
    ) -> ChatOutput | UnitFailure:
        """Return a step's output with the new text, or the chat's failure."""
        if chat.failure is not None:
            chat.stage = Stage.DONE
            return chat.failure
        ids, chat.new_ids, chat.hidden = tuple(chat.new_ids), [], []
        return ChatOutput(
            slot=chat.slot,
            context_length=self._parts.llm.cache.length(chat.slot),
            is_prefilled=chat.prompt.is_fed,
            text=chat.new_text(self._parts.tokens) if audio is None else "",
            audio=np.zeros(0, np.float32) if audio is None else audio,
            token_ids=ids,
            audio_token_count=audio_token_count,
            finish=chat.finish if chat.stage is Stage.DONE else None,
            stage_s=dict(stage_s),
        )

    def close(self, slot: int) -> None:
        """Remove the slot's chat; the model resets the caches."""
        self._chats.pop(slot, None)
        self._sampling.reset(slot)

    def is_clean(self, slot: int) -> bool:
        """True if no state of a chat is left in the slot."""
        return slot not in self._chats and self._sampling.is_clean(slot)


def _speech(
    slot: int, options: ChatOptions, uniforms: Uniforms, vocoder: SpeechVocoder
) -> ChatSpeech:
    stream = SpeechStream(slot, uniforms, options.is_greedy, options.tts_temperature)
    tokens = SpeechTokens(
        silence_token_id=vocoder.silence_token_id,
        lookahead=vocoder.lookahead,
        fewest=WINDOW_TOKENS,
    )
    return ChatSpeech(stream, tokens)
