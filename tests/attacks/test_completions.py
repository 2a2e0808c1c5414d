"""Requests for chat completions that try to make the edge reach other machines or files."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.edge.live_edge import live_edge

PATH = "/v1/chat/completions"


def ask(part: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part]}]}


def image(url: str) -> dict[str, Any]:
    return ask({"type": "image_url", "image_url": {"url": url}})


def sound(data: str) -> dict[str, Any]:
    return ask({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})


async def test_edge_fetches_nothing_that_a_request_names(tmp_path: Path) -> None:
    reached = asyncio.Event()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.set()
        writer.close()

    secret = tmp_path / "secret.png"
    secret.write_bytes(b"\x89PNG\r\n\x1a\n0000IHDR" + bytes(8))
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, live_edge() as edge, edge.asked() as http:
        for url in (
            f"http://127.0.0.1:{port}/a.png",
            f"HTTPS://127.0.0.1:{port}/a.png",
            f"//127.0.0.1:{port}/a.png",
            f"data:http://127.0.0.1:{port}/a.png",
            f"file://{secret}",
            str(secret),
        ):
            for body in (image(url), sound(url)):
                code, told = await http.ask("POST", PATH, json=body)
                assert (code, told["error"]["code"]) == (400, "invalid_value")
                assert told["error"]["param"].startswith("messages[0].content[0].")
                assert "IHDR" not in told["error"]["message"]
        assert not reached.is_set()
        assert edge.fabric.acquisitions.empty()


@pytest.mark.parametrize("origin", ["https://evil.example", "null"])
async def test_page_of_another_origin_gets_no_completion(origin: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    async with live_edge() as edge, edge.asked() as http:
        headers = {"Origin": origin}
        code, told = await http.ask("POST", PATH, json=body, headers=headers)
        assert (code, told["error"]["code"]) == (403, "permission_denied")
        # A page can send a form without asking first.
        plain = {"Content-Type": "text/plain"}
        async with http.client.post(
            f"http://{http.address}{PATH}", data=b"{}", headers=plain
        ) as answer:
            assert answer.status == 415
        assert edge.fabric.acquisitions.empty()
