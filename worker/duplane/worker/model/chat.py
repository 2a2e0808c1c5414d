"""Chats in slots: a prompt in, an answer out, step by step.

Decides what each step does; one step does one short thing, so that conversations that run beside
never wait long. Its rules are the reference's, but for what it breaks:

- Its non-streaming generation fails. Here there is one way to generate; who wants the whole
  answer at once collects it.
- It fails when the first id is a terminator. Here the answer is empty.
- It strips `<|listen|>` from prompts, which moves everything behind it. Here nothing is stripped.
- It tells the names of special tokens as text. Here text has none.
- It runs up to ten ids over `max_new_tokens`. Here the bound is exact.
- A prompt over the bound is cut off there. Here it is refused.

The prompt has `<|im_end|>` twice before the answer, as the reference has it: the model is used so.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from duplane.worker.model.chat_answer import Chat, Stage, Voice
from duplane.worker.model.chat_prompt import Bound, ChatPrompt, PromptBuilder
from duplane.worker.model.chat_sampling import NOT_FINITE, ChatSampling
from duplane.worker.model.chat_types import ChatOptions, ChatOutput, ChatRequest, Finish
from duplane.worker.model.parts import ModelParts, SpeechVocoder
from duplane.worker.model.probe import Probe
from duplane.worker.model.sampling import SeededUniforms, Uniforms
from duplane.worker.model.speech_tokens import WINDOW_TOKENS, SpeechTokens
from duplane.worker.model.stopwatch import Stopwatch
from duplane.worker.model.talker_stream import SpeechStream, advance
from duplane.worker.model.transfer import upload
from duplane.worker.model.types import FloatArray, OptionError, UnitFailure
from duplane.worker.model.vocoder import VocoderChunk, VocoderVoice
from duplane.worker.model.voices import Voices

CHUNK_IDS = 10
"""Ids of the answer that are fed in one step."""
PREFILL_ROWS = 512
"""Rows of prompts that are fed in one step, of all chats together."""
ANSWER_MARK = "<|im_end|>\n<|im_start|>assistant\n"
NO_THOUGHTS = "<think>\n\n</think>\n\n"
SPEECH_MARK = "<|tts_bos|>"
_TURNS = (Stage.PREFILL, Stage.TEXT, Stage.SPEECH)
_NO_AUDIO = np.zeros(0, np.float32)


@dataclass(frozen=True)
class PreparedChat:
    """A request that was found good: its prompt, which has `prompt_rows` before the answer mark.

    `image_rows` and `audio_rows` of them are embeddings of pictures and of sounds.
    """

    options: ChatOptions
    prompt: ChatPrompt
    prompt_rows: int
    image_rows: int
    audio_rows: int


class Chats:
    """The chats of all slots, over the parts that they share with the other conversations."""

    def __init__(
        self, parts: ModelParts, capacity: int, voices: Voices, probe: Probe | None = None
    ) -> None:
        """Let a context grow to `capacity` rows, and chats speak with `voices`."""
        self._parts, self._capacity, self._probe = parts, capacity, probe
        self._voices = voices
        self._device = parts.llm.model.norm.weight.device
        slots = parts.llm.cache.slot_count
        self._sampling = ChatSampling(parts.tokens, parts.llm.vocabulary, slots, self._device)
        self._chats: dict[int, Chat] = {}  # in the order in which they were opened
        self._latest = Stage.SPEECH

    @property
    def memory_bytes(self) -> int:
        """The size of the tensors that stay."""
        return self._sampling.memory_bytes

    def has(self, slot: int) -> bool:
        """Whether the slot has a chat."""
        return slot in self._chats

    def chat(self, slot: int) -> Chat:
        """The slot's chat; ValueError if it has none."""
        if slot not in self._chats:
            raise ValueError(f"slot {slot} has no chat")
        return self._chats[slot]

    def prepare(self, request: ChatRequest) -> PreparedChat:
        """Check a request whole and lay out its prompt. May run in any thread, for many at once.

        Raises `OptionError` that names what is at fault.
        """
        builder = PromptBuilder(self._parts, request.options, self.prompt_room(request.options))
        prompt = builder.chat(request.messages)
        if request.options.generate_audio:
            self._choose_voice(request.options)  # read here once, found again by `begin`
        return PreparedChat(
            options=request.options,
            prompt=prompt,
            prompt_rows=len(prompt.ids),
            image_rows=_rows(prompt.image_bounds),
            audio_rows=_rows(prompt.audio_bounds),
        )

    def open(self, slot: int, prepared: PreparedChat, *, uniforms: Uniforms | None = None) -> None:
        """Begin a chat in a clean slot; nothing is fed yet. A prepared chat can be opened once."""
        self.begin(slot, prepared.options, uniforms=uniforms)
        self.answer(slot, prepared.prompt)

    def prompt_room(self, options: ChatOptions) -> int:
        """Rows that a prompt may have, so that at least one id fits behind it."""
        return self._capacity - len(self._answer_mark(options)) - 1

    def begin(self, slot: int, options: ChatOptions, *, uniforms: Uniforms | None = None) -> None:
        """Take a clean slot for a chat."""
        if slot in self._chats:
            raise ValueError(f"slot {slot} has a chat")
        uniforms = uniforms or SeededUniforms(options.seed)
        chosen = self._choose_voice(options) if options.generate_audio else None
        voice = self._voice(slot, options, uniforms, chosen[0]) if chosen else None
        self._chats[slot] = Chat(slot, options, uniforms, voice, ChatPrompt())
        try:
            self._sampling.open(slot, options)
            if chosen is not None:
                vocoder, clip = chosen
                vocoder.prime(slot, clip, seed=options.seed)
        except BaseException:
            self.close(slot)
            raise

    def _choose_voice(self, options: ChatOptions) -> tuple[SpeechVocoder, VocoderVoice]:
        parts, voice = self._parts, self._voices.choose(options.tts_voice)
        if parts.talker is None or parts.vocoder is None or voice is None:
            raise OptionError("generate_audio", "is not possible: this checkpoint has no voice")
        return parts.vocoder, voice

    def _voice(
        self, slot: int, options: ChatOptions, uniforms: Uniforms, vocoder: SpeechVocoder
    ) -> Voice:
        tokens = SpeechTokens(
            silence_token_id=vocoder.silence_token_id,
            lookahead=vocoder.lookahead,
            fewest=WINDOW_TOKENS,
        )
        stream = SpeechStream(slot, uniforms, options.is_greedy, options.tts_temperature)
        return Voice(stream, tokens)

    def answer(self, slot: int, prompt: ChatPrompt) -> None:
        """Begin an answer to `prompt`, behind what the slot's context holds already."""
        chat = self.chat(slot)
        prompt.ids += self._answer_mark(chat.options)
        room = self._capacity - self._parts.llm.cache.length(slot) - len(prompt.ids)
        is_short = chat.options.max_new_tokens > room
        full = Finish.CONTEXT_FULL if is_short else Finish.LENGTH
        chat.begin(prompt, min(room, chat.options.max_new_tokens), full)
        self._sampling.begin_chunk(slot, [])
        if chat.voice is not None and self._parts.talker and self._parts.vocoder:
            self._parts.talker.cache.truncate(slot, 0)
            self._parts.vocoder.start_turn(slot)
            chat.voice.tokens.reset()
            chat.voice.stream.reset()

    def _answer_mark(self, options: ChatOptions) -> list[int]:
        thoughts = "" if options.is_thinking else NO_THOUGHTS
        speech = SPEECH_MARK if options.answers_as_speech else ""
        return self._parts.tokens.encode(ANSWER_MARK + thoughts + speech)

    @torch.inference_mode()
    def step(self, slots: Sequence[int]) -> Generator[ChatOutput | UnitFailure, None, None]:
        """Do one short thing for those of these chats that are at the same stage, together.

        The stages take turns. At most one output per slot; chats that are elsewhere, and prompts
        that wait for others to be fed, have none. After an output with `finish`, or a failure, a
        chat has no more steps.
        """
        chats = [self.chat(slot) for slot in sorted(set(slots))]
        waiting = {chat.stage for chat in chats} & set(_TURNS)
        if not waiting:
            return
        after = _TURNS.index(self._latest) + 1
        stage = next(turn for turn in (*_TURNS[after:], *_TURNS) if turn in waiting)
        self._latest = stage
        run = {Stage.PREFILL: self._prefill, Stage.TEXT: self._write, Stage.SPEECH: self._speak}
        yield from run[stage]([chat for chat in chats if chat.stage is stage])

    def _prefill(self, chats: Sequence[Chat]) -> Iterator[ChatOutput | UnitFailure]:
        """Feed what fits into a step of the prompts; choose the first id of those now complete."""
        watch = Stopwatch(self._device)
        room, embeds = PREFILL_ROWS, dict[int, torch.Tensor]()
        for chat in sorted(chats, key=lambda chat: self._order(chat)):
            if room:
                embeds[chat.slot] = chat.prompt.take(self._parts, room)
                room -= len(embeds[chat.slot])
        taken = [chat for chat in chats if chat.slot in embeds]
        counts = [(chat.slot, len(embeds[chat.slot])) for chat in taken]
        rows = torch.cat([embeds[chat.slot] for chat in taken])
        _, logits = self._parts.llm.feed(counts, rows)
        ready = [index for index, chat in enumerate(taken) if chat.prompt.is_fed]
        if ready:
            last = upload(ready, logits.device)
            self._choose([taken[index] for index in ready], logits[last])
        watch.lap("prefill")
        for chat in taken:
            if chat.prompt.is_fed:
                chat.stage = Stage.TEXT
                if chat.finish is not None:
                    yield self._finished_text(chat, watch, ())
                    continue
            yield self._failure(chat) or self._output(chat, watch)

    def _order(self, chat: Chat) -> int:
        return list(self._chats).index(chat.slot)

    def _choose(self, chats: Sequence[Chat], logits: torch.Tensor) -> None:
        chosen = self._sampling.choose(
            [chat.slot for chat in chats], logits, [chat.uniforms for chat in chats]
        )
        for row, (chat, token) in enumerate(zip(chats, chosen, strict=True)):
            if self._probe is not None:
                self._probe.decided(chat.slot, logits[row], token)
            chat.is_broken = token == NOT_FINITE
            if not chat.is_broken:
                chat.choose(token, self._sampling.terminators)

    def _write(self, chats: Sequence[Chat]) -> Iterator[ChatOutput | UnitFailure]:
        """Feed ids of the answers and choose the next ones."""
        watch, llm = Stopwatch(self._device), self._parts.llm
        for chat in chats:
            if chat.fed_count:
                self._sampling.begin_chunk(chat.slot, chat.answer)
        going = list(chats)
        for _ in range(CHUNK_IDS):
            embeds = llm.embed([chat.answer[-1] for chat in going])
            hidden, logits = llm.feed([(chat.slot, 1) for chat in going], embeds)
            for chat, state in zip(going, hidden.unbind(), strict=True):
                chat.feed(state)
                if self._probe is not None:
                    self._probe.fed(chat.slot, chat.answer[-1], state)
            self._choose(going, logits)
            going = [chat for chat in going if chat.is_answering]
            if not going:
                break
        watch.lap("decode")
        for chat in chats:
            ids, chat_hidden = tuple(chat.fresh), chat.hidden
            chat.fresh, chat.hidden = [], []
            failure = self._failure(chat)
            if failure is not None:
                yield failure
                continue
            self._say(chat, ids, chat_hidden)
            yield self._finished_text(chat, watch, ids)

    def _finished_text(
        self, chat: Chat, watch: Stopwatch, ids: tuple[int, ...]
    ) -> ChatOutput | UnitFailure:
        """Tell a chunk of text; without a voice, its end is the answer's."""
        if chat.finish is not None and chat.stage is not Stage.SPEECH:
            chat.stage = Stage.DONE
        return self._output(chat, watch, ids=ids, text=chat.tell(self._parts.tokens))

    def _say(self, chat: Chat, ids: Sequence[int], hidden: Sequence[torch.Tensor]) -> None:
        """Begin the passage that speaks these ids."""
        talker = self._parts.talker
        if chat.voice is None or talker is None:
            return
        is_end = chat.finish is Finish.STOP
        condition = talker.condition(ids, torch.stack(tuple(hidden)), is_text_end=is_end)
        chat.voice.stream.say(condition)
        chat.stage = Stage.SPEECH

    def _speak(self, chats: Sequence[Chat]) -> Iterator[ChatOutput | UnitFailure]:
        """Draw speech tokens of the chats' passages and make what is whole of them heard."""
        watch, parts = Stopwatch(self._device), self._parts
        voices = [chat.voice for chat in chats if chat.voice is not None]
        assert parts.talker, "it spoke the chats' passages"
        assert parts.vocoder, "it was primed"
        spoken = advance(parts.talker, [voice.stream for voice in voices])
        watch.lap("talker")
        pieces: dict[int, list[FloatArray]] = {chat.slot: [] for chat in chats}
        chunks: list[VocoderChunk] = []
        for chat, voice, tokens in zip(chats, voices, spoken, strict=True):
            if voice.stream.is_silent:
                chat.stage = Stage.DONE if chat.finish else Stage.TEXT
            cut = voice.tokens.push(tokens, end_of_turn=chat.stage is Stage.DONE)
            chunks += [VocoderChunk(chat.slot, piece.tokens, piece.is_last) for piece in cut]
        for chunk, samples in zip(chunks, parts.vocoder.decode(chunks), strict=True):
            pieces[chunk.slot].append(samples)
            if self._probe is not None:
                self._probe.vocoded(chunk.slot, list(chunk.tokens), chunk.is_last, len(samples))
        watch.lap("vocoder")
        for chat, tokens in zip(chats, spoken, strict=True):
            heard = pieces[chat.slot]
            audio = np.concatenate(heard) if heard else _NO_AUDIO
            yield self._output(chat, watch, audio=audio, audio_token_count=len(tokens))

    def _failure(self, chat: Chat) -> UnitFailure | None:
        if not chat.is_broken:
            return None
        chat.stage = Stage.DONE
        return UnitFailure(chat.slot, "NOT_FINITE", "the logits are not finite", is_fatal=True)

    def _output(
        self,
        chat: Chat,
        watch: Stopwatch,
        *,
        ids: tuple[int, ...] = (),
        text: str = "",
        audio: FloatArray = _NO_AUDIO,
        audio_token_count: int = 0,
    ) -> ChatOutput:
        return ChatOutput(
            slot=chat.slot,
            context_length=self._parts.llm.cache.length(chat.slot),
            is_prefilled=chat.prompt.is_fed,
            text=text,
            audio=audio,
            token_ids=ids,
            audio_token_count=audio_token_count,
            finish=chat.finish if chat.stage is Stage.DONE else None,
            stage_s=dict(watch.laps),
        )

    def close(self, slot: int) -> None:
        """Forget the slot's chat; the caches that it shares are the model's to reset."""
        self._chats.pop(slot, None)
        self._sampling.reset(slot)

    def is_clean(self, slot: int) -> bool:
        """Verify that nothing of a chat is left."""
        return slot not in self._chats and self._sampling.is_clean(slot)


def _rows(bounds: Sequence[Bound]) -> int:
    return sum(stop - start for start, stop in bounds)
