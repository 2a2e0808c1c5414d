"""The journal of a session: its content, its bounds, and the messages made from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from duplane.fabric.audio import pcm_from_int16
from duplane.fabric.bounds import MAX_REBUILD_UNIT_COUNT, MAX_STATE_BYTES
from duplane.fabric.journal import Journal, JournalSpace, LossReason
from duplane.fabric.v1 import session_pb2

MIB = 1024 * 1024
CHANGE = session_pb2.StateChange(speech_token_ids=[5, 6], chosen_token_ids=[7], draw_count=2)


def pcm(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def request(sequence: int, **fields: Any) -> session_pb2.ConverseRequest:
    unit = session_pb2.Unit(sequence=sequence, **{"audio": bytes(64_000), **fields})
    return session_pb2.ConverseRequest(unit=unit)


def delta(sequence: int, **fields: Any) -> session_pb2.Delta:
    return session_pb2.Delta(
        sequence=sequence,
        **{
            "token_ids": [1, 2],
            "state_change": CHANGE,
            "context_token_count": 10 + sequence,
            "speech": session_pb2.Speech(text="a word", audio=bytes(96_000)),
            **fields,
        },
    )


def journal(space: JournalSpace | None = None, **opened: Any) -> Journal:
    """Return a journal of an open conversation."""
    new = Journal(space or JournalSpace(32 * MIB, 64 * MIB))
    new.open(session_pb2.Open(seed=1), session_pb2.Opened(**{"model_digest": "m", **opened}))
    return new


def past_units(of: Journal) -> list[session_pb2.PastUnit]:
    return [unit for message in rebuilds(of) for unit in message.units]


def rebuilds(of: Journal) -> list[session_pb2.Rebuild]:
    """Return the messages that rebuild the conversation."""
    messages: list[session_pb2.Rebuild] = []
    sent_count = 0
    while sent_count < of.unit_count:
        messages.append(of.rebuild(sent_count).rebuild)
        sent_count += len(messages[-1].units)
    return messages


def test_past_unit_has_what_came_in_and_what_the_model_made_of_it() -> None:
    kept = journal()
    audio = pcm(0.5, -0.25)
    kept.append(request(4, audio=audio, video_frames=[b"jpeg"], max_slice_count=3), delta(4))
    (past,) = past_units(kept)
    assert past == session_pb2.PastUnit(
        sequence=4,
        audio_int16=np.array([16384, -8192], "<i2").tobytes(),
        video_frames=[b"jpeg"],
        max_slice_count=3,
        token_ids=[1, 2],
        state_change=CHANGE,
        context_token_count=14,
    )


def test_what_the_model_said_is_not_kept() -> None:
    kept = journal()
    kept.append(request(0), delta(0))
    assert b"a word" not in past_units(kept)[0].SerializeToString()
    assert kept.byte_count < 33_000


def test_failed_unit_is_left_out() -> None:
    kept = journal()
    kept.append(request(0), session_pb2.Failed(sequence=0))
    kept.append(request(1), delta(1))
    assert [past.sequence for past in past_units(kept)] == [1]


@pytest.mark.parametrize(
    ("value", "exponent"), [(1.0, 0), (1.001, 1), (-1.2, 1), (2.0, 1), (-30_000.0, 15), (1e6, 20)]
)
def test_sound_needs_the_same_space_at_every_amplitude(value: float, exponent: int) -> None:
    quiet, loud = journal(), journal()
    audio = pcm(*[0.001 * value] * 999, value)
    quiet.append(request(0, audio=pcm(*[0.001] * 1_000)), delta(0))
    loud.append(request(0, audio=audio), delta(0))
    assert loud.byte_count == quiet.byte_count
    (past,) = past_units(loud)
    assert (past.audio, past.audio_exponent) == (b"", exponent)
    kept = np.frombuffer(pcm_from_int16(past.audio_int16, past.audio_exponent), "<f4")
    assert np.abs(kept - np.frombuffer(audio, "<f4")).max() <= 2.0**exponent / 32_768


def test_worker_of_the_former_release_gets_the_same_loud_sound_as_float() -> None:
    kept = journal()
    kept.append(request(0, audio=pcm(0.5)), delta(0))
    kept.append(request(1, audio=pcm(0.25, -1.5)), delta(1))
    packed = kept.rebuild(0).rebuild.units
    plain = kept.rebuild(0, accepts_exponent=False).rebuild.units
    assert plain[0] == packed[0]
    assert (plain[1].audio_int16, plain[1].audio_exponent) == (b"", 0)
    assert plain[1].audio == pcm(0.25, -1.5)
    assert plain[1].audio == pcm_from_int16(packed[1].audio_int16, packed[1].audio_exponent)
    assert plain[1].token_ids == packed[1].token_ids
    assert kept.rebuild(0).rebuild.units == packed  # the journal itself is unchanged


def test_message_of_loud_units_is_bounded_for_each_worker() -> None:
    kept = journal()
    for sequence in range(300):
        kept.append(request(sequence, audio=pcm(*[1.5] * 16_000)), delta(sequence))
    for accepts_exponent in (True, False):
        message = kept.rebuild(0, accepts_exponent=accepts_exponent)
        assert message.ByteSize() <= 8 * MIB


@pytest.mark.parametrize("value", [1.1e6, float("nan"), float("inf")])
def test_samples_that_no_worker_accepts_are_kept_as_they_are(value: float) -> None:
    kept = journal()
    kept.append(request(0, audio=pcm(0.0, value)), delta(0))
    (past,) = past_units(kept)
    assert (past.audio, past.audio_int16) == (pcm(0.0, value), b"")


def test_messages_are_bounded() -> None:
    kept = journal()
    for sequence in range(500):
        kept.append(request(sequence), delta(sequence))
    messages = rebuilds(kept)
    assert len(messages) > 1
    assert all(message.ByteSize() <= 8 * MIB for message in messages)
    assert [past.sequence for past in past_units(kept)] == list(range(500))
    assert {message.model_digest for message in messages} == {"m"}


def test_message_has_a_bounded_number_of_units() -> None:
    kept = journal()
    for sequence in range(2 * MAX_REBUILD_UNIT_COUNT + 1):
        kept.append(request(sequence, audio=pcm(0.5)), delta(sequence))
    messages = rebuilds(kept)
    most = MAX_REBUILD_UNIT_COUNT
    assert [len(message.units) for message in messages] == [most, most, 1]
    assert [past.sequence for past in past_units(kept)] == list(range(2 * most + 1))


def test_unit_larger_than_a_message_is_alone_in_one() -> None:
    kept = journal()
    frames = [bytes(2 * MIB)] * 3
    for sequence, pictures in enumerate(([], frames, [], [])):
        kept.append(request(sequence, video_frames=pictures), delta(sequence))
    sizes = [len(message.units) for message in rebuilds(kept)]
    assert sizes == [1, 1, 2]


def test_message_without_units_names_the_model() -> None:
    rebuild = journal().rebuild(0).rebuild
    assert rebuild == session_pb2.Rebuild(model_digest="m")


def test_journal_above_its_bound_is_dropped_and_counted_once() -> None:
    space = JournalSpace(call_bytes=100_000, total_bytes=64 * MIB)
    kept = journal(space)
    for sequence in range(10):
        kept.append(request(sequence), delta(sequence))
        assert space.used_bytes == kept.byte_count <= 100_000
        assert kept.is_whole is (sequence < 3)
    assert (space.used_bytes, space.given_up_count) == (0, 1)
    assert past_units(kept) == []


def test_journal_that_is_given_up_for_two_reasons_is_counted_once() -> None:
    space = JournalSpace(call_bytes=0, total_bytes=0)
    Journal(space).open(session_pb2.Open(system_prompt="x"), session_pb2.Opened())
    assert (space.used_bytes, space.given_up_count) == (0, 1)


def test_all_journals_together_have_a_bound() -> None:
    space = JournalSpace(call_bytes=64 * MIB, total_bytes=100_000)
    one, other = journal(space), journal(space)
    for sequence in range(2):
        one.append(request(sequence), delta(sequence))
    for sequence in range(2):
        other.append(request(sequence), delta(sequence))
    assert (one.is_whole, other.is_whole) == (True, False)
    assert space.used_bytes == one.byte_count
    one.drop()
    assert space.used_bytes == 0


def test_settings_count_as_bytes_of_the_journal() -> None:
    space = JournalSpace(call_bytes=MIB, total_bytes=64 * MIB)
    kept = Journal(space)
    voice = bytes(2 * MIB)
    kept.open(session_pb2.Open(llm_voice=voice), session_pb2.Opened(model_digest="m"))
    assert not kept.is_whole
    assert space.used_bytes == 0


@pytest.mark.parametrize(
    "state",
    [
        {"rebuild_state": b"opaque", "state_change": None},  # of a worker of the next release
        {"rebuild_state": b"", "state_change": CHANGE},  # of a worker of the former release
        {"rebuild_state": b"opaque", "state_change": CHANGE},
    ],
)
def test_state_is_passed_on_in_each_form_that_the_worker_sent(state: dict[str, Any]) -> None:
    kept = journal()
    kept.append(request(0), delta(0, **state))
    assert kept.is_whole
    (past,) = past_units(kept)
    assert past.rebuild_state == state["rebuild_state"]
    assert past.HasField("state_change") is (state["state_change"] is not None)


def test_opaque_state_counts_as_bytes_of_the_journal() -> None:
    small, large = journal(), journal()
    small.append(request(0), delta(0))
    large.append(request(0), delta(0, rebuild_state=bytes(5_000)))
    assert large.byte_count == small.byte_count + 5_000


@pytest.mark.parametrize(
    "fields",
    [
        {"rebuild_state": bytes(MAX_STATE_BYTES + 1)},
        {"state_change": session_pb2.StateChange(speech_token_ids=[1] * (MAX_STATE_BYTES + 1))},
    ],
)
def test_state_that_no_worker_accepts_makes_the_journal_useless(fields: dict[str, Any]) -> None:
    kept = journal()
    kept.append(request(0), delta(0, rebuild_state=bytes(MAX_STATE_BYTES)))
    assert kept.is_whole
    kept.append(request(1), delta(1, **fields))
    assert not kept.is_whole
    assert kept.loss
    assert (kept.loss.reason, kept.loss.unit_count) == (LossReason.NO_STATE, 1)


def test_ids_of_a_unit_count_as_bytes_of_the_journal() -> None:
    small, large = journal(), journal()
    small.append(request(0), delta(0))
    many = session_pb2.StateChange(speech_token_ids=[1] * 5_000)
    large.append(request(0), delta(0, token_ids=[1] * 1_000, state_change=many))
    assert large.byte_count > small.byte_count + 8_900


def test_worker_that_cannot_rebuild_gets_no_journal() -> None:
    kept = journal(model_digest="")
    assert not kept.is_whole
    later = journal()
    later.append(request(0), delta(0, state_change=None))
    assert not later.is_whole


def test_unit_that_is_not_known_any_more_makes_the_journal_useless() -> None:
    kept = journal()
    kept.append(None, delta(0))
    assert not kept.is_whole


UNITS_S = 1_200
CONTEXT, SOUND = 24, 66


def windowed(sequence: int, **fields: Any) -> session_pb2.Delta:
    """Return the delta of a unit in a context of 24 units."""
    reach = session_pb2.UnitReach(
        row_count=13,
        context_unit_count=min(CONTEXT, sequence + 1),
        sound_unit_count=min(SOUND, sequence),
    )
    return delta(sequence, reach=reach, rebuild_state=b"s" * 23, **fields)


def test_journal_of_a_long_session_with_a_window_stays_small() -> None:
    space = JournalSpace(32 * MIB, 64 * MIB)
    kept = journal(space)
    for sequence in range(UNITS_S):
        kept.append(request(sequence), windowed(sequence))
        assert kept.byte_count == space.used_bytes < 12 * MIB
    assert (kept.unit_count, kept.is_whole, kept.is_approximate) == (UNITS_S, True, False)
    units = past_units(kept)
    whole = [unit for unit in units if not unit.row_count]
    assert len(whole) == 9 * (CONTEXT - 1) + 1
    assert sum(bool(unit.audio_int16) for unit in units) == len(whole) + SOUND
    assert [unit.sequence for unit in units] == list(range(UNITS_S))
    kept.drop()
    assert (space.used_bytes, kept.is_trimmed) == (0, False)


@pytest.mark.parametrize("window_count", [2, 8, 20])
def test_journal_keeps_as_many_windows_as_its_setting_says(window_count: int) -> None:
    kept = journal(JournalSpace(64 * MIB, 64 * MIB, window_count))
    for sequence in range(600):
        kept.append(request(sequence), windowed(sequence))
    whole = sum(not unit.row_count for unit in past_units(kept))
    assert whole == (window_count + 1) * (CONTEXT - 1) + 1


@pytest.mark.parametrize("bound", ["call_bytes", "total_bytes"])
def test_bound_that_is_too_low_takes_windows_first(bound: str) -> None:
    space = JournalSpace(64 * MIB, 64 * MIB)
    setattr(space, bound, 6 * MIB)
    kept = journal(space)
    for sequence in range(400):
        kept.append(request(sequence), windowed(sequence))
    assert kept.is_whole
    assert kept.is_approximate
    whole = sum(not unit.row_count for unit in past_units(kept))
    assert 3 * (CONTEXT - 1) < whole < 9 * (CONTEXT - 1)
    assert 5 * MIB < kept.byte_count == space.used_bytes <= 6 * MIB


def test_journal_that_cannot_keep_two_windows_is_given_up() -> None:
    kept = journal(JournalSpace(4 * MIB, 64 * MIB))  # 73 whole units and 66 of sound are more
    for sequence in range(400):
        kept.append(request(sequence), windowed(sequence))
    assert not kept.is_whole
    assert kept.loss is not None
    assert kept.loss.reason is LossReason.SESSION_BOUND
    assert kept.loss.byte_count > 4 * MIB
    assert not kept.is_approximate


def test_units_of_a_message_stay_while_others_are_sent() -> None:
    kept = journal()
    for sequence in range(400):
        kept.append(request(sequence), windowed(sequence))
    first = past_units(kept)
    kept.pin("one")
    kept.pin("another")
    kept.unpin("another")
    for sequence in range(400, 420):
        kept.append(request(sequence), windowed(sequence))
    assert past_units(kept)[:400] == first
    kept.unpin("one")
    kept.append(request(420), windowed(420))
    fed = [sum(not unit.row_count for unit in units) for units in (first, past_units(kept))]
    assert fed[0] == fed[1]


def test_pinned_journal_is_given_up_above_the_slack() -> None:
    kept = journal(JournalSpace(6 * MIB, 64 * MIB))
    for sequence in range(400):
        kept.append(request(sequence), windowed(sequence))
    kept.pin("one")
    for sequence in range(400, 500):
        kept.append(request(sequence), windowed(sequence))
    assert kept.is_whole
    for sequence in range(500, 600):
        kept.append(request(sequence), windowed(sequence))
    assert not kept.is_whole


def test_only_the_first_units_of_a_long_journal_are_without_sound_in_messages() -> None:
    kept = journal()
    for sequence in range(UNITS_S):
        kept.append(request(sequence), windowed(sequence))
    messages = rebuilds(kept)
    assert all(len(message.units) <= MAX_REBUILD_UNIT_COUNT for message in messages)
    assert len(messages) < 8


def partial_journal(space: JournalSpace) -> tuple[Journal, list[session_pb2.PastUnit]]:
    """Return a journal that waits for the units of another one, and these units."""
    former, new = journal(), journal(space)
    for sequence in range(3):
        former.append(request(sequence), delta(sequence))
    new.begin_copy()
    return new, past_units(former)


def test_units_of_another_journal_come_before_those_that_were_answered_meanwhile() -> None:
    space = JournalSpace(32 * MIB, 64 * MIB)
    new, units = partial_journal(space)
    new.append(request(3), delta(3))
    new.extend(units[:2])
    new.append(request(4), delta(4))
    assert space.used_bytes == new.byte_count > 4 * 32_000
    new.extend(units[2:])
    assert new.is_partial
    new.end_copy()
    assert not new.is_partial
    new.append(request(5), delta(5))
    assert [unit.sequence for unit in past_units(new)] == [0, 1, 2, 3, 4, 5]
    assert space.used_bytes == new.byte_count > 6 * 32_000
    new.drop()
    assert space.used_bytes == 0


def test_journal_without_the_units_of_the_other_one_is_given_up() -> None:
    space = JournalSpace(32 * MIB, 64 * MIB)
    new, units = partial_journal(space)
    new.extend(units[:2])
    new.append(request(3), delta(3))
    new.lack_copy()
    assert (new.is_whole, new.is_partial, space.used_bytes) == (False, False, 0)
    assert new.loss
    assert new.loss.reason is LossReason.NO_COPY
    new.extend(units[2:])
    assert new.unit_count == 0


def test_units_that_are_answered_while_a_journal_is_partial_count_in_its_bound() -> None:
    space = JournalSpace(50_000, 64 * MIB)
    new, _ = partial_journal(space)
    new.append(request(3), delta(3))
    assert new.is_whole
    new.append(request(4), delta(4))
    assert new.loss
    assert (new.loss.reason, space.used_bytes) == (LossReason.SESSION_BOUND, 0)
