"""Log lines have the ids of their session, and never audio, text or secrets, at any level."""

from __future__ import annotations

import logging
import re

import orjson
import pytest
from support.edge.live_edge import AUDIO, UPDATE, closed, end, live_edge, receive, send
from support.monitoring.log_state import restored_logging
from support.worker.worker_harness import asks, chat, chat_failure, running_worker, unit

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.monitoring.logs import configure_logging
from duplane.fabric.v1 import session_pb2, trace_pb2

PRIVATE = "what nobody may read"
TRACE = trace_pb2.TraceContext(traceparent=f"00-{'a' * 32}-{'b' * 16}-01")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Capture every line of every logger."""
    caplog.set_level(logging.DEBUG, logger="duplane")
    caplog.set_level(logging.DEBUG)
    return caplog


def check(log: pytest.LogCaptureFixture, *secrets: str) -> None:
    ours = [record for record in log.records if record.name.startswith("duplane")]
    assert ours, "nothing was logged"
    for record in ours:
        line = f"{record.getMessage()} {record.exc_text or ''}"
        assert not [secret for secret in (PRIVATE, AUDIO[:40], *secrets) if secret in line], line


async def test_edge_logs_nothing_of_what_clients_and_the_model_say(
    log: pytest.LogCaptureFixture,
) -> None:
    async with live_edge(admin_token="the token") as edge, edge.connect() as client:
        assert (await receive(client))["type"] == "session.queue_done"
        await send(client, {**UPDATE, "session": {"instructions": PRIVATE}})
        assert (await receive(client))["type"] == "session.created"
        conversation = await edge.fabric.conversation()
        await send(client, {"type": "input_audio_buffer.append", "audio": AUDIO})
        assert (await receive(client))["type"] == "response.listen"
        spoken = session_pb2.Delta(sequence=1, speech=session_pb2.Speech(text=PRIVATE))
        conversation.say(session_pb2.ConverseResponse(delta=spoken))
        await receive(client)
        await send(client, {"type": PRIVATE})
        assert (await receive(client))["type"] == "error"
        async with edge.asked() as asked:
            headers = {"Authorization": "Bearer another token"}
            assert (await asked.ask("PUT", "/api/config/eta", json={}, headers=headers))[0] == 403
            question = {"messages": [{"role": "user", "content": PRIVATE}]}
            await asked.ask("POST", "/api/chat", data=orjson.dumps(question))
        await end(client)
    check(log, "the token", "another token")


async def test_edge_logs_nothing_of_a_frame_that_cannot_be_read(
    log: pytest.LogCaptureFixture,
) -> None:
    async with live_edge() as edge, edge.connect() as client:
        await receive(client)
        await client.send(f"{{{PRIVATE}")
        await closed(client, 1003)
    check(log)


async def test_edge_logs_no_text_of_a_request_that_it_refuses(
    log: pytest.LogCaptureFixture,
) -> None:
    async with live_edge() as edge:
        edge.fabric.is_automatic = False
        async with edge.connect("?mode=audio&model=x") as client:
            waiting = await edge.fabric.acquisitions.get()
            refusal = FabricError(Reason.MODEL_NOT_SERVED, f"no worker serves {PRIVATE}")
            waiting.events.put_nowait(refusal)
            assert PRIVATE in str(await receive(client))
            await closed(client, 1013)
    assert "model_not_served (model_not_served)" in log.text
    check(log)


async def test_edge_logs_networks_of_clients_on_demand(log: pytest.LogCaptureFixture) -> None:
    async with live_edge(log_addresses="short") as edge, edge.connect() as client:
        await receive(client)
        await end(client)
    assert "of 127.0.0.0/24 on worker" in log.text
    assert "127.0.0.1 on worker" not in log.text


async def test_worker_logs_nothing_of_a_session_or_a_chat(log: pytest.LogCaptureFixture) -> None:
    async with running_worker() as rig:
        settings = session_pb2.Open(system_prompt=PRIVATE)
        async with rig.opened(settings=settings) as client:
            await client.send(unit(0, 0.5))
            await client.delta()
            await client.close(PRIVATE)
            await client.closed()
        refused = asks(PRIVATE, config=session_pb2.ChatConfig(temperature=3))
        async with chat(rig, refused) as responses:
            await chat_failure(responses)
    check(log)


async def test_lines_of_a_session_have_its_ids(capsys: pytest.CaptureFixture[str]) -> None:
    with restored_logging():
        configure_logging("worker", "INFO", "json")
        async with running_worker() as rig:
            granted = rig.grant()
            async with rig.opened(granted, trace=TRACE) as client:
                await client.close()
                await client.closed()
        lines = [orjson.loads(line) for line in capsys.readouterr().err.splitlines()]
    of_session = [line for line in lines if "session_id" in line]
    messages = [re.sub(r"session-\d+", "S", line["message"]) for line in of_session]
    assert messages == [
        "slot 0: session S begins",
        "worker worker-under-test slot 0: session S ended: CLIENT ",
        "slot 0: free",
    ]
    assert {line["trace_id"] for line in of_session} == {"a" * 32}
    assert len({line["session_id"] for line in of_session}) == 1
    assert not [line for line in lines if "attached" in line["message"] and "session_id" in line]
