"""`duplane talk` holds a conversation in every dialect and mode against a live edge."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import soundfile
from support.certificates import write_certificate
from support.edge.live_edge import LiveEdge, impatient, live_edge
from support.fabric.fault_proxy import FaultProxy
from support.protocols.transcripts import jpeg, pcm, wav
from support.time_limits import WITHIN_S
from support.tools.command import run_command
from websockets.asyncio.server import ServerConnection, serve

from duplane.edge.settings import Limits
from duplane.fabric.errors import Reason
from duplane.fabric.v1 import session_pb2
from duplane.tools.command import UsageError
from duplane.tools.talk import client, duplex
from duplane.tools.talk.chat import chat_with
from duplane.tools.talk.client import ConnectError, TalkError
from duplane.tools.talk.duplex import SAMPLE, talk_to
from duplane.tools.talk.half_duplex import listen_to
from duplane.tools.talk.settings import Dialect, Mode, TalkSettings


def settings_for(edge: LiveEdge, folder: Path, dialect: Dialect, mode: Mode) -> TalkSettings:
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
    dialect: Dialect, mode: Mode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with live_edge() as edge:
        settings = settings_for(edge, tmp_path, dialect, mode)
        await asyncio.to_thread(talk_to, settings, out=None, as_json=True)
        conversation = await edge.fabric.conversation()
        requests = [conversation.received.get_nowait() for _ in range(3)]
        units = [request.unit for request in requests if request.WhichOneof("message") == "unit"]
        assert [len(unit.video_frames) for unit in units] == [int(mode == "video")] * 2
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize("shown", ["no picture", "the named picture"])
async def test_video_session_shows_the_sample_picture_if_none_is_named(
    shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sample recording is about it. It is cut to a second here."""
    monkeypatch.setattr(duplex, "SEEN_SAMPLE", tmp_path / "speech.wav")
    monkeypatch.setattr(duplex, "show_sample", lambda _: None)
    async with live_edge() as edge:
        settings = replace(settings_for(edge, tmp_path, "A", "video"), wav=None)
        picture = settings.frames[0].read_bytes()
        if shown == "no picture":
            settings, picture = replace(settings, frames=()), duplex.SAMPLE_PICTURE.read_bytes()
        await asyncio.to_thread(talk_to, settings, out=None, as_json=True)
        conversation = await edge.fabric.conversation()
        requests = [conversation.received.get_nowait() for _ in range(3)]
        units = [request.unit for request in requests if request.WhichOneof("message") == "unit"]
        assert [list(unit.video_frames) for unit in units] == [[picture]] * 2


