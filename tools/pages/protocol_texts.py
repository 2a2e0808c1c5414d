"""The texts of the page of the client protocols."""

from __future__ import annotations

from collections.abc import Mapping

from duplane.edge.client_errors import ErrorCode
from duplane.edge.close import CloseReason
from duplane.edge.dialects.dialect import Phase

HEAD = """\
# The WebSocket protocols of the edge

`make protocols` generates this page from the tables of the edge and from `tests/specifications`,
which lists each event and field; a test keeps it up to date. The examples are events that the
dialects rendered, with long texts cut (`…`). The protocols A to D and H are those of
[MiniCPM-o-Demo](https://github.com/OpenBMB/MiniCPM-o-Demo) and its documentation; E and L are
OpenAI's Realtime and Live protocols, as the types of
[openai-python](https://github.com/openai/openai-python) describe them.
The transcripts in `tests/transcripts` show all events and fields. The [client
libraries](../clients/README.md) speak A and B, as in these examples of one page each:
[realtime_client.py](../tools/examples/realtime_client.py) in Python (dialect A) and
[realtime_client.mjs](../tools/examples/realtime_client.mjs) in JavaScript (dialect B).
[`docs/clients.md`](../docs/clients.md) points clients of other projects to an edge (dialects E and
L). Chat completions over HTTP, which recordings and metrics call dialect O, have
[a page of their own](../docs/completions.md).

Every event is one WebSocket text message: a JSON object in UTF-8. Clients of A to D and H send
audio as base64 of float32 samples (little endian, mono, 16 kHz) or of a WAV file, and get float32
at 24 kHz, whatever the rates of the model are. Clients of E and L choose int16 samples or G.711. A
client may send audio in pieces of any length. The model chooses the duration of a unit; a unit of
MiniCPM-o is one second (16000 samples), and every unit of its speech has at least one second of
audio, except the last unit of a turn, which may be shorter or empty. Pictures are JPEG, PNG,
WEBP, GIF (the first frame) or BMP files. `null` counts as absent.

In a chat the edge sends the text of an answer in parts of up to ten tokens, not token by token,
because the device decodes ten tokens of each conversation in one step. A character that consists of
several tokens is sent when all of them are decoded.

The edge answers an invalid event with one `error` that names the invalid field; the session does
not change. In D, which has only one event, the session ends. After a frame that is not JSON text
the edge closes the connection with code 1003, and after a text frame that is not UTF-8 with 1007.

A session is in one of these phases:
"""

