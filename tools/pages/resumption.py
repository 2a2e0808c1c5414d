"""The section of the protocol page about clients that return to their session."""

from __future__ import annotations

from collections.abc import Iterator

from duplane.edge.session.detachment import KEPT_BYTES, KEPT_S
from duplane.edge.settings import Limits
from duplane.fabric.bounds import MAX_QUEUE_TOKEN_LENGTH
from duplane.scheduler.queue_tokens import TOKEN_S

_LIMITS = Limits()
_SECTION = f"""\
## How a client returns to its session

A session ends with its socket, unless its client asks to be able to return: with `resumable: true`
in `session` of `session.update` (A), in `payload` of `session.init` (B), or in `prepare` (C).
Sessions of other dialects cannot be resumed; in `mode=chat`, D and H the field is refused. For
clients that do not ask, no event changes.

| event | dialect A, B | dialect C | new fields |
| --- | --- | --- | --- |
| the conversation is ready | `session.created` | `prepared` | `resume`: an object with `token` \
and `within_s` (seconds) |
| each event about a unit | | | `unit` (its number), `part` (number of the event, from 0, among \
those of the unit), `next_sample` (the first sample of the input, at 16 kHz from 0, that no unit \
so far has) |
| another socket has the session, and this one closes | `session.replaced` | `replaced` | |
| the edge shuts down: the client should return at another edge in `after_s` seconds, and can stay \
for `within_s` | `session.go_away` | `go_away` | `within_s`, `after_s` |

A client returns with the first event of a new socket, at the same URL: `session.resume` (A, B) or
`resume` (C), before any settings.

| field | |
| --- | --- |
| `token` | the token; it proves that the session is the client's, so it never belongs into a URL |
| `unit`, `part` | the last event that the client has; both are absent if it has none |
| `from_sample` | optional: the first sample of its input that the client can still send |

The answer is `session.resumed` (A, B) or `resumed` (C), perhaps after events of the queue, which
the client ignores. It has `unit` (the last unit that has events), `next_sample` (the client sends
its input again from this sample), `lost_samples` (how many samples before `from_sample` the edge
does not have), `gap_s` (how long there was no socket) and `within_s`. Then come the events that the
client has missed, with `replayed: true`. The edge keeps the events of the last
{KEPT_S:g} s of units, at most {KEPT_BYTES // 2**20} MiB; a gap in `unit` shows that older ones are
missing. The ends of texts (`speech.done`) are such events, too, also at another edge; a text that
was sent after the last complete unit is lost with its edge.

The old socket may still look alive to the edge: the newest socket has the session. A client that
closes its socket with code 1000 does not return, and its session ends. Without a socket, the
session gets no input, so the model waits. After `--hold-s` ({_LIMITS.hold_s:g} s) the session gives
its slot back; the client then waits for a slot when it returns, ahead of clients that came later.
After `--resume-s` ({_LIMITS.resume_s:g} s) the session ends.

A client that does not get its session gets an `error` with one of these codes (in C, the text of
the error begins with the code), and the socket closes with 1008, or with 1013 after `resume_busy`.

| code | |
| --- | --- |
| `resume_refused` | the token is wrong, or belongs to a session of another client or URL; or the \
session was resumed more than 10 times in a minute |
| `resume_expired` | the session has ended |
| `resume_lost` | the session is lost, with its edge and its worker, or there was none |
| `resume_stale` | the client names an event that the session does not have |
| `resume_busy` | the session cannot be had just now, because it changes its place, or because a \
scheduler or worker does not answer: return within seconds, until `within_s` has passed |

A client that waits in the queue gets, once its settings are read, `queue_token` in the events of
the queue: its place, sealed by the scheduler. If its edge ends, it shows the newest one as
`queue_token` beside `resumable` in the settings that it sends to another edge, while it waits
there, and gets its place back, with a position that is at most the one that it had. A token is
valid for {TOKEN_S:g} s, until the client gets a slot. A token that is not valid any more has no
effect; one of another mode, or longer than {MAX_QUEUE_TOKEN_LENGTH} bytes, is refused.
"""


def resumption_section() -> Iterator[str]:
    """Yield the section."""
    yield _SECTION
