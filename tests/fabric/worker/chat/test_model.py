"""Chats on a real worker with a tiny real model."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.test_checkpoint.build import build_test_checkpoint
from support.worker.scripted_model import ScriptedModel
from support.worker.worker_harness import (
    chat_answer,
    chat_refusal,
    running_worker,
    says,
)

from duplane.fabric.errors import Reason
from duplane.fabric.v1 import session_pb2
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.worker_model import WorkerModel


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "checkpoint"
    build_test_checkpoint(directory)
    return directory


class TinyModel(ScriptedModel):
    """The scripted device of the tests, but with a real tiny model."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__()
        self._checkpoint = checkpoint

    def load(self) -> Any:
        torch.set_num_threads(1)
        model = DuplexModel.load(self._checkpoint, slot_count=2, context_capacity=1024)
        return model.preparer, WorkerModel(model)

    def memory_used_bytes(self) -> int:
        return 0


@pytest.mark.parametrize("is_spoken", [False, True], ids=["text", "speech"])
async def test_a_real_model_answers_in_words_and_ends_by_itself(
    checkpoint: Path, is_spoken: bool
) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (320, 240), (10, 200, 90)).save(picture, "JPEG")
    sound = np.zeros(16_000, "<f4").tobytes()
    request = session_pb2.ChatRequest(
        messages=[
            says("What is this?", session_pb2.ChatPart(image=picture.getvalue())),
            session_pb2.ChatMessage(
                role=session_pb2.CHAT_ROLE_ASSISTANT, parts=says("A table.").parts
            ),
            says(session_pb2.ChatPart(audio=sound)),
        ],
        config=session_pb2.ChatConfig(generate_audio=is_spoken, max_new_token_count=60),
        seed=1,
    )
    async with running_worker(TinyModel(checkpoint)) as rig:
        responses = await chat_answer(rig, request)
        text = "".join(response.delta.text for response in responses)
        audio = np.frombuffer(b"".join(response.delta.audio for response in responses), "<f4")
        done = responses[-1].done
        assert done.reason == session_pb2.FINISH_REASON_STOP
        assert text.strip()
        assert "<|" not in text
        assert (np.abs(audio).max(initial=0) > 0) == is_spoken
        assert done.token_counts.input_video_token_count == 64
        assert done.token_counts.input_audio_token_count == 10
        lengths = [r.delta.context_token_count for r in responses if r.HasField("delta")]
        assert lengths == sorted(lengths), "the context never shrinks within a turn"
        assert lengths[0] >= responses[0].prefilled.prompt_token_count
        ids = [token for response in responses for token in response.delta.token_ids]
        assert done.token_counts.output_text_token_count == len(ids)
        again = await chat_answer(rig, request, slot=1)
        assert [token for r in again for token in r.delta.token_ids] == ids


async def test_a_real_model_refuses_what_is_no_picture_by_its_path(checkpoint: Path) -> None:
    request = session_pb2.ChatRequest(
        messages=[says("Look:", session_pb2.ChatPart(image=b"no picture"))]
    )
    async with running_worker(TinyModel(checkpoint)) as rig:
        error = await chat_refusal(rig, request)
        assert (error.reason, error.field) == (Reason.INVALID_FIELD, "messages[0].parts[1].image")
