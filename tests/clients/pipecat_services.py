"""Pipecat's services for OpenAI, unchanged and without a transport. `by_hand.sh` installs them.

Arguments: `live` or `realtime`, the base URL, and a WAV file, which is sent at real-time pace.
Writes the text of each turn of the model, the length of all sound, and the faults.
"""

from __future__ import annotations

import asyncio
import sys
import wave
from typing import Any

from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    Frame,
    InputAudioRawFrame,
    LLMContextFrame,
    SpeechOutputAudioRawFrame,
    TTSAudioRawFrame,
    TTSStoppedFrame,
    TTSTextFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.live.llm import OpenAILiveLLMService
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.workers.runner import WorkerRunner

PIECE_S = 0.02
TAIL_S = 5.0
PROMPT = "You are a helpful assistant."


def service_of(name: str, url: str) -> Any:
    if name == "realtime":
        service = OpenAIRealtimeLLMService
        settings = service.Settings(model="gpt-realtime-2.1", system_instruction=PROMPT)
        return service(api_key="any", base_url=f"{url}/realtime", settings=settings)
    service = OpenAILiveLLMService
    settings = service.Settings(model="gpt-live-1", system_instruction=PROMPT)
    return service(api_key="any", base_url=f"{url}/live/sessions", settings=settings)


class Sink(FrameProcessor):
    def __init__(self) -> None:
        super().__init__()
        self.turn_count = 0
        self.sound_s = 0.0  # without frames of silence
        self._text = ""

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        match frame:
            case TTSTextFrame():
                self._text += frame.text
            case TTSAudioRawFrame() | SpeechOutputAudioRawFrame() if frame.audio.strip(b"\0"):
                self.sound_s += len(frame.audio) / 2 / frame.sample_rate
            case TTSStoppedFrame():
                self.turn_count += 1
                print(repr(self._text), flush=True)
                self._text = ""
            case ErrorFrame():
                print("error:", frame.error, flush=True)
            case _:
                pass
        await self.push_frame(frame, direction)


async def speak(worker: PipelineWorker, file: str) -> None:
    await worker.queue_frame(LLMContextFrame(LLMContext()))
    with wave.open(file) as sound:
        rate, count = sound.getframerate(), int(sound.getframerate() * PIECE_S)
        pieces = [sound.readframes(count) for _ in range(sound.getnframes() // count)]
    pieces += [bytes(2 * count)] * int(TAIL_S / PIECE_S)
    begin = asyncio.get_running_loop().time()
    for number, piece in enumerate(pieces):
        await asyncio.sleep(begin + number * PIECE_S - asyncio.get_running_loop().time())
        await worker.queue_frame(InputAudioRawFrame(piece, rate, 1))
    await worker.queue_frame(EndFrame())


async def main(service: str, url: str, file: str) -> None:
    sink = Sink()
    params = PipelineParams(audio_in_sample_rate=16_000, audio_out_sample_rate=24_000)
    worker = PipelineWorker(
        Pipeline([service_of(service, url.replace("http", "ws", 1)), sink]), params=params
    )

    @worker.event_handler("on_pipeline_error")
    async def on_error(_: PipelineWorker, frame: ErrorFrame) -> None:
        print("error:", frame.error, flush=True)

    speaking = asyncio.create_task(speak(worker, file))
    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    await runner.run()
    await speaking
    print(f"{sink.turn_count} turns, {sink.sound_s:.2f} s")


asyncio.run(main(*sys.argv[1:]))
