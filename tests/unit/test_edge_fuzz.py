"""Whatever clients and workers say, in whatever order: no exception, only legal answers."""

from __future__ import annotations

from typing import Any

import orjson
import pybase64
from edge_transcripts import jpeg, nan, pcm, png, wav
from hypothesis import example, given, settings
from hypothesis import strategies as st

from duplane.edge.chat_session import ChatSession
from duplane.edge.dialects.b_chat import DialectBChat
from duplane.edge.dialects.c import DialectC
from duplane.edge.dialects.chat import ChatDialect
from duplane.edge.dialects.d import DialectD
from duplane.edge.dialects.dialect import Dialect, Identity, Moment, Phase
from duplane.edge.faults import ErrorCode
from duplane.edge.modes import CHAT_MODE, MODES
from duplane.edge.session import Session
from duplane.edge.settings import Limits
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import lease_pb2, session_pb2

LEGAL = {
    "A": {"session.created", "response.listen", "response.output_audio.delta"},
    "B": {"session.created", "response.output.delta", "response.done"},
    "D": {"queued", "queue_update", "queue_done", "prefill_done", "chunk", "done", "error"},
    "C": {
        *("queued", "queue_update", "queue_done", "prepared", "result", "error"),
        *("paused", "resumed", "interrupted", "stopped", "timeout"),
    },
}
SHARED = {
    "session.queued",
    "session.queue_update",
    "session.queue_done",
    "session.closed",
    "error",
}
NOW = Moment(1000.0, 1_714_200_000_000_000_000)


def encoded(audio: bytes) -> str:
    return pybase64.b64encode(audio).decode()