REALTIME_RULE = """\
`/v1/realtime` belongs to A, B and E. The upgrade decides; the first rule that fits counts:

1. The query has `mode`, or the client offers `map.realtime` or `duplane.realtime`: A or B.
2. The client offers the subprotocol `realtime`: E.
3. The query has `model`, and there is a header `Authorization: Bearer …`: E.
4. Otherwise: A or B.

So a client of A or B with a bearer token and `model` also sends `mode`. `call_id` (calls by WebRTC
or SIP) and `intent=transcription` in the query of E are refused with status 400.
"""
SUBPROTOCOL_RULE = """\
Of the subprotocols that a client offers, the edge selects the first one of {}; on the URLs of E and
L it selects only {}. A value that contains a key, such as `map-api-key.KEY`, `duplane.bearer.KEY`
or `openai-insecure-api-key.KEY`, is never selected, logged or recorded. Without a selected name the
session runs too, but browsers close it: a page that offers a key also offers `map.realtime`, or
`realtime` in E and L.
[`docs/credentials.md`](../docs/credentials.md) says which edges demand a key.
"""
PHASES: Mapping[Phase, str] = {
    Phase.START: "the client has sent no settings; it may still be waiting for a slot",
    Phase.OPENING: "the edge has accepted the settings; the conversation is not ready yet",
    Phase.ACTIVE: "the session accepts units or turns",
    Phase.PAUSED: "the client has paused the session",
    Phase.CLOSED: "the session has ended; the edge answers nothing",
}
_AT_UPGRADE = (
    "An edge that shuts down or has too many sessions answers the upgrade with status 503 and"
    " `Retry-After`."
)
NOTES: Mapping[str, str] = {
    "A": "The edge cuts audio of any length into units of the model; each unit has one reply.",
    "B": "The edge sends the speech of a unit as `text`, then `audio`; a `listen` with the turn's"
    " id ends the turn. If an append completes no unit, the edge answers immediately: with"
    " `listen`, or inside a turn with an empty `text`. When a client closes the session,"
    " `session.closed` repeats the client's reason, cut to 256 bytes.",
    "B chat": "Each turn acquires a slot and may wait for it; `response.done` ends the turn.",
    "C": "The edge answers every accepted `audio_chunk` with one `result` or one `error`, in the"
    " order of the chunks. The text of an `error` is one line.",
    "D": "The client sends one event, which has no type; here it is called `request`. The edge"
    " ignores later messages. An `error` has one line of text, and the session then ends.",
    "E": "A response is one turn of the model; its text and its sound come unit by unit. While"
    " the model listens, no event comes. `session.created` is the first event. A session has"
    " no slot and waits for none before its first sound or `response.create`. The"
    " conversation opens with the first append, after 250 ms without `session.update` and"
    " new items; then the instructions, modalities and voice are fixed, and"
    " `session.updated` shows the old ones. Items before it opens become text in the prompt,"
    " the oldest are left out above `--instructions-bytes`; the model does not read later"
    " ones. At most 256 items are kept, without sound. What the model cannot do is shown as"
    " absent, and is no error: tools and transcripts of the user. With `server_vad` the edge"
    " finds speech in the client's sound (`speech_started`, `speech_stopped`, then the user's"
    " item): speech of the user ends an open response unless `interrupt_response` is false,"
    " and the model must listen to the next unit. The model decides when it answers, so"
    " `create_response` is always true. After `response.cancel` the model must listen, and"
    " the rest of its turn is dropped. A unit that fails counts as one in which the model listened."
    " `response.create` without an open response is answered by an empty response. At the"
    " time limit of 60 minutes the close code is 1001. The context has a window. The queue"
    " has no events: the sound of a client waits at most `--openai-queue-s`. A move to"
    f" another worker has no event, either. {_AT_UPGRADE}\n\n"
    "Turns of chat: with `turn_detection` null (manual turns, push to talk), the client"
    " appends and commits its sound and asks for each response; so does a client that asks"
    " for a response before its first append, as for a greeting or for texts. Each such"
    " response has a slot of its own, has all events of a response, in any phase, and reads the"
    " instructions and the items: texts,"
    " committed sound, `input_audio`, and pictures as data URIs. `max_output_tokens`,"
    " `conversation` and `input` of `response.create` are for these responses; a response"
    " without a bound has at most 2048 tokens, or 256 before a duplex session."
    " `response.cancel` ends the turn and frees its slot. A worker that is lost before the"
    " first text or sound is replaced; later, or without a slot, the response has the status"
    " `failed`, and the session goes on. If the sound and pictures of all items exceed"
    " `--chat-media-bytes`, the oldest messages are dropped with their answers; if the model"
    " has no room for all messages, the response fails, and the older half is dropped. A commit"
    " holds at most `--chat-audio-s`. Without `turn_detection` null, the first sound begins"
    " a full duplex session; sound during a turn of chat waits for it, and of more than"
    " `--early-unit-count` seconds, the newest. Then `turn_detection` null has no effect any"
    " more.",
    "H": "Half duplex: the client sends its sound all the time, and the edge finds the speech in"
    " it. When the client has been silent for `min_silence_duration_ms`, its speech becomes a turn,"
    " which waits for a slot of kind `chat`, gets the answer of the model, and gives the slot back."
    " Each turn repeats the system message and the conversation so far. The oldest exchanges are"
    " dropped if all sound together would exceed `--chat-media-bytes`, and the older half of the"
    " exchanges if the model has no room for them. While a turn waits or runs, the edge drops the"
    " client's sound. Speech as long as `--chat-audio-s` ends without silence. The edge finds"
    " speech with a detector of its own, or with the model of `--vad-model`. The prompt of a turn"
    " is that of a chat, and not the same as in the half duplex of the reference, which keeps one"
    " context: the system message, the sounds and the texts have equal tokens, but an earlier"
    " answer has only its text, without the tokens that control thoughts and speech, and the user's"
    " last message is ended by `<|im_end|>` twice, as in the reference's chats. The reference also"
    " makes a first utterance of less than a unit longer.",
    "L": "Sound flows in both directions all the time, and there are no turns: the edge answers"
    " each unit with its sound, or with silence if the model listens. The sound of all answers is"
    " one stream without gaps; `start_ms` and `end_ms` are times in this stream. Each event of the"
    " client may have an `event_id`, which the answer repeats as `client_event_id`. While the"
    " client is muted, the model hears silence. The context has a window: the oldest units are"
    " dropped before it is full. The queue has no events: a client waits for `session.started`"
    f" at most `--openai-queue-s`. A move to another worker has no event, either. {_AT_UPGRADE}",
}
ENDS: Mapping[CloseReason, str] = {
    CloseReason.CLIENT: "the client asks for it",
    CloseReason.TIMEOUT: "a time limit of the session, or no event for too long",
    CloseReason.CONTEXT_FULL: "the context is full",
    CloseReason.SHUTDOWN: "the edge or the worker shuts down",
    CloseReason.FAILED: "the worker is lost or cannot continue",
    CloseReason.SERVICE_UNAVAILABLE: (
        "no scheduler answers, no worker serves such sessions, or there are too many sessions"
    ),
    CloseReason.MODEL_NOT_SERVED: "several models are served, but not the one asked for",
    CloseReason.QUEUE_FULL: "the queue is full",
    CloseReason.QUOTA: "a quota of the tenant is exhausted",
    CloseReason.WORKER_BUSY: (
        "no slot becomes free in time, or an operator removes the ticket from the queue"
    ),
    CloseReason.WORKER_CONNECT_FAILED: "the edge cannot reach the granted worker",
    CloseReason.MODE_REFUSED: "the mode is unknown",
    CloseReason.REQUEST_REFUSED: "the request is invalid",
    CloseReason.ANSWERED: "the request is answered",
    CloseReason.UNREADABLE: "the client sends a frame that is not JSON text",
    CloseReason.CREDENTIAL_ENDED: "the credential of the client is revoked, disabled or expired",
    CloseReason.TOO_BIG: "the client sends a message above the size limit",
    CloseReason.TOO_SLOW: "the client does not read",
    CloseReason.GONE: "the connection of the client is lost",
}
CODES: Mapping[ErrorCode, str] = {
    ErrorCode.NOT_READY: "the session is not ready for this event yet",
    ErrorCode.UNKNOWN_EVENT: "the type is unknown, or allowed only once",
    ErrorCode.MISSING_FIELD: "a required field is absent",
    ErrorCode.INVALID_PAYLOAD: "a value is invalid",
    ErrorCode.SERVICE_UNAVAILABLE: "the fabric cannot serve the session now",
    ErrorCode.QUEUE_FULL: "the queue is full",
    ErrorCode.WORKER_BUSY: "no slot became free in time",
    ErrorCode.WORKER_CONNECT_FAILED: "the edge cannot reach the granted worker",
    ErrorCode.UNSUPPORTED: "the event is for an ability that the model does not have",
    ErrorCode.CREDENTIAL_ENDED: "the credential of the client is revoked, disabled or expired",
    ErrorCode.INFERENCE_ERROR: "one unit or turn failed; the next one may succeed",
}
