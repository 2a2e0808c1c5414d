"""An edge that knows that it cannot serve a session refuses the upgrade of OpenAI's clients."""

from __future__ import annotations

import orjson
import pytest
from support.edge.live_edge import begin, closed, end, live_edge, receive
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

from duplane.edge.settings import Limits

PATHS = ("/v1/live/sessions", "/openai/v1/live/sessions", "/openai/v1/realtime", "/v1/realtime")


async def refusal(address: str, path: str) -> InvalidStatus:
    """Return the answer to the upgrade of a client of OpenAI's protocols."""
    with pytest.raises(InvalidStatus) as refused:
        async with connect(
            f"ws://{address}{path}", subprotocols=[Subprotocol("realtime")], proxy=None
        ):
            pass
    return refused.value


async def test_full_edge_answers_openai_with_a_status_and_others_with_an_event() -> None:
    async with live_edge(limits=Limits(session_count=1)) as edge, edge.connect() as client:
        await begin(client)
        for path in PATHS:
            answer = (await refusal(edge.edge.address, path)).response
            assert answer.status_code == 503
            assert int(answer.headers["Retry-After"]) > 0
            assert answer.body is not None
            error = orjson.loads(answer.body)["error"]
            assert (error["code"], error["message"]) == ("server_busy", "too many sessions")
        async with edge.connect() as other:
            assert (await receive(other))["error"]["message"] == "too many sessions"
            await closed(other, 1013)
        await end(client)
        await edge.settled()
        async with connect(f"ws://{edge.edge.address}{PATHS[0]}", proxy=None):
            pass  # the refused upgrades have left no session behind
