"""Half duplex: whole utterances in, answers out, in turns over one context that is kept.

A window keeps the context small: when it has more rows than a high mark, the oldest rounds go, an
utterance and its answer each, until it has no more than a low mark. What follows them moves up,
its keys turned to their new places. The reference counts the first round as part of the prompt,
and what it cuts away begins there, so that it tears rounds apart; here whole rounds go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from duplane.worker.model.types import OptionError
from duplane.worker.model.windows import Slide

USER_MARK = "<|im_start|>user\n"
ANSWER_END = "<|tts_eos|><|im_end|>\n"


@dataclass(frozen=True)
class TextWindow:
    """When rounds are dropped, and how many rows may stay. Raises `OptionError`."""

    high_tokens: int = 8000
    low_tokens: int = 6000

    def __post_init__(self) -> None:
        if not 0 <= self.low_tokens <= self.high_tokens:
            raise OptionError(
                "text_window_low_tokens",
                f"is {self.low_tokens}, not between 0 and {self.high_tokens}",
            )


class HalfDuplex:
    """One half-duplex conversation in a slot. `Chats.step` runs its answers, `close` ends it."""

    def __init__(
        self,
        chats: Chats,
        parts: ModelParts,
        slot: int,
        options: ChatOptions,
        *,
        window: TextWindow | None = None,
        uniforms: Uniforms | None = None,
    ) -> None:
        """Take a clean slot. A context smaller than the window's marks moves before it is full."""
        self._chats, self._parts, self._slot, self._options = chats, parts, slot, options
        self._window = window or TextWindow()
        self._end_rows = len(parts.tokens.encode(ANSWER_END))
        self._prompt_rows = 0  # what the model is told it is; never dropped
        self._round_rows: list[int] = []  # of the rounds that are over, oldest first
        self._has_heard = False
        self._has_answered = False
        chats.begin(slot, options, uniforms=uniforms)
        self._builder = self._next_prompt()

    def _next_prompt(self) -> PromptBuilder:
        room = self._chats.prompt_room(self._options) - self._prompt_rows
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
        """Add what the model is told it is, at first; returns the rows it will have been fed."""
        prompt = self._builder.chat([ChatMessage(ChatRole.SYSTEM, tuple(parts))])
        self._prompt_rows = len(prompt.ids)
        return self._prompt_rows

    def hear(self, parts: Sequence[ChatPart]) -> int:
        """Add the user's turn and begin to answer; returns the rows before the answer mark."""
        said = [self._filled(part) for part in parts]
        if self._has_answered:
            self._take_turn(said)
        else:
            self._add_turn(said)
        length = self.context_length + len(self.prompt.ids)
        self._chats.answer(self._slot, self.prompt)
        self._has_answered = True
        return length

    def _take_turn(self, said: Sequence[ChatPart]) -> None:
        """End the round before, lay out the next, and make room for it."""
        self._builder = self._next_prompt()
        self._builder.say(ANSWER_END)
        self._add_turn(said)
        before = self._prompt_rows + sum(self._round_rows)
        self._round_rows.append(self.context_length + self._end_rows - before)
        if not self._make_room(len(self.prompt.ids) - self._end_rows):
            self._builder = self._next_prompt()  # the answer whose end it told is gone
            self._add_turn(said)

    def _add_turn(self, said: Sequence[ChatPart]) -> None:
        self._builder.say(USER_MARK)
        self._builder.message(said, "parts")

    def _make_room(self, rows: int) -> bool:
        """Drop rounds, so that so many rows and an answer fit; whether the last one stays.

        The end of the last answer is counted with its round, but is not in the context yet.
        """
        room = self._chats.prompt_room(self._options) + 1 - self._options.max_new_tokens
        high = min(self._window.high_tokens, max(room, 0))
        low = min(self._window.low_tokens, high)
        length = self._prompt_rows + sum(self._round_rows) + rows
        if length <= high:
            return True
        dropped = 0
        while self._round_rows and length > low:
            length -= self._round_rows[0]
            dropped += self._round_rows.pop(0)
        kept = min(self._prompt_rows + dropped, self.context_length)
        self._parts.llm.splice(self._slot, Slide(kept, self._prompt_rows, self._prompt_rows))
        return bool(self._round_rows)

    def _filled(self, part: ChatPart) -> ChatPart:
        """The first thing that is heard is as long as the first unit of a duplex session."""
        if not isinstance(part, ChatAudio) or self._has_heard:
            return part
        self._has_heard = True
        missing = max(0, FIRST_UNIT_FILL - len(part.samples))
        return ChatAudio(np.pad(part.samples, (missing, 0)))
