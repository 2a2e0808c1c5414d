"""Makes the worker's lines of a transcript by running a real worker with a small random model.

`python -m support.protocols.worker_lines NAME` prints the lines. They have the model's texts, no
times, and `@pcm:N` for N samples.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import torch
import uvloop
from google.protobuf import json_format
from support.protocols.transcripts import FOLDER, Transcript, message_of, read_transcript
from support.test_checkpoint.build import build_test_checkpoint
from support.worker.scripted_model import ScriptedModel
from support.worker.worker_harness import running_worker

from duplane.fabric.converse import ConverseStream
from duplane.fabric.v1 import session_pb2
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.worker_model import WorkerModel

WITHIN_S = 60.0  # the warm-up of a real model on a loaded machine takes several seconds


class SmallModel(ScriptedModel):
    """The scripted device with a small random model that is loaded before the worker starts."""

    def __init__(self, model: DuplexModel) -> None:
        super().__init__()
        self._model = model

    def load(self) -> Any:
        return self._model.preparer, WorkerModel(self._model)

    def memory_used_bytes(self) -> int:
        return self._model.memory_bytes


def small_model(directory: Path) -> DuplexModel:
    """Build a random checkpoint in a new directory, and load it."""
    torch.set_num_threads(1)
    build_test_checkpoint(directory)
    return DuplexModel.load(directory, slot_count=2, context_capacity=1024)


async def responses(
    transcript: Transcript, model: DuplexModel
) -> list[session_pb2.ConverseResponse]:
    """Send the edge's requests of a transcript to a real worker; return its answers."""
    requests = [step for step in transcript.steps if step.who == "edge"]
    answers: list[session_pb2.ConverseResponse] = []
    async with (
        asyncio.timeout(WITHIN_S),
        running_worker(SmallModel(model), start_within_s=WITHIN_S) as rig,
        rig.claimed() as client,
    ):
        for step in requests:
            request = session_pb2.ConverseRequest()
            getattr(request, step.what).SetInParent()
            message_of(step.rest, getattr(request, step.what))
            await client.write(request)
            answers.append(await ConverseStream.read(client))  # without the harness's time limit
    return answers


def written(answers: list[session_pb2.ConverseResponse]) -> Iterator[str]:
    """Yield these answers of a worker as lines of a transcript."""
    for answer in answers:
        kind = answer.WhichOneof("message") or ""
        part = getattr(answer, kind)
        if isinstance(part, session_pb2.Delta):
            for name in ("stage_times", "token_ids", "trace"):
                if name in part.DESCRIPTOR.fields_by_name:
                    part.ClearField(name)
        fields = json_format.MessageToDict(part, preserving_proto_field_name=True)
        if audio := fields.get("speech", {}).get("audio"):
            del audio
            fields["speech"]["audio"] = f"@pcm:{len(part.speech.audio) // 4}"
        yield f"worker {kind} {orjson.dumps(fields).decode()}"


async def _main(name: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = small_model(Path(directory) / "checkpoint")
        for line in written(await responses(read_transcript(FOLDER / f"{name}.txt"), model)):
            sys.stdout.write(line + "\n")


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1]))
