"""Units and openings that the worker refuses: their spans are complete."""

from __future__ import annotations

from opentelemetry.trace import StatusCode
from support.worker.worker_harness import running_worker, unit

from duplane.fabric.errors import Reason
from duplane.fabric.monitoring import spans
from duplane.fabric.v1 import lease_pb2, session_pb2
from duplane.worker.models.types import OptionError


async def test_refused_unit_has_the_stage_prepare() -> None:
    async with running_worker() as rig, rig.opened() as client:
        await client.send(unit(0, audio=b""))
        assert (await client.failed()).field == "audio"
        found = rig.spans.get_finished_spans()
    (refused,) = [span for span in found if span.name == spans.WORKER_UNIT]
    (stage,) = refused.events
    assert (stage.name, stage.timestamp) == (spans.PREPARE, refused.start_time)


async def test_time_of_a_bad_picture_is_in_the_stage_prepare() -> None:
    async with running_worker() as rig:
        granted = rig.grant(kind=lease_pb2.SESSION_KIND_OMNI_DUPLEX)
        async with rig.opened(granted) as client:
            await client.send(unit(0, video_frames=[b""]))
            assert (await client.failed()).field == "video_frames[0]"
            found = rig.spans.get_finished_spans()
    (failed,) = [span for span in found if span.name == spans.WORKER_UNIT]
    assert [stage.name for stage in failed.events] == [spans.PREPARE, spans.INBOX]


async def test_refused_opening_has_a_span_with_an_error() -> None:
    def refuse(options: object) -> None:
        raise OptionError("max_new_speak_tokens_per_chunk", "is odd")

    async with running_worker() as rig:
        rig.model.on_options = refuse
        async with rig.claimed() as client:
            await client.write(session_pb2.ConverseRequest(open=session_pb2.Open()))
            assert (await client.refused()).reason is Reason.INVALID_FIELD
            await rig.all_free()
    found = {span.name: span for span in rig.spans.get_finished_spans()}
    opening = found[spans.WORKER_OPEN]
    assert opening.status.status_code is StatusCode.ERROR
    session = found[spans.WORKER_SESSION].get_span_context()
    assert opening.parent
    assert session
    assert opening.parent.span_id == session.span_id
