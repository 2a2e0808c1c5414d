"""What was said in a half duplex session, and the turns that repeat it. Pure."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from duplane.edge.dialects.h_settings import HalfDuplexSettings
from duplane.edge.settings import Limits
from duplane.fabric.audio import SAMPLE_BYTES
from duplane.fabric.v1 import session_pb2


class Exchange(NamedTuple):
    """What the client said (float32 PCM at 16 kHz), and the answer."""

    speech: bytes
    answer: str


class Exchanges:
    """The settings and the finished exchanges of one conversation.

    Together with the next turn they are within the bounds of a chat's history: the oldest exchanges
    are dropped.
    """

    def __init__(self, settings: HalfDuplexSettings, limits: Limits) -> None:
        self.settings = settings
        self._limits = limits
        self._exchanges: deque[Exchange] = deque()
        parts = settings.system.parts
        # A worker gets the voice twice: in the message, and as the voice of the answer.
        self._system_bytes = sum(len(part.audio) for part in parts) + len(settings.config.tts_voice)
        self._system_text_bytes = sum(len(part.text.encode()) for part in parts)
        self.speech_bytes = 0  # of all exchanges
        self._text_bytes = 0

    @property
    def count(self) -> int:
        """The number of exchanges that the model still reads."""
        return len(self._exchanges)

    def max_samples(self, growth: float) -> int:
        """Return how long one utterance may be.

        `growth` is by how much the sound becomes larger at the input rate of the model.
        """
        room = int(self._limits.chat_media_bytes / growth) - self._system_bytes
        longest = int(self._limits.chat_audio_s * 16_000)
        return max(0, min(longest, room // SAMPLE_BYTES))

    def request(self, speech: bytes, growth: float) -> session_pb2.ChatRequest:
        """Return the turn that answers `speech`. Drops exchanges for which there is no room."""
        limits = self._limits
        media_bytes = int(limits.chat_media_bytes / growth)
        part_count = len(self.settings.system.parts) + 1
        while self._exchanges and (
            self._system_bytes + self.speech_bytes + len(speech) > media_bytes
            or self._system_text_bytes + self._text_bytes > limits.chat_text_bytes
            or 2 * self.count + 2 > limits.chat_message_count
            or 2 * self.count + part_count > limits.chat_part_count
        ):
            self._drop()
        request = session_pb2.ChatRequest(config=self.settings.config)
        if self.settings.system.parts:
            request.messages.add().CopyFrom(self.settings.system)
        user, assistant = session_pb2.CHAT_ROLE_USER, session_pb2.CHAT_ROLE_ASSISTANT
        for exchange in self._exchanges:
            heard = session_pb2.ChatPart(audio=exchange.speech)
            request.messages.add(role=user, parts=[heard])
            said = session_pb2.ChatPart(text=exchange.answer)
            request.messages.add(role=assistant, parts=[said])
        request.messages.add(role=user, parts=[session_pb2.ChatPart(audio=speech)])
        return request

    def add(self, speech: bytes, answer: str) -> None:
        """Add a finished exchange. An answer without text is left out, with its question."""
        if not answer:
            return
        self._exchanges.append(Exchange(speech, answer))
        self.speech_bytes += len(speech)
        self._text_bytes += len(answer.encode())

    def halve(self) -> None:
        """Drop the older half: the context of the model has no room for all exchanges."""
        for _ in range((self.count + 1) // 2):
            self._drop()

    def _drop(self) -> None:
        dropped = self._exchanges.popleft()
        self.speech_bytes -= len(dropped.speech)
        self._text_bytes -= len(dropped.answer.encode())
