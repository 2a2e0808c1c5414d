"""A chat with a video equals a chat with its pictures and sounds in the reference's order."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from PIL import Image
from support.model.video_files import make_video

from duplane.tools.golden_replay.chat import prompt_embeddings
from duplane.worker.models.chat import (
    ChatAudio,
    ChatImage,
    ChatMessage,
    ChatOptions,
    ChatPart,
    ChatRequest,
    ChatRole,
    ChatVideo,
)
from duplane.worker.models.minicpm_o.chat.chats import PreparedChat
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.types import DecodeMode
from duplane.worker.video.bounds import VideoBounds
from duplane.worker.video.decoder import decode_video

Decoded = list[Image.Image | np.ndarray]
BEFORE, AFTER = "What happens here?", "Say it in one word."


@pytest.fixture(scope="module", params=[1, 3], ids=["plain", "stacked"])
def decoded(request: pytest.FixtureRequest) -> Decoded:
    bounds = VideoBounds(request.param, 60, 1 << 20, 1 << 32, 60)
    return list(decode_video(io.BytesIO(make_video(2.3, size=(96, 64))), bounds))


def video(model: DuplexModel, decoded: Decoded) -> ChatVideo:
    return ChatVideo(
        tuple(
            ChatAudio(piece)
            if isinstance(piece, np.ndarray)
            else ChatImage(model.preparer.picture(piece, 1))
            for piece in decoded
        )
    )


def parts(decoded: Decoded) -> list[ChatPart]:
    return [
        ChatAudio(piece) if isinstance(piece, np.ndarray) else ChatImage(png(piece))
        for piece in decoded
    ]


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def prepared(model: DuplexModel, said: Sequence[ChatPart], *, is_omni: bool) -> PreparedChat:
    options = ChatOptions(
        is_omni=is_omni,
        max_slices=1,
        use_image_id=True,
        max_new_tokens=12,
        decode_mode=DecodeMode.GREEDY,
    )
    message = ChatMessage(ChatRole.USER, (BEFORE, *said, AFTER))
    return model.preparer.chat(ChatRequest((message,), options))


@pytest.mark.parametrize("is_omni", [False, True], ids=["lines", "omni"])
def test_a_video_is_its_pictures_and_sounds_in_order(
    model: DuplexModel, decoded: Decoded, is_omni: bool
) -> None:
    ours = prepared(model, [video(model, decoded)], is_omni=is_omni)
    theirs = prepared(model, parts(decoded), is_omni=is_omni)
    assert ours.prompt.text == theirs.prompt.text
    assert ours.prompt.ids == theirs.prompt.ids
    assert ours.prompt.image_bounds == theirs.prompt.image_bounds
    assert ours.prompt.audio_bounds == theirs.prompt.audio_bounds
    assert ours.image_rows == 64 * sum(not isinstance(piece, np.ndarray) for piece in decoded)
    assert ours.audio_rows == 10 + 10 + 3
    rows = [prompt_embeddings(model.parts, one.prompt) for one in (ours, theirs)]
    torch.testing.assert_close(*rows, rtol=0, atol=0)


def test_the_answer_is_the_same(model: DuplexModel, decoded: Decoded) -> None:
    answers: list[list[int]] = []
    for slot, said in enumerate(([video(model, decoded)], parts(decoded))):
        model.open_chat(slot, prepared(model, said, is_omni=True))
        ids: list[int] = []
        finish = None
        while finish is None:
            for output in model.chat_step([slot]):
                ids += output.token_ids  # pyright: ignore[reportAttributeAccessIssue]  no failure
                finish = output.finish  # pyright: ignore[reportAttributeAccessIssue]  no failure
        answers.append(ids)
    assert answers[0] == answers[1]
    assert answers[0]
