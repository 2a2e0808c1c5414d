"""The conversation of a half duplex session: its turns, and what is dropped at a bound."""

from __future__ import annotations

from duplane.edge.dialects.h_settings import HalfDuplexSettings
from duplane.edge.session.exchanges import Exchanges
from duplane.edge.settings import Limits
from duplane.fabric.v1 import session_pb2

SECOND = bytes(4 * 16_000)


def exchanges(limits: Limits, voice: bytes = b"") -> Exchanges:
    system = session_pb2.ChatMessage(role=session_pb2.CHAT_ROLE_SYSTEM)
    system.parts.add(text="Be brief.")
    if voice:
        system.parts.add(audio=voice)
    return Exchanges(HalfDuplexSettings(session_pb2.Open(), system=system), limits)


def spoken_ms(request: session_pb2.ChatRequest) -> list[int]:
    """Return the lengths of the user's messages."""
    user = session_pb2.CHAT_ROLE_USER
    return [len(each.parts[0].audio) // 64 for each in request.messages if each.role == user]


def test_a_turn_has_all_exchanges_before_it() -> None:
    history = exchanges(Limits())
    history.add(SECOND, "One.")
    history.add(2 * SECOND, "Two.")
    request = history.request(3 * SECOND, 1.0)
    assert spoken_ms(request) == [1000, 2000, 3000]
    texts = [part.text for message in request.messages for part in message.parts if part.text]
    assert texts == ["Be brief.", "One.", "Two."]
    assert request.messages[-1].role == session_pb2.CHAT_ROLE_USER


def test_an_answer_without_text_is_left_out() -> None:
    history = exchanges(Limits())
    history.add(SECOND, "")
    assert spoken_ms(history.request(SECOND, 1.0)) == [1000]


def test_the_oldest_exchanges_are_dropped_at_each_bound() -> None:
    kept = [
        (Limits(chat_media_bytes=3 * len(SECOND)), b"", 1.0),
        (Limits(chat_media_bytes=4 * len(SECOND)), SECOND, 1.0),
        (Limits(chat_media_bytes=9 * len(SECOND) // 2), b"", 1.5),
        (Limits(chat_text_bytes=len("Be brief.") + 2 * len("No. 3")), b"", 1.0),
        (Limits(chat_message_count=6), b"", 1.0),
        (Limits(chat_part_count=6), b"", 1.0),
    ]
    assistant = session_pb2.CHAT_ROLE_ASSISTANT
    for limits, voice, growth in kept:
        history = exchanges(limits, voice)
        for number in range(4):
            history.add(SECOND, f"No. {number}")
        request = history.request(SECOND, growth)
        answers = [message for message in request.messages if message.role == assistant]
        assert [each.parts[0].text for each in answers] == ["No. 2", "No. 3"], limits


def test_a_conversation_that_is_too_long_for_the_model_loses_its_older_half() -> None:
    history = exchanges(Limits())
    for number in range(3):
        history.add(SECOND, f"No. {number}")
    history.halve()
    assert history.count == 1
    history.halve()
    history.halve()
    assert history.count == 0


def test_an_utterance_has_room_beside_the_system_message() -> None:
    limits = Limits(chat_media_bytes=4 * len(SECOND))
    assert exchanges(limits).max_samples(1.0) == 4 * 16_000
    assert exchanges(limits, SECOND).max_samples(1.0) == 3 * 16_000
    assert exchanges(limits, SECOND).max_samples(2.0) == 16_000
    assert exchanges(Limits(chat_audio_s=2.0)).max_samples(1.0) == 2 * 16_000