@pytest.mark.parametrize("dialect", ["B", "D"])
async def test_turns_are_chatted_with_their_history(
    dialect: Dialect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
async def test_a_video_file_goes_with_the_first_text(dialect: Dialect, tmp_path: Path) -> None:
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
    with pytest.raises(UsageError, match="for a chat"):
        talk_to(
            replace(settings, dialect="A", mode="audio", wav=tmp_path / "speech.wav"),
            out=None,
            as_json=True,
        )


@pytest.mark.parametrize(("dialect", "mode"), [("A", "chat"), ("C", "chat"), ("D", "chat")])
async def test_what_cannot_work_is_said_before_connecting(
    dialect: Dialect, mode: Mode, tmp_path: Path
) -> None:
    async with live_edge() as edge:
        settings = replace(settings_for(edge, tmp_path, dialect, mode), texts=())
        with pytest.raises(UsageError, match="chat"):
            chat_with(settings, out=None, as_json=False)


@pytest.mark.parametrize("dialect", ["A", "B", "C"])
async def test_refused_video_session_says_that_the_model_cannot_see(
    dialect: Dialect, tmp_path: Path
) -> None:
    async with live_edge() as edge:
        edge.fabric.is_automatic = False
        settings = settings_for(edge, tmp_path, dialect, "video")
        talking = asyncio.create_task(asyncio.to_thread(talk_to, settings, out=None, as_json=True))
        acquisition = await edge.fabric.acquisition()
        acquisition.refuse(Reason.KIND_NOT_SERVED)
        with pytest.raises(TalkError, match=r"the model cannot see\. Ask for audio") as failure:
            await talking
        assert "{" not in str(failure.value)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--text", "Hi"), "texts (--text) are for a chat: --mode chat --dialect B, or D"),
        (("--frame", "{sound}"), "pictures (--frame) are for --mode video"),
        (("--mode", "chat", "--text", "Hi"), "dialect A has no chats: use --dialect B or"),
        (("--dialect", "D"), "a chat needs a text: --text"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused_with_one_sentence(
    arguments: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    sound = tmp_path / "speech.wav"
    sound.write_bytes(wav(20_000))
    filled = [argument.format(sound=sound) for argument in arguments]
    code, output = run_command("talk", *filled, "--url", "ws://127.0.0.1:1")
    assert code != 0
    assert sentence in output
    assert len(output.strip().splitlines()) == 1


async def connect_error(answer: bytes | None, scheme: str) -> str:
    """Return the error of `talk` at a server that sends `answer`; None sends nothing."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.read(1)
        if answer is not None:
            writer.write(answer)
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        talk = TalkSettings(url=f"{scheme}://127.0.0.1:{port}")
        with pytest.raises(ConnectError) as failure:
            await asyncio.to_thread(talk_to, talk, out=None, as_json=True)
        for writer in writers:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    return str(failure.value)


async def test_tls_to_a_plain_port_and_plain_to_tls_are_distinguished() -> None:
    plain = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"
    assert "does not speak TLS" in await connect_error(plain, "wss")
    alert = b"\x15\x03\x01\x00\x02\x02\x0a"
    assert "try wss://" in await connect_error(alert, "ws")


async def test_server_that_does_not_answer_is_not_taken_for_one_without_tls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "OPEN_TIMEOUT_S", 0.2)
    for scheme in ("ws", "wss"):
        assert "does not answer" in await connect_error(None, scheme)


async def test_own_certificates_are_trusted_when_they_are_named(tmp_path: Path) -> None:
    chain, key = write_certificate(tmp_path, "edge")
    async with live_edge(tls_cert=chain, tls_key=key) as edge:
        settings = replace(
            settings_for(edge, tmp_path, "A", "audio"),
            url=f"wss://127.0.0.1:{edge.edge.address.rpartition(':')[2]}",
        )
        with pytest.raises(ConnectError, match="--ca"):
            await asyncio.to_thread(talk_to, settings, out=None, as_json=True)
        await asyncio.to_thread(talk_to, replace(settings, ca=chain), out=None, as_json=True)


async def test_seed_reaches_the_session_in_dialect_b(tmp_path: Path) -> None:
    async with live_edge() as edge:
        settings = replace(settings_for(edge, tmp_path, "B", "audio"), seed=7)
        await asyncio.to_thread(talk_to, settings, out=None, as_json=True)
        conversation = await edge.fabric.conversation()
        opened = await conversation.next_request()
        assert opened.open.seed == 7
    with pytest.raises(ValueError, match="seed"):
        TalkSettings(dialect="A", seed=7)


def test_message_about_dialects_names_all() -> None:
    code, output = run_command("talk", "--dialect", "X")
    assert code == 2
    assert "A, B, C, D, E, H, L" in output


async def test_sound_of_l_is_sent_and_heard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with live_edge() as edge:
        edge.fabric.on_unit = spoken
        settings = settings_for(edge, tmp_path, "L", "audio")
        await asyncio.to_thread(talk_to, settings, out=None, as_json=True)
    rows = [orjson.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["decision"], row["text"], row["audio_s"]) for row in rows] == [
        ("speak", "so", 1.0),
        ("listen", "", 0.0),
    ]


@pytest.mark.slow
async def test_sound_of_e_is_sent_and_heard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with live_edge() as edge:
        edge.fabric.on_unit = spoken
        settings = settings_for(edge, tmp_path, "E", "audio")
        await asyncio.to_thread(talk_to, settings, out=tmp_path / "reply.wav", as_json=True)
    rows = [orjson.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["unit"], row["decision"], row["text"], row["audio_s"]) for row in rows] == [
        (0, "speak", "so", 1.0)
    ]
    assert soundfile.info(tmp_path / "reply.wav").frames == 24_000


@pytest.mark.slow
async def test_a_question_in_half_duplex_is_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples, rate_hertz = soundfile.read(SAMPLE)
    async with live_edge() as edge:
        settings = settings_for(edge, tmp_path, "H", "audio")
        assert settings.wav
        soundfile.write(settings.wav, samples[int(1.7 * rate_hertz) : 3 * rate_hertz], rate_hertz)
        out = tmp_path / "reply.wav"
        settings = replace(settings, tail_s=1.0)
        await asyncio.to_thread(listen_to, settings, out=out, as_json=True)
        system, user = (await edge.fabric.turn()).request.messages
        assert system.parts[0].text == "Be brief."
        assert [part.WhichOneof("content") for part in user.parts] == ["audio"]
    (row,) = [orjson.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (row["turn"], row["text"]) == (0, "Hello there.")
    assert soundfile.info(out).frames == row["audio_s"] * 24_000 > 0


def test_half_duplex_says_that_the_default_model_understands_no_speech_there() -> None:
    arguments = ("talk", "--dialect", "H", "--url", "ws://127.0.0.1:1")
    assert "the default model of `duplane up` understands no speech" in run_command(*arguments)[1]
    assert "the default model" not in run_command(*arguments, "--json")[1]


async def test_the_end_of_a_half_duplex_session_ends_the_command(tmp_path: Path) -> None:
    async with live_edge(impatient(Limits())) as edge:
        settings = replace(settings_for(edge, tmp_path, "H", "audio"), tail_s=2 * WITHIN_S)
        listening = asyncio.to_thread(listen_to, settings, out=None, as_json=True)
        talking = asyncio.create_task(listening)
        await edge.until_session_count(1)
        edge.drain()
        with pytest.raises(TalkError):
            async with asyncio.timeout(WITHIN_S):
                await talking


@pytest.mark.parametrize("dialect", ["E", "H", "L"])
def test_dialects_without_pictures_have_only_audio(dialect: Dialect) -> None:
    with pytest.raises(ValueError, match=f"mode: dialect {dialect} has only audio"):
        TalkSettings(dialect=dialect, mode="video")


def spoken(unit: session_pb2.Unit) -> list[session_pb2.ConverseResponse]:
    """Speak in the first unit, and listen to all others."""
    delta = session_pb2.Delta(sequence=unit.sequence, listen=session_pb2.Listen())
    if unit.sequence == 0:
        delta.speech.text, delta.speech.audio = "so", pcm(24_000)
    return [session_pb2.ConverseResponse(delta=delta)]


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["A", "B"])
async def test_conversation_goes_on_over_another_connection(
    dialect: Dialect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    has_begun = asyncio.Event()

    def note(unit: session_pb2.Unit) -> list[session_pb2.ConverseResponse]:
        has_begun.set()
        return spoken(unit)

    async with live_edge() as edge, FaultProxy(edge.edge.address) as proxy:
        edge.fabric.on_unit = note
        settings = replace(
            settings_for(edge, tmp_path, dialect, "audio"),
            url=f"ws://{proxy.address}",
            resume=True,
            tail_s=1.0,
        )
        talking = asyncio.create_task(asyncio.to_thread(talk_to, settings, out=None, as_json=True))
        await asyncio.wait_for(has_begun.wait(), WITHIN_S)
        await proxy.reset()
        await talking
    written = capsys.readouterr()
    assert "the conversation goes on after" in written.err
    assert [orjson.loads(line)["unit"] for line in written.out.splitlines()] == [0, 1, 2]


@pytest.mark.parametrize("settings", [{"dialect": "C"}, {"dialect": "B", "mode": "chat"}])
def test_only_duplex_sessions_of_a_and_b_are_resumed(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="resume: only for dialects A and B"):
        TalkSettings(resume=True, **settings)


async def test_a_key_is_shown_to_the_server(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("dpk_1_secret\n")
    shown: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    async def read(connection: ServerConnection) -> None:
        assert connection.request
        shown.set_result(connection.request.headers.get("Authorization"))

    async with serve(read, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        async with client.connected(f"ws://127.0.0.1:{port}", key_file=key):
            assert await shown == "Bearer dpk_1_secret"


async def test_a_key_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("dpk_1_secret")
    key.chmod(0o644)
    with pytest.raises(UsageError, match=r"^key_file: other users"):
        async with client.connected("ws://127.0.0.1:9", key_file=key):
            pass
