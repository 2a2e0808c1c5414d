"""The sound and the pictures that a client of dialect E sends for turns of chat."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pybase64
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.protocols.transcripts import committed, pcm, png

from duplane.edge.client_errors import ClientError
from duplane.edge.dialects.e_input import InputBuffer, UnheardSound, read_media
from duplane.edge.payload.fields import Fields
from duplane.edge.payload.sound_format import Encoding, SoundFormat
from duplane.edge.settings import Limits

PCM_24K = SoundFormat(Encoding.INT16, 24_000)


@given(cuts=st.lists(st.integers(0, 4800), max_size=6))
def test_sound_in_pieces_of_any_length_is_the_same_sound(cuts: list[int]) -> None:
    whole, pieces = InputBuffer(), InputBuffer()
    sound = pcm(4800)
    whole.add(sound, 24_000)
    ends = [0, *sorted(cuts), 4800]
    for begin, end in itertools.pairwise(ends):
        pieces.add(sound[4 * begin : 4 * end], 24_000)
    assert pieces.seconds == pytest.approx(0.2)
    taken = pieces.take()
    assert len(taken) == 4 * 3200
    assert np.allclose(np.frombuffer(taken, "<f4"), np.frombuffer(whole.take(), "<f4"), atol=1e-4)


def test_second_sound_has_nothing_of_the_first() -> None:
    buffer = InputBuffer()
    buffer.add(pcm(4800), 24_000)
    first = buffer.take()
    assert (buffer.seconds, buffer.take()) == (0.0, b"")
    buffer.add(pcm(4800), 24_000)
    buffer.clear()
    buffer.add(pcm(4800), 24_000)
    assert buffer.take() == first


def test_rate_may_change_within_one_sound() -> None:
    buffer = InputBuffer()
    buffer.add(pcm(2400), 24_000)
    buffer.add(pcm(800), 8_000)
    assert buffer.seconds == pytest.approx(0.2)
    assert len(buffer.take()) == 4 * 3200


def test_unheard_sound_keeps_the_newest() -> None:
    unheard = UnheardSound(0.5)
    unheard.add(pcm(8_000), 24_000)
    unheard.add(pcm(8_000), 24_000)
    assert unheard.take() == (pcm(8_000) + pcm(8_000))[-4 * 12_000 :]
    assert unheard.take() == b""
    unheard.add(pcm(100), 24_000)
    unheard.add(pcm(50), 8_000)
    assert (unheard.rate_hertz, unheard.take()) == (8_000, pcm(50))


def item(*parts: Mapping[str, object]) -> Fields:
    return Fields({"type": "message", "role": "user", "content": list(parts)}, "item")


def base64(content: bytes) -> str:
    return pybase64.b64encode(content).decode()


def test_media_of_a_message_are_sounds_and_pictures() -> None:
    sound = PCM_24K.encode(pcm(2400))
    media = read_media(
        item(
            {"type": "input_text", "text": "see"},
            {"type": "input_image", "image_url": f"data:image/png;base64,{base64(png(8, 8))}"},
            {"type": "input_audio", "audio": base64(sound)},
            {"type": "input_audio", "transcript": "hello"},
        ),
        PCM_24K,
        Limits(),
    )
    assert media == [png(8, 8), committed("2400"), b""]


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        (
            {"type": "input_image", "image_url": "https://example.com/a.png"},
            "item.content[0].image_url: must be a data URI: no pictures are fetched",
        ),
        (
            {"type": "input_image", "image_url": f"data:image/png;base64,{base64(b'text')}"},
            "item.content[0].image_url: is not a JPEG, PNG, WEBP, GIF or BMP picture",
        ),
        ({"type": "input_audio", "audio": "!"}, "item.content[0].audio base64 decode failed"),
        (
            {"type": "input_audio", "audio": base64(bytes(48_000))},
            "item.content[0].audio: lasts 1 s, more than 0.5 s",
        ),
    ],
    ids=["url", "no-picture", "no-base64", "long"],
)
def test_fault_names_the_part(part: Mapping[str, object], fault: str) -> None:
    with pytest.raises(ClientError) as raised:
        read_media(item(part), PCM_24K, Limits(chat_audio_s=0.5))
    assert raised.value.message == fault


def test_media_of_a_message_have_a_bound() -> None:
    part = {"type": "input_audio", "audio": base64(bytes(2 * 2400))}
    limits = Limits(chat_media_bytes=2 * 6400 - 1)
    assert len(read_media(item(part), PCM_24K, limits)) == 1
    with pytest.raises(ClientError) as raised:
        read_media(item(part, part), PCM_24K, limits)
    assert raised.value.message.startswith("item.content[1].audio: brings the media")
