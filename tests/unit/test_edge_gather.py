"""Chunks of any length become units of one second, and nothing is lost but what is counted."""

from __future__ import annotations

from edge_transcripts import pcm
from hypothesis import given
from hypothesis import strategies as st

from duplane.edge.dialects.dialect import NO_TAG, Append, Tag
from duplane.edge.gather import UNIT_BYTES, Gatherer, Uplink


def gather(*appends: Append) -> list[bytes]:
    gatherer = Gatherer(frame_count=4)
    return [unit.audio for append in appends for unit in gatherer.add(append, 0)]


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


def test_force_listen_holds_for_every_unit_with_audio_that_asked_for_it() -> None:
    gatherer = Gatherer(frame_count=4)
    appends = (
        Append(pcm(8_000)),
        Append(pcm(24_000), force_listen=True),
        Append(pcm(8_000), force_listen=True),
        Append(pcm(8_000)),
        Append(pcm(16_000)),
    )
    units = [unit for append in appends for unit in gatherer.add(append, 0)]
    assert [unit.force_listen for unit in units] == [True, True, True, False]


def test_a_unit_carries_the_tag_and_the_time_of_its_last_chunk() -> None:
    gatherer = Gatherer(frame_count=4)
    assert not list(gatherer.add(Append(pcm(8_000), tag=Tag("first")), 1))
    (unit,) = gatherer.add(Append(pcm(8_000), tag=Tag("second")), 2)
    assert (unit.tag, unit.receive_wall_ns) == (Tag("second"), 2)


def test_the_newest_units_win_and_the_dropped_ones_are_counted_once() -> None:
    uplink = Uplink(limit=2, frame_count=4)
    for number in range(5):
        uplink.add(Append(pcm(16_000), tag=Tag(str(number))), 0)
    taken = [uplink.take() for _ in range(3)]
    assert [(t[0], t[1].tag.input_id) for t in taken if t] == [(0, "3"), (1, "4")]
    assert taken[2] is None
    assert [uplink.take_dropped_count(), uplink.take_dropped_count()] == [3, 0]


def test_an_answer_forgets_the_tags_of_all_units_before_it() -> None:
    uplink = Uplink(limit=9, frame_count=4)
    for number in range(4):
        uplink.add(Append(pcm(16_000), tag=Tag(str(number))), 0)
        uplink.take()
    assert uplink.answered(2) == (Tag("2"), 2)
    assert uplink.answered(1) == (NO_TAG, -1)
    assert uplink.answered(3) == (Tag("3"), 3)


def test_tags_of_a_worker_that_never_answers_are_bounded() -> None:
    uplink, unanswered = Uplink(limit=1, frame_count=4), 2000
    audio = pcm(16_000)
    for number in range(unanswered):
        uplink.add(Append(audio, tag=Tag(str(number))), 0)
        uplink.take()
    assert uplink.answered(0) == (NO_TAG, -1)
    assert uplink.answered(unanswered - 1) == (Tag(str(unanswered - 1)), unanswered - 1)


def picture(number: int) -> bytes:
    return bytes([number])


@given(st.lists(st.tuples(st.integers(1, 40_000), st.integers(0, 3)), max_size=12))
def test_pictures_go_with_the_last_sample_of_their_audio(chunks: list[tuple[int, int]]) -> None:
    gatherer, sample_count, expected = Gatherer(frame_count=99), 0, dict[int, list[bytes]]()
    units = []
    for number, (length, count) in enumerate(chunks):
        frames = (picture(number),) * count
        units += gatherer.add(Append(pcm(length), frames=frames), 0)
        sample_count += length
        expected.setdefault((sample_count - 1) // 16_000, []).extend(frames)
    assert [list(unit.frames) for unit in units] == [
        expected.get(index, []) for index in range(len(units))
    ]


def test_pictures_alone_are_a_unit_and_audio_that_waits_goes_on_waiting() -> None:
    gatherer = Gatherer(frame_count=4)
    assert not list(gatherer.add(Append(pcm(8_000)), 0))
    (alone,) = gatherer.add(Append(b"", frames=(picture(1),), force_listen=True), 0)
    assert (alone.audio, alone.frames, alone.force_listen) == (b"", (picture(1),), True)
    (unit,) = gatherer.add(Append(pcm(8_000)), 0)
    assert (unit.audio, unit.frames, unit.force_listen) == (pcm(8_000) * 2, (), False)


def test_of_the_pictures_that_wait_the_newest_win() -> None:
    gatherer = Gatherer(frame_count=2)
    for number in range(3):
        assert not list(gatherer.add(Append(pcm(4_000), frames=(picture(number),)), 0))
    (unit,) = gatherer.add(Append(pcm(4_000)), 0)
    assert unit.frames == (picture(1), picture(2))


def test_the_unit_after_dropped_ones_must_listen_if_one_of_them_had_to() -> None:
    uplink = Uplink(limit=2, frame_count=4)
    for must_listen in (False, True, False, False, False):
        uplink.add(Append(pcm(16_000), force_listen=must_listen), 0)
    taken = [uplink.take(), uplink.take()]
    assert [unit[1].force_listen for unit in taken if unit] == [True, False]
    for _ in range(3):
        uplink.add(Append(pcm(16_000)), 0)
    taken = [uplink.take(), uplink.take()]
    assert [unit[1].force_listen for unit in taken if unit] == [False, False]
