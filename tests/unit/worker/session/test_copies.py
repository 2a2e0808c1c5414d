"""The copies of sessions that a worker keeps."""

from __future__ import annotations

import pytest

from duplane.fabric.durations import to_duration
from duplane.fabric.token_secrets import digest_of
from duplane.fabric.v1 import session_pb2
from duplane.worker.session.copies import Copies

CONTEXT = 4  # units


@pytest.mark.parametrize(("asked", "count"), [(0, 8), (2, 2), (12, 12)])
def test_copy_keeps_as_many_windows_as_its_edge_says(asked: int, count: int) -> None:
    keep = session_pb2.Keep(
        token_sha256=digest_of("x"), within=to_duration(1.0), window_count=asked
    )
    copies = Copies(1 << 20, 1 << 20)
    opened = session_pb2.Opened(model_digest="m")
    copy = copies.keep("s", keep, session_pb2.Open(seed=1), opened, replay_count=1)
    for sequence in range(60):
        unit = session_pb2.Unit(sequence=sequence, audio=bytes(64))
        copy.receive(session_pb2.ConverseRequest(unit=unit))
        reach = session_pb2.UnitReach(row_count=9, context_unit_count=min(CONTEXT, sequence + 1))
        delta = session_pb2.Delta(sequence=sequence, token_ids=[1], rebuild_state=b"s", reach=reach)
        copies.answer(copy, delta)
    make = session_pb2.TakeOverResponse
    units = [unit for part in copy.kept(make) for unit in part.kept.units]
    whole = [unit for unit in units if unit.audio_int16]
    assert (len(units), len(whole)) == (60, (count + 1) * (CONTEXT - 1) + 1)
