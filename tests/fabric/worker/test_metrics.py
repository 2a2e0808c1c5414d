"""The worker's metrics count units, chats, claims and ends of sessions."""

from __future__ import annotations

import pytest
from support.monitoring.metrics import Scrape, logged_url, scrape
from support.worker.worker_harness import asks, chat_answer, refusal, running_worker, unit

from duplane.fabric.errors import Reason

UNITS = "duplane_units_total"


def slots(seen: Scrape) -> dict[str, float]:
    states = ("free", "occupied", "cleaning", "broken")
    counts = {state: seen.value("duplane_slots", role="worker", state=state) for state in states}
    return {state: count for state, count in counts.items() if count}


@pytest.mark.timing
async def test_units_are_counted_and_timed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with running_worker(metrics_listen="127.0.0.1:0") as rig:
        url = logged_url(caplog.records)
        assert slots(await scrape(url)) == {"free": 2}
        async with rig.opened() as client:
            await client.send(unit(0))
            await client.delta()
            await client.send(unit(1, 0.5))
            await client.delta()
            await client.send(unit(1))  # a repeated sequence
            await client.failed()
            seen = await scrape(url)
            assert slots(seen) == {"free": 1, "occupied": 1}
            kinds = {"role": "worker", "kind": "audio_duplex"}
            assert seen.value("duplane_sessions", **kinds) == 1
            await client.end()
        await rig.all_free()
        seen = await scrape(url)
    outcomes = {"listen": 1, "speech": 1, "failed": 1, "dropped": 0}
    for outcome, count in outcomes.items():
        assert seen.value(UNITS, role="worker", outcome=outcome) == count
    for outcome in ("listen", "speech"):
        name = "duplane_unit_duration_seconds"
        assert seen.value(f"{name}_count", role="worker", outcome=outcome) == 1
        assert 0 < seen.value(f"{name}_sum", role="worker", outcome=outcome) < 1
    assert seen.value("duplane_unit_deadlines_missed_total", role="worker") == 0
    assert seen.value("duplane_audio_seconds_total", direction="input") == 2
    assert seen.value("duplane_audio_seconds_total", direction="output") > 0
    assert seen.value("duplane_real_time_factor_count") == 2
    assert seen.value("duplane_batch_size_bucket", work="unit", le="1.0") == 2
    assert seen.value("duplane_launch_size_sum", block="begin") == 2
    assert seen.value("duplane_launch_duration_seconds_count", block="open") == 1
    assert seen.value("duplane_stage_duration_seconds_count", stage="device") == 2
    assert seen.total("duplane_tokens_total") > 0
    ended = {"role": "worker", "kind": "audio_duplex", "reason": "client"}
    assert seen.value("duplane_sessions_ended_total", **ended) == 1
    assert seen.total("duplane_sessions_ended_total") == 1
    assert slots(seen) == {"free": 2}


async def test_chats_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with running_worker(metrics_listen="127.0.0.1:0") as rig:
        responses = await chat_answer(rig, asks())
        await rig.all_free()
        seen = await scrape(logged_url(caplog.records))
    delta_count = sum(response.HasField("delta") for response in responses)
    assert delta_count
    assert seen.value("duplane_chat_delta_duration_seconds_count") == delta_count
    assert seen.total("duplane_batch_size_count", work="chat") == delta_count
    done = next(response.done for response in responses if response.HasField("done"))
    expected = done.token_counts.output_text_token_count
    assert seen.value("duplane_tokens_total", type="output_text") == expected


async def test_refused_claims_are_counted_by_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with running_worker(metrics_listen="127.0.0.1:0") as rig:
        refused = await refusal(rig, rig.grant(worker_id="another"))
        assert refused.reason is Reason.WRONG_WORKER
        seen = await scrape(logged_url(caplog.records))
    assert seen.value("duplane_claims_refused_total", reason="WRONG_WORKER") == 1