AUDIO = [encoded(pcm(n)) for n in (1, 3200, 16_000, 40_000)]
AUDIO += [encoded(wav(1600)), encoded(nan(1600)), encoded(wav(1600)[:-3]), encoded(b"abc")]
PICTURES = [encoded(picture) for picture in (jpeg(2, 2), png(2, 2), jpeg(2, 2)[:9])]
EXAMPLES: list[dict[str, Any]] = [
    {
        "type": "session.update",
        "session": {
            "instructions": "x",
            "ref_audio": AUDIO[4],
            "tts_ref_audio": AUDIO[0],
            "voice_config": {"temperature": 0.7, "top_k": 20, "decode_mode": "greedy"},
        },
    },
    {"type": "session.update", "session": {"instructions": "x"}},
    {"type": "input_audio_buffer.append", "audio": AUDIO[2], "force_listen": True},
    {"type": "input_audio_buffer.append", "audio": AUDIO[2], "video_frames": PICTURES[:2]},
    {"type": "session.close", "reason": "user_stop"},
    {
        "type": "session.init",
        "payload": {
            "system_prompt": "x",
            "config": {"length_penalty": 1.1},
            "voice": {"ref_audio_base64": AUDIO[4]},
            "defaults": {"seed": 1},
        },
    },
    {"type": "session.init", "payload": {}},
    {
        "type": "input.append",
        "input": {"audio": AUDIO[2], "input_id": "i", "hints": {"force_listen": True}},
    },
    {"type": "input.append", "input": {"audio_data": {"data": AUDIO[2]}}},
    {
        "type": "input.append",
        "input": {"frames": [{"data": PICTURES[0]}], "max_slice_nums": [1, 2]},
    },
]
C_EXAMPLES: list[dict[str, Any]] = [
    {"type": "prepare", "system_prompt": "x", "config": {"top_k": 3}, "max_slice_nums": 2},
    {"type": "prepare"},
    {"type": "audio_chunk", "audio_base64": AUDIO[2], "frame_base64_list": PICTURES[:1]},
    {"type": "audio_chunk", "audio_base64": AUDIO[3], "force_listen": True},
    {"type": "audio_chunk", "audio_base64": AUDIO[1]},
    {"type": "pause", "timeout": 5},
    *({"type": kind} for kind in ("pause", "resume", "interrupt", "stop", "client_diagnostic")),
]
INIT = EXAMPLES.index({"type": "session.init", "payload": {}})
KEYS = sorted(
    {
        key
        for event in EXAMPLES + C_EXAMPLES
        for part in (event, *(value for value in event.values() if isinstance(value, dict)))
        for key in part
    }
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(AUDIO + PICTURES)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=6,
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """An example event with some of its parts replaced, removed or added, at any depth."""
    return draw(mutation(draw(st.sampled_from(EXAMPLES + C_EXAMPLES))))


@st.composite
def mutation(draw: st.DrawFn, example: dict[str, Any]) -> bytes:
    """The same of one example."""
    event = orjson.loads(orjson.dumps(example))
    for _ in range(draw(st.integers(0, 2))):
        place: dict[str, Any] = event
        while nested := [value for value in place.values() if isinstance(value, dict)]:
            if draw(st.booleans()):
                break
            place = draw(st.sampled_from(nested))
        key = draw(st.sampled_from([*place, "extra"]))
        if draw(st.booleans()):
            place[key] = draw(VALUES)
        else:
            place.pop(key, None)
    return orjson.dumps(event)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """An example event with some bytes cut out or changed."""
    message = bytearray(orjson.dumps(draw(st.sampled_from(EXAMPLES + C_EXAMPLES))))
    start = draw(st.integers(0, min(120, len(message) - 1)))
    message[start : start + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(message)


def responses() -> st.SearchStrategy[session_pb2.ConverseResponse]:
    delta = st.builds(
        session_pb2.Delta,
        sequence=st.integers(0, 9),
        speech=st.none() | st.builds(session_pb2.Speech, text=st.text(max_size=3)),
        end_of_turn=st.booleans(),
        dropped_unit_count=st.integers(0, 3),
    )
    failed = st.builds(session_pb2.Failed, sequence=st.integers(0, 9), field=st.text(max_size=3))
    closed = st.builds(session_pb2.Closed, reason=st.sampled_from(session_pb2.CloseReason.values()))
    opened = st.builds(session_pb2.Opened, prompt_token_count=st.integers(0, 9))
    return st.one_of(
        st.builds(session_pb2.ConverseResponse, opened=opened),
        st.builds(session_pb2.ConverseResponse, delta=delta),
        st.builds(session_pb2.ConverseResponse, failed=failed),
        st.builds(session_pb2.ConverseResponse, closed=closed),
    )


STEPS = st.one_of(
    mutated(),
    damaged(),
    st.binary(max_size=12),
    st.sampled_from(EXAMPLES + C_EXAMPLES).map(orjson.dumps),
    responses(),
    st.just(lease_pb2.Queued(ticket_id="t", position=1)),
    st.sampled_from(list(Reason)),
    st.floats(0, 200),
    st.none(),
)


DIALECTS = st.sampled_from([None, DialectC])


class Run:
    """One session under fire."""

    def __init__(self, mode: str = "video", dialect: type[Dialect] | None = None) -> None:
        self.now = NOW
        limits = Limits(early_unit_count=2, instructions_bytes=64)
        identity = Identity("sess_0", "rt_0")
        self.session: Session = Session(identity, limits, MODES[mode], NOW, dialect)

    def step(self, step: object) -> None:
        was_over, phase = self.session.farewell is not None, self.session.dialect.phase
        events = [orjson.loads(event) for event in self._do(step)]
        name = self.session.dialect.name
        shared = set[str]() if name in "CD" else SHARED
        assert {event["type"] for event in events} <= LEGAL[name] | shared
        assert not (was_over and events), "something was said after the end"
        errors = [event["error"] for event in events if event["type"] == "error"]
        if name in "CD":
            assert all(isinstance(error, str) and error for error in errors)
        else:
            assert {error["code"] for error in errors} <= set(ErrorCode)
        is_over = self.session.farewell is not None
        if isinstance(step, bytes) and events and events[0]["type"] == "error" and not is_over:
            assert len(events) == 1
            assert self.session.dialect.phase is phase
        if self.session.farewell:
            assert self.session.dialect.phase is Phase.CLOSED
            assert self.session.next_request() is None

    def _do(self, step: object) -> list[bytes]:
        session = self.session
        match step:
            case bytes():
                return session.receive(step, self.now)
            case session_pb2.ConverseResponse():
                # A worker speaks only when it was asked, and opens only once.
                is_open = session.dialect.phase in (Phase.ACTIVE, Phase.PAUSED)
                is_opening = session.dialect.phase is Phase.OPENING and session.has_slot
                legal = is_opening if step.WhichOneof("message") == "opened" else is_open
                return session.answered(step, self.now) if legal else []
            case lease_pb2.Queued():
                return session.queued(step, self.now) if not session.has_slot else []
            case Reason():
                return session.lost(FabricError(step, "x", field="open.seed"), self.now)
            case float():
                self.now = Moment(self.now.monotonic_s + step, self.now.wall_ns)
                return session.expire(self.now)
            case _:
                while session.next_request():
                    pass
                return [] if session.has_slot else session.granted(60, self.now)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=12), st.sampled_from(["audio", "video"]), DIALECTS)
def test_anything_in_any_order_is_answered_legally(
    steps: list[object], mode: str, dialect: type[Dialect] | None
) -> None:
    run = Run(mode, dialect)
    for step in steps:
        run.step(step)


@settings(max_examples=400, deadline=None)
@given(mutated() | damaged(), st.sampled_from([[], [1], [1, None], [INIT], [INIT, None]]))
@example(b"[" * 1000 + b"]" * 1000, [])
@example(b'{"type":' * 1000 + b"1" + b"}" * 1000, [])
@example(b'{"a":' * 100_000, [])
@example(b'{"type":"session.update","session":' + b"[" * 900 + b"]" * 900 + b"}", [])
@example(b'{"type":"session.init","payload":{"seed":' + b"9" * 5000 + b"}}", [])
@example(b'{"type":"session.init","payload":{"seed":1e400}}', [])
@example(b'{"type":"session.init","type":"session.update"}', [])
@example(b'{"type":"session.update","session":{"instructions":"\\ud800"}}', [])
@example(b"\xff\xfe", [])
@example(b"", [])
@example(b"null", [])
def test_one_bad_event_changes_nothing(message: bytes, before: list[int | None]) -> None:
    run = Run()
    for step in before:
        run.step(None if step is None else orjson.dumps(EXAMPLES[step]))
    run.step(message)


