"""`duplane bench codec`: the edge's cost of JSON and base64 for one unit, and of base64 alone.

Then the cost of the messages between a worker and its engine process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import orjson
import pybase64

from duplane.edge.clock import Moment
from duplane.edge.dialects.a import DialectA
from duplane.edge.dialects.actions import NO_TAG, NOTHING_DROPPED, Append
from duplane.edge.dialects.b import DialectB
from duplane.edge.dialects.dialect import Phase
from duplane.edge.dialects.duplex import DuplexDialect
from duplane.edge.dialects.e import DialectE
from duplane.edge.dialects.l import DialectL
from duplane.edge.identity import Identity
from duplane.edge.modes import MODES
from duplane.edge.payload.fields import Fields, parse
from duplane.edge.payload.sound_format import Encoding, SoundFormat
from duplane.edge.settings import Limits
from duplane.fabric.audio import INPUT_RATE_HERTZ, OUTPUT_RATE_HERTZ, pcm_from_samples
from duplane.fabric.resampler import Resampler
from duplane.fabric.v1 import session_pb2
from duplane.tools.bench.engine_frames import bench_engine_frames
from duplane.tools.bench.report import show

_ROUNDS = 7
_REPEATS = 300


def _best_us(work: Callable[[], object]) -> float:
    """Return the mean time of a call in the fastest repetition: other processes only add time."""
    best = float("inf")
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        for _ in range(_REPEATS):
            work()
        best = min(best, (time.perf_counter() - begin) / _REPEATS)
    return best * 1e6


def _sound(rate_hertz: int) -> bytes:
    samples = np.random.default_rng(0).normal(0, 0.1, rate_hertz).astype(np.float32)
    return pcm_from_samples(samples)


def _active(dialect_type: type[DuplexDialect], first: dict[str, object]) -> DuplexDialect:
    dialect = dialect_type(Identity("sess_bench", "rt_0"), Limits(), MODES["audio"])
    dialect.accept(dialect.decode(Fields(first)))
    dialect.opened(session_pb2.Opened(), Moment(0.0, 0))
    return dialect


def _up_us(dialect: DuplexDialect, message: bytes) -> float:
    def receive() -> None:
        action = dialect.decode(parse(message))
        if not isinstance(action, Append):
            raise AssertionError("the dialect did not accept the audio")

    return _best_us(receive)


def _down_us(dialect: DuplexDialect, audio: bytes) -> float:
    delta = session_pb2.Delta(speech=session_pb2.Speech(text="Hello there", audio=audio))
    return _best_us(lambda: dialect.delta(delta, NO_TAG, NOTHING_DROPPED, Moment(0.0, 0)))


def _append(kind: str, sound: bytes) -> bytes:
    return orjson.dumps({"type": kind, "audio": pybase64.b64encode_as_string(sound)})


def bench_codec() -> None:
    """Measure and print."""
    up, down = _sound(INPUT_RATE_HERTZ), _sound(OUTPUT_RATE_HERTZ)
    encoded = pybase64.b64encode_as_string(up)
    a = _active(DialectA, {"type": "session.update", "session": {"instructions": "Hi."}})
    b = _active(DialectB, {"type": "session.init", "payload": {}})
    message_a = _append("input_audio_buffer.append", up)
    message_b = orjson.dumps({"type": "input.append", "input": {"audio": encoded}})
    down_int16 = SoundFormat(Encoding.INT16, OUTPUT_RATE_HERTZ).encode(down)
    message_e = _append("input_audio_buffer.append", down_int16)
    message_l = _append("session.input_audio.append", down_int16)
    e = DialectE(Identity("sess_bench", "rt_0"), Limits(), MODES["audio"])
    e.phase = Phase.ACTIVE
    live = _active(DialectL, {"type": "session.start", "session": {"model": "any"}})
    resampler = Resampler(OUTPUT_RATE_HERTZ, INPUT_RATE_HERTZ, is_prompt=True)
    floor_up = _best_us(lambda: pybase64.b64decode(encoded, validate=True))
    floor_down = _best_us(lambda: pybase64.b64encode(down))
    rows: Sequence[tuple[str, float, float]] = (
        ("dialect A", _up_us(a, message_a), _down_us(a, down)),
        ("dialect B", _up_us(b, message_b), _down_us(b, down)),
        ("dialect E", _up_us(e, message_e), _down_us(e, down)),
        ("dialect L", _up_us(live, message_l), _down_us(live, down)),
        ("E, L: 24 to 16 kHz", _best_us(lambda: resampler.add(down)), 0.0),
        ("floor: base64 alone", floor_up, floor_down),
    )
    show(
        f"one unit through the dialects, us of one core ({len(message_a) / 1e3:.0f} KB up,"
        f" {len(pybase64.b64encode(down)) / 1e3:.0f} KB down)",
        ("", "up", "down", "both"),
        [(name, f"{u:.1f}", f"{d:.1f}", f"{u + d:.1f}") for name, u, d in rows],
    )
    bench_engine_frames(_best_us)
