"""Invalid bytes for sockets: bad frames, bad handshakes, bad HTTP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

import orjson
from fuzz import values
from support.edge.raw_client import BINARY, CLOSE, CONTINUATION, PING, PONG, TEXT
from support.edge.raw_client import frame as client_frame

Pieces = list[bytes]  # byte strings to write one by one, with a pause between them

frame = partial(client_frame, mask=b"\x01\x02\x03\x04")


_UPDATE = b'{"type":"session.update","session":{"instructions":"x"}}'
_UNKNOWN = b'{"type":"unheard.of"}'


def _opcode(rng: Random) -> Pieces:
    return [frame(rng.choice([3, 4, 5, 6, 7, 11, 12, 13, 14, 15]), b"{}")]


def _compressed(rng: Random) -> Pieces:
    return [frame(rng.choice([TEXT, BINARY, PING]), rng.randbytes(30), reserved=rng.randint(1, 7))]


def _unmasked(rng: Random) -> Pieces:
    return [frame(TEXT, _UPDATE, mask=None)]


def _wrongly_masked(rng: Random) -> Pieces:
    whole = bytearray(frame(TEXT, _UPDATE))
    whole[rng.randint(2, 5)] ^= rng.randint(1, 255)
    return [bytes(whole)]


def _stray_continuation(rng: Random) -> Pieces:
    return [frame(CONTINUATION, _UNKNOWN, is_last=rng.random() < 0.5)]


def _text_in_text(rng: Random) -> Pieces:
    return [frame(TEXT, _UPDATE[:9], is_last=False), frame(rng.choice([TEXT, BINARY]), _UPDATE[9:])]


def _continuation_flood(rng: Random) -> Pieces:
    """Return a legal message in up to thousands of fragments, most of them empty."""
    middle = [frame(CONTINUATION, is_last=False)] * rng.choice([10, 3000])
    last = frame(CONTINUATION, _UNKNOWN[5:])
    return [b"".join([frame(TEXT, _UNKNOWN[:5], is_last=False), *middle, last])]


def _endless_message(rng: Random) -> Pieces:
    piece = frame(CONTINUATION, bytes(32_000), is_last=False)
    return [frame(TEXT, b"{", is_last=False), *[piece] * 12]


def _bad_control(rng: Random) -> Pieces:
    opcode = rng.choice([CLOSE, PING, PONG])
    return [frame(opcode, b"x" * rng.choice([1, 126, 70_000]), is_last=rng.random() < 0.5)]


def _bad_close(rng: Random) -> Pieces:
    code = rng.choice([0, 999, 1004, 1005, 1006, 1015, 2999, 5000, 65_535, 1000, 3000])
    reason = rng.choice([b"", b"\xff\xfe", b"x" * 123])
    return [frame(CLOSE, code.to_bytes(2) + reason), frame(TEXT, _UPDATE)]


def _huge_length(rng: Random) -> Pieces:
    length = rng.choice([2**63, 2**64 - 1, 2**62, 10**9, 400_001])
    return [frame(rng.choice([TEXT, BINARY, PING]), b"{" * 40, told_length=length)]


def _half_frame(rng: Random) -> Pieces:
    whole = frame(TEXT, _UPDATE)
    return [whole[: rng.randrange(1, len(whole))]]


def _ping_flood(rng: Random) -> Pieces:
    return [frame(rng.choice([PING, PONG]), rng.randbytes(rng.randint(0, 125))) * 400]


def _bad_text(rng: Random) -> Pieces:
    text = b'{"type":"' + rng.choice([b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90"]) + b'"}'
    at = rng.randint(9, 11)
    return [frame(TEXT, text[:at], is_last=False), frame(PING), frame(CONTINUATION, text[at:])]


def _many_at_once(rng: Random) -> Pieces:
    return [frame(TEXT, rng.choice([_UNKNOWN, b"{}", b'{"type":7}'])) * 100]


def _in_slices(rng: Random) -> Pieces:
    whole = frame(TEXT, _UPDATE) + frame(PING, b"x") + frame(TEXT, _UNKNOWN)
    return [whole[at : at + 7] for at in range(0, len(whole), 7)]


def _noise(rng: Random) -> Pieces:
    return [rng.randbytes(rng.randint(1, 300)) for _ in range(rng.randint(1, 4))]


FRAMES: tuple[Callable[[Random], Pieces], ...] = (
    *(_opcode, _compressed, _unmasked, _wrongly_masked, _stray_continuation, _text_in_text),
    *(_continuation_flood, _endless_message, _bad_control, _bad_close, _huge_length),
    *(_half_frame, _ping_flood, _bad_text, _many_at_once, _in_slices, _noise),
)


# --- requests ---

KEY = b"dGhlIHNhbXBsZSBub25jZQ=="
PATHS = (
    *(
        "/v1/realtime?mode=audio",
        "/v1/realtime",
        "/ws/duplex/a",
        "/ws/half_duplex/a",
        "/ws/chat",
        "/",
        "/nowhere",
    ),
    *("/health", "/ready", "/status", "/workers", "/cache", "/sessions", "/api/queue"),
    *("/api/queue/q_1", "/api/queue/%00", "/api/queue/..%2f..", "/api/queue/" + "x" * 3000),
    *("/api/config/eta", "/api/apps", "/api/presets", "/api/presets/../x/audio"),
    *(
        "/api/sessions",
        "/api/sessions/..%2f..%2fetc/recording",
        "/api/sessions/%00",
        "/api/default_ref_audio",
    ),
    *("/ws/duplex/", "/ws/duplex/a/b", "/ws/duplex/%ff%fe", "//", "/%", "*", "health", ""),
    *("http://elsewhere/health", "/v1/realtime?mode=%ff", "/v1/realtime?" + "mode=audio&" * 300),
    *("/v1/realtime?recording=on&mode=chat", "/health?" + "a" * 20_000, "/hea\x00lth", "/é"),
)
_METHODS = (
    *("GET", "GET", "GET", "GET", "POST", "PUT", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"),
    *("CONNECT", "TRACE", "get", "G\x00T", "FOO", "", "PRI"),
)
_VERSIONS = ("HTTP/1.1",) * 6 + ("HTTP/1.0", "HTTP/2.0", "HTTP/9.9", "", "HTP/1.1", "HTTP/1.1 x")
_HEADERS = (
    *("Content-Length: -1", "Content-Length: 1e3", "Content-Length: 99999999999999999999"),
    *(
        "Content-Length: 5\r\nContent-Length: 6",
        "Transfer-Encoding: chunked",
        "Expect: 100-continue",
    ),
    *("Transfer-Encoding: gzip, chunked", "Connection: close", "Connection: keep-alive", "Host: "),
    *("Host: a\r\nHost: b", "X-Forwarded-For: " + "1.2.3.4, " * 500, "X-Forwarded-For: é, ::1"),
    *("Authorization: Bearer é", "Cookie: " + "a=b; " * 300, "Range: bytes=9-1", "X: \x00", ": x"),
    *(" folded", "X\t: y", "Accept-Encoding: *;q=9", "Content-Encoding: gzip", "Upgrade: h2c"),
    *("Content-Type: application/json; charset=none", "X-Client-Id: \xff\xfe"),
)


def head(method: str, path: str, version: str, lines: list[str], end: str = "\r\n") -> bytes:
    text = end.join([f"{method} {path} {version}", *lines, "", ""])
    return text.encode("latin-1", errors="replace")


def upgrade(rng: Random, path: str, *, is_right: bool) -> bytes:
    """Return a handshake. Unless `is_right`, some of its lines are changed, left out or added."""
    lines = [
        "Host: localhost",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {KEY.decode()}",
    ]
    method, version, end = "GET", "HTTP/1.1", "\r\n"
    for _ in range(0 if is_right else rng.randint(1, 3)):
        at = rng.randrange(len(lines))
        match rng.randrange(7):
            case 0:
                lines[at] = ""
            case 1:
                lines[at] += rng.choice(["x", ",", "\x00", "==", "4", " , websocket", "é"])
            case 2:
                lines.insert(at, rng.choice([lines[at], *_HEADERS]))
            case 3:
                lines.insert(at, "Sec-WebSocket-Extensions: " + rng.choice(_EXTENSIONS))
            case 4:
                lines += [f"X-{number}: {number}" for number in range(rng.choice((5, 200)))]
            case 5:
                method, version = rng.choice(_METHODS), rng.choice(_VERSIONS)
            case _:
                end = rng.choice(["\n", "\r\n", "\r"])
    return head(method, path, version, [line for line in lines if line], end)


_EXTENSIONS = (
    *("permessage-deflate", "permessage-deflate; server_max_window_bits=99", ";;;", "x" * 9000),
    "permessage-deflate; client_no_context_takeover=\x00",
)


def request(rng: Random) -> Pieces:
    """Return an HTTP request that may be incomplete or malformed."""
    method, path = rng.choice(_METHODS), rng.choice(PATHS)
    lines = ["Host: localhost"] if rng.random() < 0.8 else []
    lines += rng.choices(_HEADERS, k=rng.choice((0, 0, 1, 2)))
    body = b""
    if method in ("PUT", "POST", "PATCH") or rng.random() < 0.2:
        body = _body(rng)
        if rng.random() < 0.8:
            lines.append(f"Content-Length: {len(body) + rng.choice((0, 0, 0, -1, 5))}")
    whole = head(method, path, rng.choice(_VERSIONS), lines) + body
    match rng.randrange(8):
        case 0:
            return [whole[: rng.randrange(len(whole))]]
        case 1:
            return [whole * 3]
        case 2:
            return [whole[at : at + 40] for at in range(0, min(len(whole), 2000), 40)]
        case 3:
            return [rng.choice([b"\x16\x03\x01\x02\x00\x01", b"\r\n" * 50, b"GET"]) + whole]
        case _:
            return [whole]


def _body(rng: Random) -> bytes:
    choice = rng.randrange(4)
    if choice == 0:
        return rng.randbytes(rng.randint(0, 200))
    if choice == 1:
        return rng.choice(
            [b"5\r\nhello\r\n0\r\n\r\n", b"zz\r\n", b"-1\r\n", b"fffffffff\r\n", b"5"]
        )
    if choice == 2:
        return b"x" * 70_000
    estimates = {"eta_chat_s": values.anything(rng), "ema_alpha": values.anything(rng)}
    return orjson.dumps(values.expanded(rng.choice([estimates, {"config": estimates}])))
