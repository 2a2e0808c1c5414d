"""An hour of half duplex: after exchanges were dropped, the context equals a newly built one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from support.paths import GOLDEN

from duplane.tools.golden_replay.audio import read_clip
from duplane.tools.golden_replay.half_duplex import ANSWER_END, HalfDuplex, TextWindow
from duplane.worker.models.chat import (
    ChatAudio,
    ChatMessage,
    ChatOptions,
    ChatOutput,
    ChatPart,
    ChatRole,
)
from duplane.worker.models.minicpm_o.chat.prompt import (
    NO_THOUGHTS,
    SPEECH_MARK,
    PromptBuilder,
    answer_mark,
)
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.types import DecodeMode, OptionError

USER = ChatAudio(read_clip(GOLDEN / "audio" / "user.wav"))
OPTIONS = ChatOptions(decode_mode=DecodeMode.GREEDY, max_new_tokens=12, seed=0)
WINDOW = TextWindow(high_tokens=220, low_tokens=130)
SYSTEM = "You are a helpful assistant who never forgets."


@dataclass
class Talk:
    """A half-duplex conversation, and the token ids of its exchanges (utterance and answer)."""

    model: DuplexModel
    slot: int
    half_duplex: HalfDuplex
    system: list[int] = field(default_factory=list[int])
    exchanges: list[list[int]] = field(default_factory=list[list[int]])
    options: ChatOptions = OPTIONS

    @classmethod
    def begin(
        cls, model: DuplexModel, slot: int, window: TextWindow, options: ChatOptions = OPTIONS
    ) -> Talk:
        talk = HalfDuplex(model.chats, model.parts, slot, options, window=window)
        talk.instruct([SYSTEM])
        return cls(model, slot, talk, list(talk.prompt.ids), options=options)

    def say(self, *parts: ChatPart) -> int:
        """Feed an utterance and run the answer; return the context length after it."""
        end = self.model.tokens.encode(ANSWER_END)
        self.half_duplex.hear(parts)
        mark = answer_mark(self.model.tokens, self.options)
        ids = [*self.half_duplex.prompt.ids, *mark]
        if not self.exchanges:
            ids = ids[len(self.system) :]
        elif ids[: len(end)] == end:
            self.exchanges[-1] += end
            ids = ids[len(end) :]
        finish = None
        while finish is None:
            for output in self.model.chat_step([self.slot]):
                assert isinstance(output, ChatOutput)
                ids += output.token_ids
                finish = output.finish
        self.exchanges.append(ids)
        return self.length

    @property
    def length(self) -> int:
        return self.model.context_length(self.slot)

    def kept(self) -> list[list[int]]:
        """Return the exchanges that the context still contains."""
        rows, kept = self.length - len(self.system), list[list[int]]()
        for said in reversed(self.exchanges):
            if rows <= 0:
                break
            rows -= len(said)
            kept.insert(0, said)
        assert rows == 0, "the context does not begin with a whole exchange"
        return kept


def check_like_rebuilt(talk: Talk, slot: int) -> None:
    """Compare the context with one that is newly built from the prompt and the kept exchanges.

    Only the first layer is compared, because in the first layer a row depends only on its own id
    and position.
    """
    model = talk.model
    ids = [*talk.system, *(token for said in talk.kept() for token in said)]
    with torch.inference_mode():
        model.llm.append_long(slot, model.llm.embed(ids))
    cache = model.llm.cache
    assert cache.length(slot) == talk.length
    for ours, afresh in zip(cache.read(talk.slot), cache.read(slot), strict=True):
        torch.testing.assert_close(ours[0], afresh[0], rtol=0, atol=2e-5)
    model.close(slot)


def test_an_hour_stays_in_a_bounded_context_of_whole_exchanges(model: DuplexModel) -> None:
    talk = Talk.begin(model, 0, WINDOW)
    highest = 0
    for number in range(60):
        highest = max(highest, talk.say(f"This is what I say to you for the time number {number}."))
        if number % 7 == 0:
            check_like_rebuilt(talk, 1)
    assert len(talk.kept()) < len(talk.exchanges)
    assert WINDOW.low_tokens < highest <= WINDOW.high_tokens + OPTIONS.max_new_tokens + 20
    check_like_rebuilt(talk, 1)


def _without(ids: Sequence[int], *parts: Sequence[int]) -> list[int]:
    """Return `ids` without all occurrences of the parts."""
    kept = list(ids)
    for part in parts:
        at = 0
        while at < len(kept):
            if kept[at : at + len(part)] == list(part):
                del kept[at : at + len(part)]
            else:
                at += 1
    return kept


def test_turns_of_chat_differ_from_it_only_in_marks(model: DuplexModel) -> None:
    """A half duplex session of the edge sends each turn as a chat that repeats the conversation."""
    options = dataclasses.replace(OPTIONS, generate_audio=True, use_tts_template=True)
    second = ChatAudio(read_clip(GOLDEN / "audio" / "talk.wav")[:24_000])
    talk = Talk.begin(model, 0, TextWindow(), options)
    talk.say(USER)
    encode = model.tokens.encode
    marks = [encode(mark) for mark in ("<|speak|>", "<|chunk_eos|>", "<|tts_eos|>")]
    (answered,) = talk.exchanges
    mark = answer_mark(model.tokens, options)
    begin = next(at for at in range(len(answered)) if answered[at : at + len(mark)] == mark)
    answer = model.tokens.decode(_without(answered[begin + len(mark) :], *marks))
    talk.half_duplex.hear([second])
    heard = [*talk.system, *answered, *talk.half_duplex.prompt.ids, *mark]
    messages = [
        ChatMessage(ChatRole.SYSTEM, (SYSTEM,)),
        ChatMessage(ChatRole.USER, (USER,)),
        ChatMessage(ChatRole.ASSISTANT, (answer,)),
        ChatMessage(ChatRole.USER, (second,)),
    ]
    chat = PromptBuilder(model.parts.prompts, options, 400).chat(messages)
    end, controls = encode("<|im_end|>\n"), encode(NO_THOUGHTS + SPEECH_MARK)
    ids = [*chat.ids, *mark]
    last = len(chat.ids) - len(end)
    assert ids[last : last + 2 * len(end)] == [*end, *end]
    del ids[last : last + len(end)]
    assert ids != heard
    assert _without(ids, controls) == _without(heard, controls, *marks)


def test_a_context_below_the_marks_is_as_it_was(model: DuplexModel) -> None:
    talks = [Talk.begin(model, slot, window) for slot, window in enumerate((WINDOW, TextWindow()))]
    for number in range(3):
        for talk in talks:
            talk.say(f"Number {number}.")
    assert talks[0].exchanges == talks[1].exchanges
    assert (
        talks[0].length
        == talks[1].length
        == sum(map(len, talks[0].exchanges)) + len(talks[0].system)
    )


def test_a_small_context_moves_before_it_is_full(model: DuplexModel) -> None:
    talk = Talk.begin(model, 0, TextWindow())
    for _ in range(80):
        assert talk.say("Go on, please, I would like to hear more of it.") <= model.context_capacity
    assert talk.length > model.context_capacity // 2
    check_like_rebuilt(talk, 1)


def test_an_utterance_that_leaves_room_for_nothing_else_drops_all_exchanges(
    model: DuplexModel,
) -> None:
    talk = Talk.begin(model, 0, WINDOW)
    talk.say("Hi.")
    talk.say("And?")
    talk.say("word " * 200)
    assert len(talk.kept()) == 1
    check_like_rebuilt(talk, 1)
    talk.say("And now?")
    assert len(talk.kept()) == 1, "an exchange over the mark goes whole"


def test_one_too_long_is_refused_and_the_conversation_goes_on(model: DuplexModel) -> None:
    talk = Talk.begin(model, 0, WINDOW)
    talk.say("Hi.")
    with pytest.raises(OptionError, match="more than"):
        talk.half_duplex.hear(["word " * 4000])
    talk.say("And?")
    assert len(talk.kept()) == 2
    check_like_rebuilt(talk, 1)


def test_speech_goes_on_over_many_exchanges(model: DuplexModel) -> None:
    options = ChatOptions(
        decode_mode=DecodeMode.GREEDY, max_new_tokens=8, seed=0, generate_audio=True
    )
    talk = Talk.begin(model, 0, WINDOW, options)
    lengths = [talk.say(USER) for _ in range(8)]
    assert max(lengths) <= WINDOW.high_tokens + 30
    assert lengths != sorted(lengths), "something was dropped"
    assert len(talk.kept()) < 8


def test_marks_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(OptionError, match="text_window_low_tokens"):
        TextWindow(high_tokens=10, low_tokens=11)