CHAT_EXAMPLES: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "system", "content": "x"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "x"},
                    {"type": "image", "data": PICTURES[0]},
                    {"type": "audio", "data": AUDIO[1], "sample_rate": 8000},
                    {"type": "video", "data": "AAAA", "stack_frames": 1},
                ],
            },
        ],
        "streaming": True,
        "generation": {"max_new_tokens": 5, "temperature": 0.5, "do_sample": False},
        "tts": {"enabled": True, "ref_audio_data": AUDIO[1]},
        "image": {"max_slice_nums": None},
        "omni_mode": False,
    },
    {"messages": [{"role": "user", "content": "x"}], "streaming": False},
]
CHAT_EXAMPLES += [
    *({"type": "input.append", "input": example} for example in CHAT_EXAMPLES),
    {"type": "session.init", "payload": {}},
    {"type": "session.close"},
]
CHAT_ANSWERS = [
    session_pb2.ChatResponse(prefilled=session_pb2.Prefilled(prompt_token_count=1)),
    session_pb2.ChatResponse(delta=session_pb2.ChatDelta(text="x", audio=bytes(8))),
    session_pb2.ChatResponse(done=session_pb2.Done()),
]
CHAT_STEPS = st.one_of(
    st.sampled_from(CHAT_EXAMPLES).flatmap(mutation),
    st.sampled_from(CHAT_EXAMPLES).map(orjson.dumps),
    st.binary(max_size=12),
    st.sampled_from(CHAT_ANSWERS),
    st.just(lease_pb2.Queued(ticket_id="t", position=1)),
    st.sampled_from(list(Reason)),
    st.floats(0, 50),
    st.none(),
)


class ChatRun(Run):
    """One chat under fire."""

    def __init__(self, dialect: type[ChatDialect]) -> None:
        super().__init__()
        self.session = self.chat = ChatSession(
            Identity("sess_0", "rt_0"), Limits(pending_turn_count=2), CHAT_MODE, NOW, dialect
        )

    def _do(self, step: object) -> list[bytes]:
        match step:
            case session_pb2.ChatResponse():
                told = self.chat.told(step, self.now) if self.chat.is_running else []
            case lease_pb2.Queued():
                told = self.chat.queued(step, self.now) if self.chat.wants_slot else []
            case Reason():
                error = FabricError(step, "x", field="messages")
                told = self.chat.lost(error, self.now) if self.is_asked else []
            case None:
                told = self.chat.granted(3.0, self.now) if self.chat.wants_slot else []
            case _:
                told = super()._do(step)
        assert not (self.chat.wants_slot and self.chat.has_slot)
        if (turn := self.chat.next_turn(self.now)) is not None:
            assert turn.messages
            turn.SerializeToString()
        return told

    @property
    def is_asked(self) -> bool:
        return self.chat.wants_slot or self.chat.is_running


@settings(max_examples=300, deadline=None)
@given(st.lists(CHAT_STEPS, max_size=14), st.sampled_from([DialectBChat, DialectD]))
def test_anything_in_any_order_is_answered_legally_in_a_chat(
    steps: list[object], dialect: type[ChatDialect]
) -> None:
    run = ChatRun(dialect)
    for step in steps:
        run.step(step)
    if run.session.farewell is None:  # nothing is waited for without a bound
        assert run.session.deadline < float("inf")


C_OPENED = session_pb2.ConverseResponse(opened=session_pb2.Opened())
C_BEFORE = [None, orjson.dumps({"type": "prepare"}), C_OPENED]


@settings(max_examples=300, deadline=None)
@given(mutated() | damaged(), st.integers(0, 3), st.booleans())
def test_one_bad_event_of_c_changes_nothing(message: bytes, begun: int, is_paused: bool) -> None:
    run = Run(dialect=DialectC)
    for step in [*C_BEFORE[:begun], *([b'{"type":"pause"}'] if is_paused else [])]:
        run.step(step)
    run.step(message)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_wav_files_are_decoded_or_refused(data: st.DataObject) -> None:
    file = bytearray(wav(400))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(12, 60))
        file[at : at + 4] = data.draw(st.binary(min_size=1, max_size=4))
    run = Run()
    settings_event = {"type": "session.update", "session": {"instructions": "x"}}
    run.step(orjson.dumps(settings_event))
    append = {"type": "input_audio_buffer.append", "audio": encoded(bytes(file))}
    run.step(orjson.dumps(append))
    assert run.session.farewell is None
