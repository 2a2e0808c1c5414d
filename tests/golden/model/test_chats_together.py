"""Chats and duplex conversations that share a model have the same results as each alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.paths import GOLDEN
from support.speech import assert_sounds_equal

from duplane.tools.golden_replay.audio import read_audio, read_clip
from duplane.worker.models.chat import (
    ChatAudio,
    ChatImage,
    ChatMessage,
    ChatOptions,
    ChatOutput,
    ChatPart,
    ChatRequest,
    ChatRole,
    Finish,
)
from duplane.worker.models.interface import Continue
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.types import (
    ConversationOptions,
    DecodeMode,
    OptionError,
    Unit,
    UnitFailure,
    UnitOutput,
)

UNIT = 16_000
TALK = read_audio(GOLDEN / "audio" / "talk.wav", 12 * UNIT)
USER = ChatAudio(read_clip(GOLDEN / "audio" / "user.wav"))
VOICE = ChatAudio(read_clip(GOLDEN / "audio" / "ref1.wav"))
PICTURE = ChatImage((GOLDEN / "images" / "wide.png").read_bytes())
DUPLEX = ConversationOptions(seed=1, decode_mode=DecodeMode.GREEDY, force_listen_count=0)


def ask(*parts: ChatPart, **options: object) -> ChatRequest:
    message = ChatMessage(ChatRole.USER, parts)
    return ChatRequest((message,), replace(ChatOptions(seed=5), **options))


GREEDY = ask("Sing a song for me.", decode_mode=DecodeMode.GREEDY, max_new_tokens=33)
SAMPLED = ask("Hi", seed=11, temperature=1.3, top_k=0, top_p=0.95, max_new_tokens=47)
SEEN = ask(PICTURE, "What is it?", seed=3, temperature=1.0, top_k=7, max_new_tokens=25)
HEARD = ask(
    USER,
    "Go on.",
    seed=2,
    generate_audio=True,
    temperature=1.1,
    tts_temperature=1.0,
    max_new_tokens=24,
)


@dataclass
class Answer:
    """The collected outputs of a chat."""

    text: str = ""
    ids: list[int] = field(default_factory=list[int])
    audio: list[NDArray[np.float32]] = field(default_factory=list[NDArray[np.float32]])
    speech_tokens: int = 0
    finish: Finish | None = None

    def add(self, output: ChatOutput) -> None:
        self.text += output.text
        self.ids += output.token_ids
        self.audio.append(output.audio)
        self.speech_tokens += output.audio_token_count
        self.finish = output.finish

    @property
    def samples(self) -> NDArray[np.float32]:
        return np.concatenate(self.audio)


class Players:
    """Chats on one model. In a `round` each unfinished chat has one output."""

    def __init__(self, model: DuplexModel) -> None:
        self.model = model
        self.answers: dict[int, Answer] = {}

    def join(self, slot: int, request: ChatRequest) -> Answer:
        self.model.open_chat(slot, self.model.preparer.chat(request))
        self.answers[slot] = Answer()
        return self.answers[slot]

    def round(self) -> None:
        going = [slot for slot, answer in self.answers.items() if answer.finish is None]
        for output in self.model.chat_step(going):
            assert isinstance(output, ChatOutput)
            self.answers[output.slot].add(output)

    def launch(self, slot: int, most: int = 512) -> None:
        """Run the next part of a chat, with at most this number of rows or tiles."""
        chat = self.model.chats.chat(slot)
        assert chat.part
        for result in self.model.launch([Continue(slot, chat.part, min(chat.left, most))]):
            if isinstance(result, ChatOutput):
                self.answers[slot].add(result)

    def leave(self, slot: int) -> None:
        self.model.close(slot)
        assert self.model.is_clean(slot)
        del self.answers[slot]

    def finish(self) -> None:
        for _ in range(2000):
            if all(answer.finish for answer in self.answers.values()):
                return
            self.round()
        raise AssertionError("a chat does not end")


def alone(model: DuplexModel, request: ChatRequest) -> Answer:
    players = Players(model)
    answer = players.join(2, request)
    players.finish()
    players.leave(2)
    return answer


def run_unit(model: DuplexModel, slot: int, number: int) -> UnitOutput:
    audio = TALK[number * UNIT : (number + 1) * UNIT]
    (output,) = model.step([Unit(slot, audio)])
    assert isinstance(output, UnitOutput)
    model.settle([slot])
    return output


def assert_same(got: Answer, want: Answer) -> None:
    assert got.ids == want.ids
    assert got.text == want.text
    assert got.finish is want.finish
    assert got.speech_tokens == want.speech_tokens
    assert_sounds_equal(got.samples, want.samples)


def test_chats_beside_each_other_and_a_duplex_session_are_as_alone(model: DuplexModel) -> None:
    sung, sampled, described, spoken = (
        alone(model, request) for request in (GREEDY, SAMPLED, SEEN, HEARD)
    )
    model.open(1, DUPLEX)
    units = [run_unit(model, 1, number) for number in range(8)]
    model.close(1)

    players = Players(model)
    model.open(1, DUPLEX)
    seen: list[UnitOutput] = []

    def between(count: int) -> None:
        for _ in range(count):
            players.round()
            seen.append(run_unit(model, 1, len(seen)))
            players.round()

    speaking = players.join(0, HEARD)
    between(1)
    first = players.join(3, SAMPLED)
    between(1)
    seeing = players.join(2, SEEN)
    between(1)
    players.leave(3)  # this chat is in the middle of its answer
    again = players.join(3, GREEDY)
    between(5)
    players.finish()
    assert [output.token_ids for output in seen] == [output.token_ids for output in units]
    for output, unit in zip(seen, units, strict=True):
        assert_sounds_equal(output.audio, unit.audio)
    assert first.ids
    assert first.ids == sampled.ids[: len(first.ids)]
    for answer, want in ((speaking, spoken), (seeing, described), (again, sung)):
        assert_same(answer, want)
    for slot in range(model.slot_count):
        model.close(slot)
        assert model.is_clean(slot)


def test_seeded_answers_repeat_and_other_seeds_differ(model: DuplexModel) -> None:
    first, second = alone(model, HEARD), alone(model, HEARD)
    assert_same(first, second)
    other = alone(model, replace(HEARD, options=replace(HEARD.options, seed=9)))
    assert other.ids != first.ids


def test_an_answer_is_as_long_as_asked_and_says_why_it_ended(model: DuplexModel) -> None:
    for bound in (1, 9, 10, 11, 20):
        request = replace(GREEDY, options=replace(GREEDY.options, max_new_tokens=bound))
        answer = alone(model, request)
        assert len(answer.ids) == bound
        assert answer.finish is Finish.LENGTH
    assert alone(model, GREEDY).finish is Finish.STOP


def test_an_answer_that_fills_the_context_ends_there(model: DuplexModel) -> None:
    # With a length penalty as high as this, the model does not end by itself.
    request = ask("Go on.", decode_mode=DecodeMode.GREEDY, length_penalty=100.0)
    players = Players(model)
    answer = players.join(2, request)
    players.finish()
    if answer.finish is Finish.STOP:
        pytest.skip("this checkpoint ends by itself")
    assert answer.finish is Finish.CONTEXT_FULL
    assert model.context_length(2) == model.context_capacity


def test_a_first_id_that_ends_the_answer_makes_it_empty(
    model: DuplexModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = model.chats._sampling
    end = sampling.terminators[0]
    monkeypatch.setattr(sampling, "choose", lambda slots, logits, uniforms: [end] * len(slots))
    for request in (GREEDY, HEARD):
        answer = alone(model, request)
        assert (answer.text, answer.ids, answer.finish) == ("", [], Finish.STOP)
        assert not answer.samples.size


def test_logits_that_are_not_finite_end_a_chat_and_no_other(
    model: DuplexModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = model.llm.feed

    def poisoned(counts: Sequence[tuple[int, int]], embeds: torch.Tensor):
        hidden, logits = feed(counts, embeds)
        logits[[slot == 0 for slot, _ in counts]] = float("nan")
        return hidden, logits

    want = alone(model, SAMPLED)
    players = Players(model)
    broken = players.join(0, GREEDY)
    whole = players.join(1, SAMPLED)
    monkeypatch.setattr(model.llm, "feed", poisoned)
    failures: list[UnitFailure] = []
    for output in model.chat_step([0, 1]):
        if isinstance(output, UnitFailure):
            failures.append(output)
        else:
            players.answers[output.slot].add(output)
    assert [(failure.slot, failure.is_fatal) for failure in failures] == [(0, True)]
    assert broken.ids == []
    players.leave(0)
    players.finish()
    assert_same(whole, want)


Place = Callable[[DuplexModel], tuple[object, str, Callable[..., bool]]]
FAULTS: dict[str, tuple[ChatRequest, Place]] = {
    "audio": (HEARD, lambda m: (m.parts.audio, "encode_segments", lambda *_: True)),
    "vision": (SEEN, lambda m: (m.parts.vision, "encode_all", lambda *_: True)),
    "prefill": (GREEDY, lambda m: (m.llm, "feed", lambda c, _: c[0][0] == 0 and c[0][1] > 1)),
    "decode": (GREEDY, lambda m: (m.llm, "feed", lambda c, _: c[0] == (0, 1))),
    "condition": (HEARD, lambda m: (m.parts.talker, "condition", lambda *_: True)),
    "vocoder": (HEARD, lambda m: (m.parts.vocoder, "decode_mel", lambda *_: True)),
}


@pytest.mark.parametrize("stage", FAULTS)
def test_what_fails_for_one_chat_ends_that_one(
    model: DuplexModel, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    guilty, place = FAULTS[stage]
    want = alone(model, SAMPLED)
    players = Players(model)
    players.join(0, guilty)
    whole = players.join(1, SAMPLED)
    owner, name, is_guilty = place(model)
    call = getattr(owner, name)

    def fail(*told: Any, **more: Any) -> Any:
        if is_guilty(*told):
            raise RuntimeError("a fault of the test")
        return call(*told, **more)

    monkeypatch.setattr(owner, name, fail)
    failures: list[UnitFailure] = []
    while whole.finish is None:
        for output in model.chat_step([1] if failures else [0, 1]):
            if isinstance(output, UnitFailure):
                failures.append(output)
            else:
                players.answers[output.slot].add(output)
    assert [(failure.slot, failure.is_fatal) for failure in failures] == [(0, True)]
    assert_same(whole, want)
    for slot in (0, 1):
        players.leave(slot)


def test_long_prompts_can_be_fed_in_pieces(model: DuplexModel) -> None:
    """Feeding in pieces does not change the results."""
    request = ask(PICTURE, VOICE, PICTURE, "Compare.", decode_mode=DecodeMode.GREEDY)
    want = alone(model, request)
    players = Players(model)
    answer = players.join(0, request)
    lengths = [0]
    while answer.finish is None:
        players.launch(0, 37)
        lengths.append(model.context_length(0))
    assert max(np.diff(lengths)) == 37
    assert_same(answer, want)


@pytest.mark.parametrize(
    "seconds", [(29.9, *[0.11] * 12), (40.0,)], ids=["one long, many short", "one very long"]
)
def test_no_launch_encodes_more_sounds_than_thirty_seconds(
    model: DuplexModel, monkeypatch: pytest.MonkeyPatch, seconds: Sequence[float]
) -> None:
    encoder, frames = model.parts.audio.apm, list[int]()
    convolve = encoder.convolve

    def counted(features: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        frames.append(features.shape[0] * features.shape[1])
        return convolve(features, *more)

    monkeypatch.setattr(encoder, "convolve", counted)
    long = np.tile(TALK, 8)
    clips = [ChatAudio(long[: int(UNIT * length)]) for length in seconds]
    messages = tuple(ChatMessage(ChatRole.USER, (clip,)) for clip in clips)
    players = Players(model)
    answer = players.join(0, ChatRequest(messages, replace(GREEDY.options, max_new_tokens=2)))
    assert not frames
    launches: list[int] = []
    while answer.finish is None:
        frames.clear()
        players.launch(0)
        launches.append(sum(frames))
    assert max(launches) <= 3000
    assert sum(launch > 0 for launch in launches) > 1


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (ChatRequest(()), "messages"),
        (ChatRequest((ChatMessage(ChatRole.USER, ()),)), "messages[0].parts"),
        (ask("Hi", ChatImage(b"no picture")), "messages[0].parts[1].image"),
        (ask(ChatAudio(np.full(100, np.nan, np.float32))), "messages[0].parts[0].audio"),
        (ask("word " * 3000), "messages"),
        (ask("x" * 10_000_000), "messages"),
        (ask(ChatAudio(np.zeros(100 * UNIT, np.float32))), "messages"),
        (ask(PICTURE, PICTURE, PICTURE, PICTURE, PICTURE, PICTURE, PICTURE, PICTURE), "messages"),
    ],
    ids=["no message", "no part", "picture", "audio", "long", "longer", "sound", "pictures"],
)
def test_a_chat_that_cannot_be_is_refused_before_anything_is_fed(
    model: DuplexModel, request_: ChatRequest, name: str
) -> None:
    with pytest.raises(OptionError) as caught:
        model.preparer.chat(request_)
    assert caught.value.field == name


def test_laying_out_a_chat_stops_between_its_pictures_when_told(model: DuplexModel) -> None:
    calls: list[int] = []

    def stop_at_second() -> None:
        calls.append(len(calls))
        if len(calls) == 2:
            raise InterruptedError

    broken = ChatImage(b"no picture")  # never decoded
    with pytest.raises(InterruptedError):
        model.preparer.chat(ask("Hi", PICTURE, broken), stop_at_second)


def test_text_that_looks_like_the_place_of_a_picture_stays_text(model: DuplexModel) -> None:
    plain = model.preparer.chat(
        ask("see <image>./</image> and \ue0000\ue000", PICTURE, max_slices=1)
    )
    assert len(plain.prompt.image_bounds) == 1
    assert "\ue0000\ue000" in plain.prompt.text


def test_a_slot_holds_one_conversation_of_either_kind(model: DuplexModel) -> None:
    model.open_chat(0, model.preparer.chat(GREEDY))
    model.open(1, DUPLEX)
    with pytest.raises(ValueError, match="slot 0 has"):
        model.open(0, DUPLEX)
    for slot in (0, 1):
        with pytest.raises(ValueError, match=f"slot {slot} has"):
            model.open_chat(slot, model.preparer.chat(GREEDY))


def test_what_cannot_be_spoken_is_not_said_when_heard(model: DuplexModel) -> None:
    silent = ask("Hi", decode_mode=DecodeMode.GREEDY, max_new_tokens=40)
    favourite = alone(model, silent).ids[0]
    model.open_chat(0, model.preparer.chat(silent))
    sampling = model.chats._sampling
    before = sampling._unspeakable
    try:
        sampling._unspeakable = torch.tensor([favourite])
        options = {"generate_audio": True, "use_tts_template": False}
        spoken = ask("Hi", decode_mode=DecodeMode.GREEDY, max_new_tokens=40, **options)
        assert favourite in alone(model, silent).ids
        assert favourite not in alone(model, spoken).ids
    finally:
        sampling._unspeakable = before
