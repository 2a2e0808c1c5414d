"""The WebSocket of Node, which has the interface of browsers, opens with a credential."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from support.edge.credential_rig import KeyStore, make_token
from support.edge.live_edge import LiveEdge, live_edge

from duplane.edge.credentials.keys import new_key
from duplane.edge.credentials.settings import CredentialSettings

PROGRAM = """
const [url, ...protocols] = process.argv.slice(1);
const socket = new WebSocket(url, protocols);
socket.onerror = () => { console.log("refused"); process.exit(); };
socket.onmessage = (event) => {
  console.log(`${socket.protocol} ${JSON.parse(event.data).type}`);
  process.exit();
};
"""


async def said_by_node(edge: LiveEdge, query: str, *protocols: str) -> str:
    """Open a WebSocket in Node; return the selected subprotocol and the type of the first event."""
    url = f"ws://{edge.edge.address}/v1/realtime?mode=audio{query}"
    command = ("node", "--experimental-websocket", "-e", PROGRAM, url, *protocols)
    node = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(60):
        output, _ = await node.communicate()
    return output.decode().strip()


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
async def test_websocket_of_a_browser_opens_with_a_token_as_subprotocol(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    key = store.new()
    credentials = CredentialSettings(api_keys=store.path)
    async with live_edge(credentials=credentials, slot_count=4) as edge:
        token, in_url = [await make_token(edge, key.text) for _ in range(2)]
        said = await asyncio.gather(
            said_by_node(edge, "", "duplane.realtime", f"duplane.bearer.{token}"),
            said_by_node(edge, "", "map.realtime", f"map-api-key.{key.text}"),
            said_by_node(edge, f"&token={in_url}", "duplane.realtime"),
            said_by_node(edge, "", "duplane.realtime", f"duplane.bearer.{new_key().text}"),
        )
    assert said == [
        "duplane.realtime session.queue_done",
        "map.realtime session.queue_done",
        "duplane.realtime session.queue_done",
        "refused",
    ]
