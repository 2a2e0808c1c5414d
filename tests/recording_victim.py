"""A process that records and is killed: python recording_victim.py DIRECTORY

Prints `recorded` once three seconds of a session are on disk, and goes on recording.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import orjson
import pybase64
from edge_transcripts import pcm
from live_edge import HandSetClock

from duplane.edge.recording.recorder import Recorder
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


def main(directory: Path) -> None:
    clock = HandSetClock()
    recorder = Recorder(RecordingSettings(directory), clock)
    recording = recorder.begin("sess_0", "/v1/realtime", "audio", {}, clock.now())
    for second in itertools.count(1):
        clock.advance(1.0)
        recording.up(APPEND, pcm(16_000), clock.now())
        recording.down([SPEECH], clock.now())
        if second == 3:
            recorder.put(lambda: print("recorded", flush=True), 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
