"""Records sessions without an edge.

`python -m support.edge.recorded_session DIRECTORY` records until it is killed. It prints
`recorded` once three seconds of a session are on disk.
"""

from __future__ import annotations

import itertools
import sys
import threading
from pathlib import Path

import orjson
import pybase64
from support.edge.live_edge import HandSetClock
from support.protocols.transcripts import pcm
from support.time_limits import WITHIN_S

from duplane.edge.recording.recorder import Recorder, Recording
from duplane.edge.recording.settings import RecordingSettings

APPEND = orjson.dumps(
    {"type": "input_audio_buffer.append", "audio": pybase64.b64encode(pcm(16_000)).decode()}
)
SPEECH = orjson.dumps(
    {
        "type": "response.output_audio.delta",
        "text": "so",
        "audio": pybase64.b64encode(pcm(24_000)).decode(),
    }
)


class RecordedSession:
    """A recorder, one session that it records, and a clock that the test sets."""

    def __init__(
        self, settings: RecordingSettings, name: str = "sess_0", mode: str = "audio"
    ) -> None:
        self.clock = HandSetClock()
        self.directory = settings.directory / name
        self.recorder = Recorder(settings, self.clock)
        self.recording: Recording = self.recorder.begin(
            name, f"/v1/realtime?mode={mode}", mode, {"client_id": "c"}, self.clock.now()
        )

    def up(self, frame: bytes, after_s: float = 1.0, heard: bytes = b"") -> None:
        self.clock.advance(after_s)
        heard = pcm(16_000) if frame is APPEND else heard
        self.recording.up(frame, heard, self.clock.now())

    def down(self, frame: bytes, after_s: float = 0.0) -> None:
        self.clock.advance(after_s)
        self.recording.down([frame], self.clock.now())

    def written(self) -> None:
        """Wait until all events passed to the recorder are on disk."""
        done = threading.Event()
        self.recorder.submit(done.set, 0)
        assert done.wait(WITHIN_S)

    def end(self) -> None:
        self.recording.end("A", "client", self.clock.now())
        self.recorder.close()


def main(directory: Path) -> None:
    clock = HandSetClock()
    recorder = Recorder(RecordingSettings(directory), clock)
    recording = recorder.begin("sess_0", "/v1/realtime", "audio", {}, clock.now())
    for second in itertools.count(1):
        clock.advance(1.0)
        recording.up(APPEND, pcm(16_000), clock.now())
        recording.down([SPEECH], clock.now())
        if second == 3:
            recorder.submit(lambda: print("recorded", flush=True), 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
