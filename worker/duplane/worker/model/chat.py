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

import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from duplane.worker.model.chat_answer import Chat, Stage, Voice
from duplane.worker.model.chat_prompt import Bound, ChatPrompt, Check, PromptBuilder, go_on
from duplane.worker.model.chat_sampling import NOT_FINITE, ChatSampling
from duplane.worker.model.chat_types import ChatOptions, ChatOutput, ChatRequest, Finish
from duplane.worker.model.faults import alone, attempt, lost
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

_log = logging.getLogger(__name__)

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

    `image_rows` and `audio_rows` of them are embeddings of pictures and of sounds. `voice` is what
    the answer is spoken with.
    """

    options: ChatOptions
    prompt: ChatPrompt
    prompt_rows: int
    image_rows: int
    audio_rows: int
    voice: VocoderVoice | None


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

    def prepare(self, request: ChatRequest, check: Check = go_on) -> PreparedChat:
        """Check a request whole and lay out its prompt. May run in any thread, for many at once.

        Raises `OptionError` that names what is at fault, and what `check` raises, which is called
        before every picture, sound and voice: so it can be stopped.
        """
        options = request.options
        builder = PromptBuilder(self._parts, options, self.prompt_room(options), check=check)
        prompt = builder.chat(request.messages)
        check()
        voice = self._choose_voice(options) if options.generate_audio else None
        return PreparedChat(
            options=request.options,
            prompt=prompt,
            prompt_rows=len(prompt.ids),
            image_rows=_rows(prompt.image_bounds),
            audio_rows=_rows(prompt.audio_bounds),
            voice=voice,
        )

    def open(self, slot: int, prepared: PreparedChat, *, uniforms: Uniforms | None = None) -> None:
        """Begin a chat in a clean slot; nothing is fed yet. A prepared chat can be opened once."""
        self.begin(slot, prepared.options, voice=prepared.voice, uniforms=uniforms)
        self.answer(slot, prepared.prompt)

    def prompt_room(self, options: ChatOptions) -> int:
        """Rows that a prompt may have, so that at least one id fits behind it."""
        return self._capacity - len(self._answer_mark(options)) - 1

    def begin(
        self,
        slot: int,
        options: ChatOptions,
        *,
        voice: VocoderVoice | None = None,
        uniforms: Uniforms | None = None,
    ) -> None:
        """Take a clean slot for a chat, whose `voice` is read from the options unless given."""
        if slot in self._chats:
            raise ValueError(f"slot {slot} has a chat")
        uniforms = uniforms or SeededUniforms(options.seed)
        vocoder, speaker = self._parts.vocoder, None
        if options.generate_audio:
            voice = voice or self._choose_voice(options)
            assert vocoder, "it has the voice"
            speaker = self._voice(slot, options, uniforms, vocoder)
        self._chats[slot] = Chat(slot, options, uniforms, speaker, ChatPrompt())
        try:
            self._sampling.open(slot, options)
            if vocoder is not None and voice is not None:
                vocoder.prime(slot, voice, seed=options.seed)
        except BaseException:
            self.close(slot)
            raise

    def _choose_voice(self, options: ChatOptions) -> VocoderVoice:
        parts, voice = self._parts, self._voices.choose(options.tts_voice)
        if parts.talker is None or parts.vocoder is None or voice is None:
            raise OptionError("generate_audio", "is not possible: this checkpoint has no voice")
        return voice

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
        chat has no more steps. Where what is done raises, the chats that make it raise are lost,
        as `faults` has it, or where that cannot be known, those at the stage that have no output.
        """
        chats = [self.chat(slot) for slot in sorted(set(slots))]
        waiting = {chat.stage for chat in chats} & set(_TURNS)
        if not waiting:
            return
        after = _TURNS.index(self._latest) + 1
        stage = next(turn for turn in (*_TURNS[after:], *_TURNS) if turn in waiting)
        self._latest = stage
        run = {Stage.PREFILL: self._prefill, Stage.TEXT: self._write, Stage.SPEECH: self._speak}
        going = [chat for chat in chats if chat.stage is stage]
        try:
            for result in run[stage](going):
                going = [chat for chat in going if chat.slot != result.slot]
                yield result
        except Exception:  # noqa: BLE001 - a stage's faults stop here, logged whole
            _log.exception("%s failed for slots %s", stage.value, [chat.slot for chat in going])
            for chat in going:
                yield self._failure(chat, lost(chat.slot, stage.value))

    def _prefill(self, chats: Sequence[Chat]) -> Iterator[ChatOutput | UnitFailure]:
        """Feed what fits into a step of the prompts; choose the first id of those now complete.

        Where the oldest has sounds to be encoded first, a batch of them is the step.
        """
        watch = Stopwatch(self._device)
        waiting = sorted(chats, key=lambda chat: self._order(chat))
        if unheard := waiting[0].prompt.unheard(PREFILL_ROWS):
            failure = alone("audio", waiting[0].slot, unheard.hear)
            watch.lap("audio")
            yield self._failure(waiting[0], failure) if failure else self._output(waiting[0], watch)
            return
        embeds = self._take(waiting)
        taken = [chat for chat in chats if chat.slot in embeds]
        feed, cache = partial(self._feed, embeds), self._parts.llm.cache
        for fed, logits in attempt("prefill", taken, feed, cache=cache):
            ready = [index for index, chat in enumerate(fed) if chat.prompt.is_fed]
            if ready:
                last = upload(ready, logits.device)
                self._choose([fed[index] for index in ready], logits[last])
        watch.lap("prefill")
        for chat in chats:
            if chat.failure is not None:
                yield self._failure(chat, chat.failure)
            elif chat.slot in embeds:
                chat.stage = Stage.TEXT if chat.prompt.is_fed else Stage.PREFILL
                is_over = chat.finish is not None
                yield self._finished_text(chat, watch, ()) if is_over else self._output(chat, watch)

    def _take(self, waiting: Sequence[Chat]) -> dict[int, torch.Tensor]:
        """The rows of prompts that go into a step, by slot; those waiting longest go first."""
        room, embeds = PREFILL_ROWS, dict[int, torch.Tensor]()
        for chat in waiting:
            if not room or chat.prompt.unheard(room):
                break
            rows = alone("prompt", chat.slot, partial(chat.prompt.take, self._parts, room))
            if isinstance(rows, UnitFailure):
                chat.failure = rows
                continue
            embeds[chat.slot] = rows
            room -= len(rows)
        return embeds

    def _feed(self, embeds: Mapping[int, torch.Tensor], chats: Sequence[Chat]) -> torch.Tensor:
        counts = [(chat.slot, len(embeds[chat.slot])) for chat in chats]
        _, logits = self._parts.llm.feed(counts, torch.cat([embeds[chat.slot] for chat in chats]))
        return logits

    def _order(self, chat: Chat) -> int:
        return list(self._chats).index(chat.slot)

    def _choose(self, chats: Sequence[Chat], logits: torch.Tensor) -> None:
        slots = [chat.slot for chat in chats]
        try:
            chosen = self._sampling.choose(slots, logits, [chat.uniforms for chat in chats])
        except Exception:  # noqa: BLE001 - a stage's faults stop here, logged whole
            _log.exception("choosing ids failed for slots %s", slots)
            for chat in chats:
                chat.failure = lost(chat.slot, "choice")
            return
        for row, (chat, token) in enumerate(zip(chats, chosen, strict=True)):
            if self._probe is not None:
                self._probe.decided(chat.slot, logits[row], token)
            if token == NOT_FINITE:
                message = "the logits are not finite"
                chat.failure = UnitFailure(chat.slot, "NOT_FINITE", message, is_fatal=True)
            else:
                chat.choose(token, self._sampling.terminators)

    def _write(self, chats: Sequence[Chat]) -> Iterator[ChatOutput | UnitFailure]:
        """Feed ids of the answers and choose the next ones."""
        watch, llm = Stopwatch(self._device), self._parts.llm
        for chat in chats:
            if chat.fed_count:
                self._sampling.begin_chunk(chat.slot, chat.answer)
        going = list(chats)
        for _ in range(CHUNK_IDS):
            for fed, (hidden, logits) in attempt("decode", going, self._feed_id, cache=llm.cache):
                for chat, state in zip(fed, hidden.unbind(), strict=True):
                    chat.feed(state)
                    if self._probe is not None:
                        self._probe.fed(chat.slot, chat.answer[-1], state)
                self._choose(fed, logits)
            going = [chat for chat in going if chat.is_answering]
            if not going:
                break
        watch.lap("decode")
        for chat in chats:
            ids, chat_hidden = tuple(chat.fresh), chat.hidden
            chat.fresh, chat.hidden = [], []
            failure = chat.failure or alone(
                "talker", chat.slot, partial(self._say, chat, ids, chat_hidden)
            )
            if failure is not None:
                yield self._failure(chat, failure)
                continue
            yield self._finished_text(chat, watch, ids)

    def _feed_id(self, chats: Sequence[Chat]) -> tuple[torch.Tensor, torch.Tensor]:
        llm = self._parts.llm
        embeds = llm.embed([chat.answer[-1] for chat in chats])
        return llm.feed([(chat.slot, 1) for chat in chats], embeds)

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

    def _failure(self, chat: Chat, failure: UnitFailure) -> UnitFailure:
        """End a chat that can only be closed."""
        chat.failure, chat.stage = failure, Stage.DONE
        return failure

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
