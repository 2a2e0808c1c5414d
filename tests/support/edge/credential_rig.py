"""Files of API keys for tests, and requests with credentials in each place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from support.edge.live_edge import LiveEdge
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

from duplane.edge.credentials.keys import NewKey, new_key
from duplane.fabric.files import replacing

OWN_ORIGIN = "http://{address}"


class KeyStore:
    """A file of keys that a test changes; `new` returns a key that is in it."""

    def __init__(
        self, directory: Path, name: str = "keys.toml", head: str = "[tenants.acme]\n"
    ) -> None:
        self.path = directory / name
        self.head = head
        self._entries: dict[str, str] = {}
        self.write()

    def new(self, tenant: str = "acme", rest: str = "") -> NewKey:
        """Add a key of a tenant; `rest` has further lines of its table."""
        return self.add(f'tenant = "{tenant}"\n{rest}')

    def add(self, owner: str) -> NewKey:
        """Add a key with the lines of its table that say whose it is."""
        key = new_key()
        self._entries[key.key_id] = (
            f'[[keys]]\nid = "{key.key_id}"\nsha256 = "{key.digest}"\n{owner}\n'
        )
        self.write()
        return key

    def change(self, key: NewKey, rest: str) -> None:
        """Add a line to the table of a key."""
        self._entries[key.key_id] += rest + "\n"
        self.write()

    def remove(self, key: NewKey) -> None:
        del self._entries[key.key_id]
        self.write()

    def write(self) -> None:
        with replacing(self.path) as part:
            part.write_text(self.head + "".join(self._entries.values()))


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def carriers(edge: LiveEdge, token: str) -> dict[str, dict[str, Any]]:
    """Return the arguments of `connected` for a token in each place, except the URL."""
    origin = OWN_ORIGIN.format(address=edge.edge.address)
    cookie = {"Cookie": f"__Host-duplane={token}", "Origin": origin}
    return {
        "header": {"headers": bearer(token)},
        "openai": {"protocols": [f"openai-insecure-api-key.{token}"]},
        "map": {"protocols": ["map.realtime", f"map-api-key.{token}"]},
        "duplane": {"protocols": ["duplane.realtime", f"duplane.bearer.{token}"]},
        "cookie": {"headers": cookie},
    }


def connected(
    edge: LiveEdge,
    path: str = "/v1/realtime?mode=audio",
    *,
    headers: Mapping[str, str] | None = None,
    protocols: Sequence[str] = (),
) -> connect:
    """Return a WebSocket with these headers and subprotocols."""
    return connect(
        f"ws://{edge.edge.address}{path}",
        additional_headers=headers,
        subprotocols=[Subprotocol(name) for name in protocols] or None,
        compression=None,
        proxy=None,
    )


async def refusal(edge: LiveEdge, path: str = "/v1/realtime?mode=audio", **how: Any) -> int:
    """Open a WebSocket and close it; return the status of its refusal, 0 if it opens."""
    try:
        async with connected(edge, path, **how):
            return 0
    except InvalidStatus as refused:
        return refused.response.status_code


async def answer(
    edge: LiveEdge, method: str, path: str, **request: Any
) -> tuple[int, Any, Mapping[str, str]]:
    """Send a request; return the status, the body and the headers of its answer."""
    async with (
        aiohttp.ClientSession() as client,
        client.request(method, f"http://{edge.edge.address}{path}", **request) as response,
    ):
        return response.status, await response.json(), response.headers


async def make_token(edge: LiveEdge, key: str, **body: Any) -> str:
    """Ask for an ephemeral token with an API key."""
    path = "/v1/realtime/client_secrets"
    code, told, _ = await answer(edge, "POST", path, headers=bearer(key), json=body)
    assert code == 200, told
    return str(told["value"])
