"""Chunks of any length become units of the model, and every dropped unit is counted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.protocols.transcripts import pcm

from duplane.edge.dialects.actions import NOTHING_DROPPED, Append, Dropped, Tag
from duplane.edge.session.receipt import Receipt
from duplane.edge.session.request_queue import UNKNOWN, RequestQueue, SentUnit
from duplane.edge.session.unit_assembler import UnitAssembler
from duplane.fabric.audio import Samples, resample
from duplane.fabric.durations import to_wall_ns
from duplane.fabric.model import DEFAULT_FORMAT, ModelFormat
from duplane.fabric.resampler import Resampler

UNIT_BYTES = 4 * 16_000
SHORT = ModelFormat(unit_ns=80_000_000)
SHORT_24K = ModelFormat(unit_ns=80_000_000, input_rate_hertz=24_000)


def at(received_ns: int) -> Receipt:
    return Receipt(received_ns, received_ns, received_ns, 0.0)


def gather(*appends: Append, model: ModelFormat | None = None) -> list[bytes]:
    assembler = UnitAssembler(4, model)
    return [unit.audio for append in appends for unit in assembler.add(append)]


def test_a_chunk_of_exactly_one_unit_is_passed_on_without_a_copy() -> None:
    audio = pcm(16_000)
    assert gather(Append(audio))[0] is audio


def test_short_chunks_wait_until_a_unit_is_full() -> None:
    chunks = [Append(pcm(3200))] * 5
    assert gather(*chunks[:4]) == []
    assert gather(*chunks) == [pcm(3200) * 5]


def test_a_long_chunk_is_cut_and_its_rest_begins_the_next_unit() -> None:
    audio = pcm(40_000)
    assert gather(Append(audio), Append(pcm(8_000))) == [
        audio[:UNIT_BYTES],
        audio[UNIT_BYTES : 2 * UNIT_BYTES],
        audio[2 * UNIT_BYTES :] + pcm(8_000),
    ]


@given(st.lists(st.integers(1, 50_000), max_size=12))
def test_units_are_the_chunks_end_to_end(lengths: list[int]) -> None:
    audio = [pcm(length) for length in lengths]
    whole = b"".join(audio)
    units = gather(*(Append(chunk) for chunk in audio))
    assert b"".join(units) == whole[: len(whole) // UNIT_BYTES * UNIT_BYTES]
    assert all(len(unit) == UNIT_BYTES for unit in units)


@given(
    st.lists(st.integers(1, 9_000), max_size=12),
    st.sampled_from([DEFAULT_FORMAT, SHORT, ModelFormat(unit_ns=12_500_000), None]),
)
def test_units_have_the_length_that_the_model_demands(
    lengths: list[int], model: ModelFormat | None
) -> None:
    whole = b"".join(pcm(length) for length in lengths)
    units = gather(*(Append(pcm(length)) for length in lengths), model=model)
    unit_bytes = 4 * (model or DEFAULT_FORMAT).unit_sample_count
    assert b"".join(units) == whole[: len(whole) // unit_bytes * unit_bytes]
    assert all(len(unit) == unit_bytes for unit in units)


def noise(count: int) -> Samples:
    return np.random.default_rng(7).normal(0, 0.1, count).astype(np.float32)


@given(
    st.lists(st.integers(1, 5_000), min_size=1, max_size=12),
    st.sampled_from([8_000, 16_000, 24_000, 48_000]),
    st.sampled_from([SHORT, SHORT_24K, DEFAULT_FORMAT, ModelFormat(10**9, 24_000)]),
)
@settings(max_examples=60, deadline=None)
def test_units_are_the_resampled_stream_and_come_with_their_last_sample(
    lengths: list[int], rate_hertz: int, model: ModelFormat
) -> None:
    sound = noise(sum(lengths))
    assembler, units, heard = UnitAssembler(4, model), list[bytes](), 0
    for piece in np.split(sound, np.cumsum(lengths)[:-1]):
        heard += piece.size
        append = Append(piece.tobytes(), rate_hertz=rate_hertz)
        units += [unit.audio for unit in assembler.add(append)]
        samples_so_far = heard * model.input_rate_hertz // rate_hertz
        assert len(units) == samples_so_far // model.unit_sample_count
    assert all(len(unit) == 4 * model.unit_sample_count for unit in units)
    got = np.frombuffer(b"".join(units), "<f4")
    expected = resample(sound, rate_hertz, model.input_rate_hertz)
    # The filter reaches 100 samples of the lower rate ahead.
    late = 100 * model.input_rate_hertz // min(rate_hertz, model.input_rate_hertz)
    late *= rate_hertz != model.input_rate_hertz
    assert np.abs(got[late:] - expected[: max(0, got.size - late)]).max(initial=0) < 1e-5
    assert np.abs(got[:late]).max(initial=0) < 0.3


def test_the_sound_of_a_unit_is_resampled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    add = Resampler.add

    def count(stream: Resampler, audio: bytes) -> bytes:
        sizes.append(len(audio) // 4)
        return add(stream, audio)

    monkeypatch.setattr(Resampler, "add", count)
    pieces = [Append(pcm(480), rate_hertz=24_000)] * 100
    assert len(gather(*pieces, model=DEFAULT_FORMAT)) == 2
    assert sizes == [24_000, 24_000]


def test_sound_that_waits_is_told_as_it_will_be_resampled() -> None:
    assembler = UnitAssembler(4, DEFAULT_FORMAT)
    for _ in range(3):
        assert not assembler.add(Append(pcm(480), rate_hertz=24_000))
    assert assembler.held == (4 * 3 * 320, 0)
    rest = assembler.take_rest()
    assert rest
    assert len(rest.audio) == 4 * 3 * 320
    assert assembler.held == (0, 0)


def test_append_of_less_than_a_sample_of_the_model_loses_nothing() -> None:
    assembler = UnitAssembler(4, ModelFormat(unit_ns=10_000_000, input_rate_hertz=8_000))
    tiny = Append(pcm(1), force_listen=True, frames=(picture(1),), rate_hertz=48_000)
    assert list(assembler.add(tiny)) == []
    rest = Append(pcm(479), rate_hertz=48_000)
    (unit,) = assembler.add(rest)
    assert (len(unit.audio), unit.force_listen, unit.frames) == (4 * 80, True, (picture(1),))
    (unit,) = assembler.add(Append(pcm(480), rate_hertz=48_000))
    assert (unit.force_listen, unit.frames) == (False, ())


def test_units_have_the_rate_of_the_appends_while_the_model_is_not_known() -> None:
    assembler = UnitAssembler(4)
    (unit,) = assembler.add(Append(pcm(30_000), rate_hertz=24_000))
    rest = assembler.take_rest()
    assert rest
    assert [len(unit.audio), len(rest.audio)] == [4 * 24_000, 4 * 6_000]
    assert unit.rate_hertz == rest.rate_hertz == 24_000
    assert assembler.take_rest() is None


def test_force_listen_holds_for_every_unit_with_audio_that_asked_for_it() -> None:
    assembler = UnitAssembler(frame_count=4)
    appends = (
        Append(pcm(8_000)),
        Append(pcm(24_000), force_listen=True),
        Append(pcm(8_000), force_listen=True),
        Append(pcm(8_000)),
        Append(pcm(16_000)),
    )
    units = [unit for append in appends for unit in assembler.add(append)]
    assert [unit.force_listen for unit in units] == [True, True, True, False]


def test_a_unit_carries_the_tag_and_the_time_of_its_last_chunk() -> None:
    assembler = UnitAssembler(frame_count=4)
    assert not assembler.add(Append(pcm(8_000), tag=Tag("first")))
    (unit,) = assembler.add(Append(pcm(8_000), tag=Tag("second")))
    assert unit.tag == Tag("second")
    queue = RequestQueue(frame_count=4)
    queue.add(Append(pcm(8_000)), at(1), limit=2)
    queue.add(Append(pcm(8_000)), at(2_000_000_003), limit=2)
    outgoing = queue.take()
    assert outgoing
    assert to_wall_ns(outgoing.request.unit.receive_time) == 2_000_000_003


def test_the_newest_units_win_and_the_dropped_ones_are_counted_once() -> None:
    queue = RequestQueue(frame_count=4)
    for number in range(5):
        queue.add(Append(pcm(16_000), tag=Tag(str(number))), at(0), limit=2)
    taken = [queue.take() for _ in range(3)]
    sequences = [outgoing.request.unit.sequence for outgoing in taken if outgoing]
    tags = [queue.finish(sequence)[0].input_id for sequence in sequences]
    assert list(zip(sequences, tags, strict=True)) == [(0, "3"), (1, "4")]
    assert taken[2] is None
    assert [queue.take_dropped(2), queue.take_dropped(0)] == [Dropped(5), NOTHING_DROPPED]


def test_an_answer_forgets_the_tags_of_all_units_before_it() -> None:
    queue = RequestQueue(frame_count=4)
    for number in range(4):
        queue.add(Append(pcm(16_000), tag=Tag(str(number))), at(0), limit=9)
        queue.take()
    assert queue.finish(2) == SentUnit(Tag("2"), 2)
    assert queue.finish(1) == UNKNOWN
    assert queue.finish(3) == SentUnit(Tag("3"), 3)


def test_tags_of_a_worker_that_never_answers_are_bounded() -> None:
    queue, unanswered = RequestQueue(frame_count=4), 2000
    audio = pcm(16_000)
    for number in range(unanswered):
        queue.add(Append(audio, tag=Tag(str(number))), at(0), limit=1)
        queue.take()
    assert queue.finish(0) == UNKNOWN
    tag = Tag(str(unanswered - 1))
    assert queue.finish(unanswered - 1) == SentUnit(tag, unanswered - 1)


def picture(number: int) -> bytes:
    return bytes([number])


@given(st.lists(st.tuples(st.integers(1, 40_000), st.integers(0, 3)), max_size=12))
def test_pictures_go_with_the_last_sample_of_their_audio(chunks: list[tuple[int, int]]) -> None:
    assembler, sample_count, expected = UnitAssembler(frame_count=99), 0, dict[int, list[bytes]]()
    units = []
    for number, (length, count) in enumerate(chunks):
        frames = (picture(number),) * count
        units += assembler.add(Append(pcm(length), frames=frames))
        sample_count += length
        expected.setdefault((sample_count - 1) // 16_000, []).extend(frames)
    assert [list(unit.frames) for unit in units] == [
        expected.get(index, []) for index in range(len(units))
    ]


def test_pictures_alone_are_a_unit_and_audio_that_waits_goes_on_waiting() -> None:
    assembler = UnitAssembler(frame_count=4)
    assert not list(assembler.add(Append(pcm(8_000))))
    (alone,) = assembler.add(Append(b"", frames=(picture(1),), force_listen=True))
    assert (alone.audio, alone.frames, alone.force_listen) == (b"", (picture(1),), True)
    (unit,) = assembler.add(Append(pcm(8_000)))
    assert (unit.audio, unit.frames, unit.force_listen) == (pcm(8_000) * 2, (), False)


def test_of_the_pictures_that_wait_the_newest_win() -> None:
    assembler = UnitAssembler(frame_count=2)
    for number in range(3):
        assert not list(assembler.add(Append(pcm(4_000), frames=(picture(number),))))
    (unit,) = assembler.add(Append(pcm(4_000)))
    assert unit.frames == (picture(1), picture(2))


def test_pictures_above_the_bound_of_a_unit_are_counted() -> None:
    queue = RequestQueue(frame_count=2)
    for number in range(5):
        queue.add(Append(pcm(3_200), frames=(picture(number),)), at(0), limit=9)
    outgoing = queue.take()
    assert outgoing
    assert list(outgoing.request.unit.video_frames) == [picture(3), picture(4)]
    assert [queue.take_dropped(0), queue.take_dropped(0)] == [Dropped(0, 3), NOTHING_DROPPED]


_APPENDS = st.lists(
    st.tuples(st.integers(0, 20_000), st.booleans(), st.integers(0, 3)), max_size=20
)


@given(_APPENDS, _APPENDS)
@settings(deadline=None)
def test_model_with_units_of_one_second_changes_nothing_when_it_is_known(
    early: list[tuple[int, bool, int]], later: list[tuple[int, bool, int]]
) -> None:
    queues = [RequestQueue(frame_count=2), RequestQueue(frame_count=2)]
    counts: list[list[int]] = [[], []]
    for number, (count, must_listen, frame_count) in enumerate(early + later):
        if number == len(early):
            queues[0].use_model(DEFAULT_FORMAT, at(number), 3)
        frames = (picture(number),) * max(frame_count, not count)
        append = Append(pcm(count) if count else b"", must_listen, Tag(str(number)), frames)
        for queue, seen in zip(queues, counts, strict=True):
            queue.add(append, at(number), 3)
            seen.append(queue.unit_count)
    taken = [list(iter(queue.take, None)) for queue in queues]
    assert taken[0] == taken[1]
    assert [*queues[0].sent.values()] == [*queues[1].sent.values()]
    assert counts[0] == counts[1]
    assert queues[0].take_dropped(0) == queues[1].take_dropped(0)


def test_the_unit_after_dropped_ones_must_listen_if_one_of_them_had_to() -> None:
    queue = RequestQueue(frame_count=4)
    for must_listen in (False, True, False, False, False):
        queue.add(Append(pcm(16_000), force_listen=must_listen), at(0), limit=2)
    taken = [queue.take(), queue.take()]
    assert [outgoing.request.unit.force_listen for outgoing in taken if outgoing] == [True, False]
    for _ in range(3):
        queue.add(Append(pcm(16_000)), at(0), limit=2)
    taken = [queue.take(), queue.take()]
    assert [outgoing.request.unit.force_listen for outgoing in taken if outgoing] == [False, False]
