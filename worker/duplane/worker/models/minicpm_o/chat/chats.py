"""Runs the parts of chats: each method does one block's work for some chats.

A part is short, so that duplex conversations on the same device do not wait long. It encodes a
batch of sounds or some pictures, feeds some rows of a prompt or an id of an answer, draws about a
second of speech, or decodes a chunk of it. If a stage raises an error, `batch_isolation` ends only
the chats that cause it. The rules are those of the reference, except where the reference fails or
changes the request:

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

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from duplane.worker.models.chat import ChatOptions, ChatOutput, Finish
from duplane.worker.models.interface import Result, Unfinished
from duplane.worker.models.minicpm_o.batch_isolation import run_stage
from duplane.worker.models.minicpm_o.chat.prompt import (
    ChatPrompt,
    PreparedChat,
    answer_mark,
    prompt_room,
)
from duplane.worker.models.minicpm_o.chat.prompt_rows import PromptRows
from duplane.worker.models.minicpm_o.chat.sampling import NOT_FINITE, ChatSampling
from duplane.worker.models.minicpm_o.chat.state import Chat, ChatSpeech
from duplane.worker.models.minicpm_o.llm.passes import Fed
from duplane.worker.models.minicpm_o.llm.sampling import SeededUniforms, Uniforms
from duplane.worker.models.minicpm_o.loader import ModelParts, SpeechVocoder
from duplane.worker.models.minicpm_o.probe import Probe
from duplane.worker.models.minicpm_o.stopwatch import Laps, Stopwatch
from duplane.worker.models.minicpm_o.tts.passages import SpeechStream, advance
from duplane.worker.models.minicpm_o.tts.talker import Talker
from duplane.worker.models.minicpm_o.vision.seen_tiles import see
from duplane.worker.models.minicpm_o.vocoder.token_buffer import WINDOW_TOKENS, SpeechTokens
from duplane.worker.models.minicpm_o.vocoder.vocoder import VocoderChunk, VocoderVoice
from duplane.worker.models.types import UnitFailure


class Chats:
    """The chats of all slots. They use the same model parts as duplex conversations."""

    def __init__(self, parts: ModelParts, capacity: int, probe: Probe | None = None) -> None:
        """Limit each context to `capacity` rows."""
        self._parts, self._capacity, self._probe = parts, capacity, probe
        self._device = parts.llm.model.norm.weight.device
        slots = parts.llm.cache.slot_count
        self._sampling = ChatSampling(parts.tokens, parts.llm.vocabulary, slots, self._device)
        self._chats: dict[int, Chat] = {}

    @property
    def memory_bytes(self) -> int:
        """The size of the permanent tensors."""
        return self._sampling.memory_bytes

    def has(self, slot: int) -> bool:
        """Whether the slot has a chat."""
        return slot in self._chats

    def chat(self, slot: int) -> Chat:
        """Return the chat of the slot; raises ValueError if there is none."""
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
        """Begin an answer to `prompt`, which is fed after the rows of the slot's context.

        The answer is bounded by the memory that the slot can have now. Without memory for the
        prompt and one id, the chat ends at once.
        """
        chat, cache = self.chat(slot), self._parts.llm.cache
        rows = PromptRows(self._parts, prompt, answer_mark(self._parts.tokens, chat.options))
        start = cache.length(slot) + len(rows)
        room = min(self._capacity, cache.room(slot)) - start
        if room < 1:
            chat.finish = Finish.CONTEXT_FULL
            return
        cache.hold(slot, start + min(room, chat.options.max_new_tokens))
        is_short = chat.options.max_new_tokens > room
        full = Finish.CONTEXT_FULL if is_short else Finish.LENGTH
        chat.begin(rows, min(room, chat.options.max_new_tokens), full)
        self._sampling.begin_chunk(slot, [])
        if chat.speech is not None and self._parts.talker and self._parts.vocoder:
            self._parts.talker.cache.truncate(slot, 0)
            self._parts.vocoder.start_turn(slot)
            chat.speech = _speech(slot, chat.options, chat.uniforms, self._parts.vocoder)

    def hear(self, chats: Sequence[Chat], watch: Stopwatch) -> None:
        """HEAR: encode the next batch of sounds of each prompt."""
        for chat in chats:
            run_stage("audio", [chat], lambda some: some[0].prompt.hear())
        watch.lap("audio")

    def see(self, chats: Sequence[Chat], watch: Stopwatch) -> None:
        """SEE: encode the next `granted` tiles of each prompt."""
        if self._parts.vision is not None:  # otherwise the preparer has refused the pictures
            run_stage("vision", chats, partial(see, self._parts.vision))
        watch.lap("vision")

    def prepare_rows(self, chats: Sequence[Chat]) -> None:
        """Before a pass: embed the next `granted` rows of prompts, or begin the next piece."""
        for chat in chats:
            run_stage("prompt", [chat], self._prepare_rows)

    def _prepare_rows(self, chats: Sequence[Chat]) -> None:
        for chat in chats:
            if not chat.prompt.is_fed:
                chat.pass_rows = chat.prompt.take(min(chat.granted, chat.left))
            elif chat.has_piece:
                self._sampling.begin_chunk(chat.slot, chat.answer)
                chat.new_ids, chat.hidden = [], []

    def take_rows(self, chats: Sequence[Chat], fed: Fed) -> None:
        """After a pass: let chats whose prompt or latest id is in the context choose the next id.

        A piece of the answer that is complete then is spoken, if the answer is.
        """
        choosing: list[Chat] = []
        for chat in chats:
            if chat.failure is not None:
                continue
            if chat.pass_rows is None:
                state = fed.hidden_of(chat.slot)
                chat.record_fed(state)
                if self._probe is not None:
                    self._probe.fed(chat.slot, chat.answer[-1], state)
            chat.pass_rows = None
            if chat.prompt.is_fed:
                choosing.append(chat)
        run_stage("choice", choosing, partial(self._choose, fed))
        for chat in choosing:
            chat.has_text = not chat.new_ids or chat.finish is not None or chat.has_piece
            chat.is_speaking = chat.speech is not None and bool(chat.new_ids) and chat.has_text

    def _choose(self, fed: Fed, chats: Sequence[Chat]) -> None:
        """Choose the next id of each answer."""
        slots, uniforms = [chat.slot for chat in chats], [chat.uniforms for chat in chats]
        logits = fed.logits_of(slots)
        chosen = self._sampling.choose(slots, logits, uniforms)
        for row, (chat, token) in enumerate(zip(chats, chosen, strict=True)):
            if self._probe is not None:
                self._probe.chosen(chat.slot, logits[row], token)
            if token == NOT_FINITE:
                message = "the logits are not finite"
                chat.failure = UnitFailure(chat.slot, "NOT_FINITE", message, is_fatal=True)
            else:
                chat.choose(token, self._sampling.terminators)

    def talk(self, chats: Sequence[Chat], watch: Stopwatch) -> None:
        """TALK: draw speech tokens of pieces, slots ascending, and cut the chunks to decode."""
        if (talker := self._parts.talker) is None:
            raise ValueError("the model does not speak")
        beginning = [chat for chat in chats if chat.speech and chat.speech.stream.is_done]
        for chat in beginning:
            run_stage("talker", [chat], partial(_begin_passages, talker))
        watch.lap("talker", "condition")
        run_stage("talker", chats, partial(_draw, talker), cache=talker.cache)
        watch.lap("talker")

    def results(self, chats: Sequence[Chat]) -> Iterator[Result]:
        """Yield what each chat has come to after a launch.

        There is an output for the whole prompt, for the ids of a piece, for each chunk of speech,
        and at the end.
        """
        for chat in chats:
            if chat.failure is not None:
                yield chat.failure
                continue
            after = chat.part
            if chat.has_text:
                chat.has_text = False
                text = chat.new_text(self._parts.tokens)
                yield self._output(chat, text=text, token_ids=tuple(chat.new_ids))
            elif chat.samples or after is None:
                yield self._output(chat)
            if after is not None:
                yield Unfinished(chat.slot, after, chat.left)

    def _output(self, chat: Chat, *, text: str = "", token_ids: tuple[int, ...] = ()) -> ChatOutput:
        """Return an output with the samples and tokens since the last one."""
        samples, chat.samples = chat.samples, []
        count, chat.token_count = chat.token_count, 0
        laps, chat.laps = chat.laps, Laps()
        return ChatOutput(
            slot=chat.slot,
            context_length=self._parts.llm.cache.length(chat.slot),
            text=text,
            audio=np.concatenate([np.zeros(0, np.float32), *samples]),
            token_ids=token_ids,
            audio_token_count=count,
            finish=chat.finish if chat.part is None else None,
            stage_s=laps.seconds(),
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


def _begin_passages(talker: Talker, chats: Sequence[Chat]) -> None:
    """Begin to speak the ids of the pieces."""
    for chat in chats:
        if chat.speech is not None:
            is_end = chat.finish is Finish.STOP
            condition = talker.condition(chat.new_ids, chat.hidden, is_text_end=is_end)
            chat.speech.stream.begin(condition)


def _draw(talker: Talker, chats: Sequence[Chat]) -> None:
    """Draw speech tokens, and cut them into chunks."""
    speeches = [chat.speech for chat in chats if chat.speech is not None]
    drawn = advance(talker, [speech.stream for speech in speeches])
    for chat, speech, tokens in zip(chats, speeches, drawn, strict=True):
        chat.is_speaking = not speech.stream.is_done
        chat.token_count += len(tokens)
        is_end = chat.finish is not None and not chat.is_speaking
        cut = speech.tokens.push(tokens, end_of_turn=is_end)
        chat.chunks += [VocoderChunk(chat.slot, chunk.tokens, chunk.is_last) for chunk in cut]
