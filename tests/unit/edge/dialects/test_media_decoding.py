"""Decoding of media changes no session, decodes each sound once and stays within its bounds."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pybase64
import pytest
from support.protocols.transcripts import pcm, wav

from duplane.edge.client_errors import ClientError
from duplane.edge.clock import Moment
from duplane.edge.dialects.a import DialectA
from duplane.edge.dialects.actions import Configure, Turn
from duplane.edge.dialects.b import DialectB
from duplane.edge.dialects.b_chat import DialectBChat
from duplane.edge.dialects.c import DialectC
from duplane.edge.dialects.d import DialectD
from duplane.edge.dialects.dialect import Dialect, Phase
from duplane.edge.dialects.e import DialectE
from duplane.edge.dialects.e_chat import DialectEChat
from duplane.edge.dialects.h import DialectH
from duplane.edge.dialects.l import DialectL
from duplane.edge.identity import Identity
from duplane.edge.modes import CHAT_MODE, MODES
from duplane.edge.payload import media
from duplane.edge.payload.fields import Fields
from duplane.edge.session.chat_session import ChatSession
from duplane.edge.settings import Limits
from duplane.fabric.audio import Samples, pcm_from_samples

FILE = pybase64.b64encode(wav(200_000)).decode()
RAW = pybase64.b64encode(pcm(200_000)).decode()
NOW = Moment(36_077.123, 0)


def dialect_of(kind: type[Dialect], limits: Limits | None = None) -> Dialect:
    is_chat = kind in (DialectBChat, DialectD)
    mode = CHAT_MODE if is_chat else MODES["audio"]
    return kind(Identity("sess_0", "rt_0"), limits or Limits(), mode)


def chat_of(limits: Limits | None = None) -> ChatSession:
    limits = limits or Limits()
    dialect = DialectD(Identity("sess_0", "rt_0"), limits, CHAT_MODE)
    return ChatSession(dialect, limits, NOW)


def turn_of(*parts: dict[str, Any]) -> bytes:
    return orjson.dumps({"messages": [{"role": "user", "content": list(parts)}]})


def sound(data: str, **more: Any) -> dict[str, Any]:
    return {"type": "audio", "data": data, **more}


def decoded_turn(*parts: dict[str, Any], limits: Limits | None = None) -> Turn:
    decoded = chat_of(limits).decode(turn_of(*parts))
    assert decoded.error is None, decoded.error
    (action,) = decoded.actions
    assert isinstance(action, Turn)
    return action


def test_a_wav_file_and_raw_samples_become_the_same_pcm() -> None:
    session = {"instructions": "x", "ref_audio": FILE, "tts_ref_audio": RAW}
    action = dialect_of(DialectA).decode(Fields({"type": "session.update", "session": session}))
    assert isinstance(action, Configure)
    assert action.settings.llm_voice == action.settings.tts_voice == pcm(200_000)
    file, raw = decoded_turn(sound(FILE), sound(RAW)).request.messages[0].parts
    assert file.audio == raw.audio == pcm(200_000)


def test_sounds_of_another_rate_are_resampled_and_files_have_their_own_rate() -> None:
    raw, file = (
        decoded_turn(sound(RAW, sample_rate=48_000), sound(FILE, sample_rate=48_000))
        .request.messages[0]
        .parts
    )
    assert len(raw.audio) == 4 * round(200_000 / 3)
    assert file.audio == pcm(200_000)


def test_every_sound_of_a_turn_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decode = pybase64.b64decode

    def count(text: str, **options: Any) -> bytes:
        decoded.append(len(text))
        return decode(text, **options)

    monkeypatch.setattr(media.pybase64, "b64decode", count)
    session = chat_of()
    session.receive(session.decode(turn_of(sound(FILE), sound(RAW))), NOW)
    assert decoded == [len(FILE), len(RAW)]


def test_no_more_is_decoded_than_the_budget_of_all_media(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []

    def count(samples: Samples) -> bytes:
        decoded.append(samples.size)
        return pcm_from_samples(samples)

    monkeypatch.setattr(media, "pcm_from_samples", count)
    session = chat_of(Limits(chat_media_bytes=2_000_000))
    error = session.decode(turn_of(*[sound(FILE)] * 5)).error
    assert isinstance(error, ClientError)
    assert "media of all messages" in error.message
    assert decoded == [200_000] * 2


@pytest.mark.parametrize(
    "part",
    [
        sound(FILE, sample_rate="fast"),
        sound(FILE[:-5] + "%%%%="),
        sound(pybase64.b64encode(b"RIFF1234WAVE" + bytes(300_000)).decode()),
        sound(pybase64.b64encode(wav(0)).decode()),
        sound(""),
    ],
    ids=["rate", "no base64", "broken file", "empty file", "empty"],
)
def test_an_invalid_sound_is_refused_with_its_path(part: dict[str, Any]) -> None:
    error = chat_of().decode(turn_of(part)).error
    assert isinstance(error, ClientError)
    assert error.message.startswith("messages[0].content[0].")


async def test_a_message_can_be_decoded_in_a_thread_while_its_session_ends() -> None:
    session = chat_of()
    decoded = await asyncio.to_thread(session.decode, turn_of(sound(FILE)))
    assert (session.dialect.phase, session.closed) == (Phase.START, None)
    session.drain(NOW)
    assert session.receive(decoded, NOW) == []


@pytest.mark.parametrize(
    "kind",
    [
        *(DialectA, DialectB, DialectBChat, DialectC, DialectD, DialectE, DialectEChat),
        *(DialectH, DialectL),
    ],
)
def test_what_is_legal_while_a_conversation_opens_is_legal_once_it_is_open(
    kind: type[Dialect],
) -> None:
    """The conversation may open while a thread decodes an event; the event must stay legal."""
    opening = {event for phase, event in kind.transitions if phase is Phase.OPENING}
    active = {event for phase, event in kind.transitions if phase is Phase.ACTIVE}
    assert opening <= active
