"""The public keys of an issuer of JWTs, fetched from its URL and kept while it does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

import aiohttp
import jwt
import orjson
from aiohttp import ClientTimeout
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from duplane.edge.clock import Clock
from duplane.edge.credentials.refusal import IssuerUnreachableError

MAX_BYTES = 64 * 1024
UNKNOWN_INTERVAL_S = 30.0  # between two fetches for key ids that are unknown, or after a failure
KEEP_S = 24 * 3600.0  # how long keys are used while the issuer does not answer
_REFRESH_INTERVAL_S = 300.0  # after this time a key that the issuer has removed is refused
_FETCH_TIMEOUT_S = 5.0
_MIN_RSA_BITS = 2048

_log = logging.getLogger(__name__)
# The only algorithm of each type of key. The header of a token cannot choose another one.
_ALGORITHMS = {"EC P-256": "ES256", "OKP Ed25519": "EdDSA", "RSA None": "RS256"}
_PUBLIC_FIELDS = ("kty", "crv", "x", "y", "n", "e", "kid")


class FetchError(Exception):
    """The key set cannot be fetched, or is no key set."""


async def fetch(url: str) -> bytes:
    """Return the body of a URL, without following redirects. Raises FetchError."""
    try:
        async with (
            aiohttp.ClientSession(timeout=ClientTimeout(total=_FETCH_TIMEOUT_S)) as client,
            client.get(url, allow_redirects=False) as response,
        ):
            if response.status != 200:
                raise FetchError(f"the issuer answers status {response.status}")
            body = await response.content.read(MAX_BYTES + 1)
            while len(body) <= MAX_BYTES and (block := await response.content.read(MAX_BYTES)):
                body += block
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise FetchError(f"the issuer cannot be reached: {type(error).__name__}") from None
    if len(body) > MAX_BYTES:
        raise FetchError(f"the key set has more than {MAX_BYTES} bytes")
    return body


def parse_key_set(body: bytes, algorithms: Sequence[str]) -> Mapping[str, jwt.PyJWK]:
    """Return the usable keys of a JWKS document by their ids. Raises FetchError.

    A key without an id, of another type, or for another use than signatures is left out.
    """
    try:
        document: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise FetchError("the key set is not JSON") from None
    entries = cast("dict[str, Any]", document).get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise FetchError("the key set has no list `keys`")
    keys: dict[str, jwt.PyJWK] = {}
    for entry in cast("list[object]", entries):
        if isinstance(entry, dict):
            key = _usable_key(cast("dict[str, Any]", entry), algorithms)
            if key is not None and key.key_id:
                keys[key.key_id] = key
    if not keys:
        raise FetchError("the key set has no usable key")
    return keys


def _usable_key(entry: Mapping[str, Any], algorithms: Sequence[str]) -> jwt.PyJWK | None:
    algorithm = _ALGORITHMS.get(f"{entry.get('kty')} {entry.get('crv')}")  # may be any JSON
    if algorithm is None or algorithm not in algorithms:
        return None
    if entry.get("alg") not in (None, algorithm) or entry.get("use") not in (None, "sig"):
        return None
    if not isinstance(entry.get("kid"), str):
        return None
    public = {name: entry[name] for name in _PUBLIC_FIELDS if name in entry}
    try:
        key = jwt.PyJWK(public, algorithm)
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        return None
    if isinstance(key.key, RSAPublicKey) and key.key.key_size < _MIN_RSA_BITS:
        return None
    return key


class KeySet:
    """The keys of one issuer. For one event loop only.

    A token with an unknown key id causes a fetch, but not more often than `UNKNOWN_INTERVAL_S`.
    """

    def __init__(
        self,
        url: str,
        algorithms: Sequence[str],
        clock: Clock,
        get: Callable[[str], Awaitable[bytes]] = fetch,
    ) -> None:
        self._url = url
        self._algorithms = algorithms
        self._clock = clock
        self._get = get
        self._keys: Mapping[str, jwt.PyJWK] = {}
        self._fetched_s: float | None = None
        self._tried_s: float | None = None
        self._fetching: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def refreshed(self) -> AsyncGenerator[None]:
        """Fetch the keys now and at intervals during the body of the `with`."""
        refreshing = asyncio.create_task(self._refresh())
        try:
            yield
        finally:
            tasks = {refreshing, *([self._fetching] if self._fetching else [])}
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def find(self, key_id: str) -> jwt.PyJWK | None:
        """Return the key with an id; None if the issuer has no such key.

        Raises IssuerUnreachableError if no key of the issuer can be used.
        """
        now_s = self._clock.now().monotonic_s
        if self._keys.get(key_id) is None or self._is_outdated(now_s):
            is_due = self._tried_s is None or now_s - self._tried_s >= UNKNOWN_INTERVAL_S
            if self._fetching or is_due:
                await self._fetch()
        if self._is_outdated(self._clock.now().monotonic_s):
            raise IssuerUnreachableError
        return self._keys.get(key_id)

    def _is_outdated(self, now_s: float) -> bool:
        return self._fetched_s is None or now_s - self._fetched_s > KEEP_S

    async def _refresh(self) -> None:
        while True:
            await self._fetch()
            is_new = self._fetched_s is not None and self._fetched_s == self._tried_s
            await asyncio.sleep(_REFRESH_INTERVAL_S if is_new else UNKNOWN_INTERVAL_S)

    async def _fetch(self) -> None:
        """Fetch the keys. Callers share one fetch, and the end of a caller does not stop it."""
        if self._fetching is None:
            self._fetching = asyncio.create_task(self._fetch_once())
            self._fetching.add_done_callback(self._forget_fetch)
        await asyncio.shield(self._fetching)

    def _forget_fetch(self, _: asyncio.Task[None]) -> None:
        self._fetching = None

    async def _fetch_once(self) -> None:
        tried_s = self._tried_s = self._clock.now().monotonic_s
        try:
            self._keys = parse_key_set(await self._get(self._url), self._algorithms)
        except FetchError as error:
            _log.warning("the old keys of %s stay: %s", self._url, error)
        else:
            self._fetched_s = tried_s
