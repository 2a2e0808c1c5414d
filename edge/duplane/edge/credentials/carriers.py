"""Finds the credential in a request: in a header, a subprotocol, a cookie or the URL. Pure.

Browsers cannot set headers of a WebSocket. So a token can also be one of the subprotocols that a
client offers, or a cookie of the edge's own site. The URL may have only an ephemeral token, because
URLs are stored in logs of proxies and in histories.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import parse_qsl, unquote_plus

MAX_TOKEN_CHARACTERS = 8192
COOKIE = "__Host-duplane"
QUERY_PARAMETER = "token"
EPHEMERAL_PREFIX = "ek_"
SUBPROTOCOL_PREFIXES = ("openai-insecure-api-key.", "map-api-key.", "duplane.bearer.")

_BEARER = re.compile(r"bearer +(?P<token>\S.*)", re.IGNORECASE | re.DOTALL)


class Carrier(StrEnum):
    """The part of a request that has the token."""

    HEADER = "header"
    SUBPROTOCOL = "subprotocol"
    COOKIE = "cookie"
    QUERY = "query"


@dataclass(frozen=True, slots=True)
class Presented:
    """The token of a request. It may be anything that a client sends, up to a length."""

    token: str = field(repr=False)
    carrier: Carrier


def presented_token(headers: Iterable[tuple[str, str]], path: str) -> Presented | None:
    """Return the token of a request with these headers and this path with its query.

    The same token may be in several places; the first of `Carrier` counts. Raises ValueError if
    there are two different tokens, or if a place has a token that it may not have.
    """
    found = [*_in_headers(headers), *_in_query(path)]
    if not found:
        return None
    if len({each.token for each in found}) > 1:
        raise ValueError("the request has two different credentials; send one")
    first = min(found, key=lambda each: list(Carrier).index(each.carrier))
    if len(first.token) > MAX_TOKEN_CHARACTERS:
        raise ValueError(f"the credential is longer than {MAX_TOKEN_CHARACTERS} characters")
    return first


def bearer_token(headers: Iterable[tuple[str, str]]) -> str | None:
    """Return the token of the header `Authorization`. None without one, or with several."""
    found = [each.token for each in _in_headers(headers) if each.carrier is Carrier.HEADER]
    return found[0] if len(found) == 1 else None


def without_token(path: str) -> str:
    """Return a path with its query, without a token in the query.

    The rest of the query stays as it is. Only this path may be logged, recorded or traced.
    """
    plain, mark, query = path.partition("?")
    if not mark:
        return path
    kept = [
        part for part in query.split("&") if unquote_plus(part.partition("=")[0]) != QUERY_PARAMETER
    ]
    return f"{plain}?{'&'.join(kept)}" if kept else plain


def _in_headers(headers: Iterable[tuple[str, str]]) -> Iterator[Presented]:
    for name, value in headers:
        match name.lower():
            case "authorization":
                if bearer := _BEARER.fullmatch(value.strip()):
                    yield Presented(bearer["token"], Carrier.HEADER)
            case "sec-websocket-protocol":
                for token in _in_subprotocols(value.split(",")):
                    yield Presented(token, Carrier.SUBPROTOCOL)
            case "cookie":
                for part in value.split(";"):
                    cookie, is_value, token = part.strip().partition("=")
                    if cookie == COOKIE and is_value:
                        yield Presented(token.strip('"'), Carrier.COOKIE)
            case _:
                pass


def _in_subprotocols(offered: Sequence[str]) -> Iterator[str]:
    for name in offered:
        for prefix in SUBPROTOCOL_PREFIXES:
            if name.strip().startswith(prefix):
                yield name.strip().removeprefix(prefix)


def _in_query(path: str) -> Iterator[Presented]:
    for name, token in parse_qsl(path.partition("?")[2], keep_blank_values=True):
        if name != QUERY_PARAMETER:
            continue
        if not token.startswith(EPHEMERAL_PREFIX):
            raise ValueError("the URL may have only an ephemeral token (ek_...)")
        yield Presented(token, Carrier.QUERY)
