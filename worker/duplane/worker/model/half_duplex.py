"""Half duplex: whole utterances in, answers out, in turns over one context that is kept.

The context is not windowed: an utterance that does not fit is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from duplane.worker.model.chat import Chats
from duplane.worker.model.chat_prompt import ChatPrompt, PromptBuilder
from duplane.worker.model.chat_types import (
    ChatAudio,
    ChatMessage,
    ChatOptions,
    ChatPart,
    ChatRole,
)
from duplane.worker.model.mel import FIRST_UNIT_FILL
from duplane.worker.model.parts import ModelParts
from duplane.worker.model.sampling import Uniforms

USER_MARK = "<|im_start|>user\n"
ANSWER_END = "<|tts_eos|><|im_end|>\n"


class HalfDuplex:
    """One half-duplex conversation in a slot. `Chats.step` runs its answers, `close` ends it."""

    def __init__(
        self,
        chats: Chats,
        parts: ModelParts,
        slot: int,
        options: ChatOptions,
        *,
        uniforms: Uniforms | None = None,
    ) -> None:
        self._chats, self._parts, self._slot, self._options = chats, parts, slot, options
        self._has_answered = False
        self._has_heard = False
        chats.begin(slot, options, uniforms=uniforms)
        self._builder = self._next_prompt()

    def _next_prompt(self) -> PromptBuilder:
        room = self._chats.prompt_room(self._options) - self.context_length
        return PromptBuilder(self._parts, self._options, room, is_blockwise=False)

    @property
    def context_length(self) -> int:
        """Rows of the slot's context."""
        return self._parts.llm.cache.length(self._slot)

    @property
    def prompt(self) -> ChatPrompt:
        """What is fed with the next answer, or was with the one that runs."""
        return self._builder.prompt

    def instruct(self, parts: Sequence[ChatPart]) -> int:
        """Add what the model is told it is; returns the rows it will have been fed with it."""
        prompt = self._builder.chat([ChatMessage(ChatRole.SYSTEM, tuple(parts))])
        return self.context_length + len(prompt.ids)

    def hear(self, parts: Sequence[ChatPart]) -> int:
        """Add the user's turn and begin to answer; returns the rows before the answer mark."""
        if self._has_answered:
            self._builder = self._next_prompt()
            self._builder.say(ANSWER_END)
        self._builder.say(USER_MARK)
        self._builder.message([self._filled(part) for part in parts], "parts")
        prompt = self._builder.prompt
        length = self.context_length + len(prompt.ids)
        self._chats.answer(self._slot, prompt)
        self._has_answered = True
        return length

    def _filled(self, part: ChatPart) -> ChatPart:
        """The first thing that is heard is as long as the first unit of a duplex session."""
        if not isinstance(part, ChatAudio) or self._has_heard:
            return part
        self._has_heard = True
        missing = max(0, FIRST_UNIT_FILL - len(part.samples))
        return ChatAudio(np.pad(part.samples, (missing, 0)))
