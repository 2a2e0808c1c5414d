"""`duplane talk` holds a conversation in every dialect and mode against a live edge."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import soundfile
from edge_transcripts import jpeg, wav
from live_edge import LiveEdge, live_edge

from duplane.fabric.v1 import session_pb2
from duplane.tools.talk import TalkSettings, talk_to
from duplane.tools.talk_chat import chat_with


def settings_for(edge: LiveEdge, folder: Path, dialect: str, mode: str) -> TalkSettings:
    sound, picture = folder / "speech.wav", folder / "picture.jpg"
    sound.write_bytes(wav(20_000))
    picture.write_bytes(jpeg(4, 4))
    return TalkSettings(
        wav=sound,
        url=f"ws://{edge.edge.address}",
        dialect=dialect,
        mode=mode,
        frames=(picture,) if mode == "video" else (),
        texts=("Hi", "And?") if mode == "chat" else (),
        prompt="Be brief.",
        voice=sound,
        tail_s=0.0,
    )


@pytest.mark.parametrize("dialect", ["A", "B", "C"])
@pytest.mark.parametrize("mode", ["audio", "video"])
async def test_units_are_spoken_and_answered(
    dialect: str, mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with live_edge() as edge:
        settings = settings_for(edge, tmp_path, dialect, mode)
        await asyncio.to_thread(talk_to, settings, out=None, as_json=True)
        conversation = await edge.fabric.conversation()
        requests = [conversation.received.get_nowait() for _ in range(3)]
        units = [request.unit for request in requests if request.WhichOneof("message") == "unit"]
        assert [len(unit.video_frames) for unit in units] == [int(mode == "video")] * 2
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize("dialect", ["B", "D"])
async def test_turns_are_chatted_with_their_history(
    dialect: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with live_edge() as edge:
        settings = replace(settings_for(edge, tmp_path, dialect, "chat"), wav=None)
        out = tmp_path / "reply.wav"
        await asyncio.to_thread(chat_with, settings, out=out, as_json=False)
        roles = [
            [message.role for message in (await edge.fabric.turn()).request.messages]
            for _ in range(2)
        ]
        system, user = session_pb2.CHAT_ROLE_SYSTEM, session_pb2.CHAT_ROLE_USER
        assert roles == [[system, user], [system, user, session_pb2.CHAT_ROLE_ASSISTANT, user]]
        assert soundfile.info(out).frames == 4 * 240
    assert capsys.readouterr().out == "Hello there.\n" * 2


@pytest.mark.parametrize("dialect", ["B", "D"])
async def test_a_video_file_goes_with_the_first_text(dialect: str, tmp_path: Path) -> None:
    video = tmp_path / "video.mp4"
    video.write_bytes(b"a video")
    async with live_edge() as edge:
        settings = settings_for(edge, tmp_path, dialect, "chat")
        settings = replace(settings, wav=None, videos=(video,))
        await asyncio.to_thread(chat_with, settings, out=None, as_json=True)
        request = (await edge.fabric.turn()).request
        shown, said = request.messages[-1].parts
        assert (shown.video, shown.video_stack_frame_count) == (b"a video", 1)
        assert said.text == "Hi"
    with pytest.raises(ValueError, match="for mode 'chat'"):
        talk_to(
            replace(settings, dialect="A", mode="audio", wav=tmp_path / "speech.wav"),
            out=None,
            as_json=True,
        )


@pytest.mark.parametrize(("dialect", "mode"), [("A", "chat"), ("C", "chat"), ("D", "chat")])
async def test_what_cannot_work_is_said_before_connecting(
    dialect: str, mode: str, tmp_path: Path
) -> None:
    async with live_edge() as edge:
        settings = replace(settings_for(edge, tmp_path, dialect, mode), texts=())
        with pytest.raises(ValueError, match="chat"):
            chat_with(settings, out=None, as_json=False)
