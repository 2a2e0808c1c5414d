"""Half duplex: the user and the model speak alternately, and one context keeps what both said.

A window bounds the context. If the context has more rows than the high mark, the oldest exchanges
(an exchange is an utterance and its answer) are dropped, until the context has no more rows than
the low mark. The rows after the dropped exchanges move up, and their keys are rotated to the new
positions. The reference counts the first exchange as part of the prompt, so it can drop a part of
an exchange; this module drops only whole exchanges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from duplane.worker.models.chat import (
    ChatAudio,
    ChatMessage,
    ChatOptions,
    ChatPart,
    ChatRole,
)
from duplane.worker.models.minicpm_o.audio.mel import FIRST_UNIT_FILL
from duplane.worker.models.minicpm_o.chat.chats import Chats
from duplane.worker.models.minicpm_o.chat.prompt import ChatPrompt, PromptBuilder
from duplane.worker.models.minicpm_o.llm.kv_cache import Slide
from duplane.worker.models.minicpm_o.llm.sampling import Uniforms
from duplane.worker.models.minicpm_o.loader import ModelParts
from duplane.worker.models.types import OptionError

USER_MARK = "<|im_start|>user\n"
ANSWER_END = "<|tts_eos|><|im_end|>\n"


@dataclass(frozen=True)
class TextWindow:
    """A context above `high_tokens` is cut, in whole exchanges, to at most `low_tokens`.

    Raises `OptionError`.
    """

    high_tokens: int = 8000
    low_tokens: int = 6000

    def __post_init__(self) -> None:
        if not 0 <= self.low_tokens <= self.high_tokens:
            raise OptionError(
                "text_window_low_tokens",
                f"is {self.low_tokens}, not between 0 and {self.high_tokens}",
            )


class HalfDuplex:
    """One half-duplex conversation in a slot. `DuplexModel.chat_step` answers, `close` ends it."""

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
        """Use a clean slot. The marks of the window are lowered if the context is smaller."""
        self._chats, self._parts, self._slot, self._options = chats, parts, slot, options
        self._window = window or TextWindow()
        self._end_rows = len(parts.tokens.encode(ANSWER_END))
        self._prompt_rows = 0  # rows of the system prompt, which is never dropped
        self._exchange_rows: list[int] = []  # rows of the finished exchanges, oldest first
        self._has_heard = False
        self._has_answered = False
        voice = None
        if options.generate_audio and parts.voices is not None:
            voice = parts.voices.choose(options.tts_voice)
        chats.begin(slot, options, voice=voice, uniforms=uniforms)
        self._builder = self._next_prompt()

    def _next_prompt(self) -> PromptBuilder:
        room = self._chats.prompt_room(self._options) - self._prompt_rows
        return PromptBuilder(self._parts.prompts, self._options, room, is_blockwise=False)

    @property
    def context_length(self) -> int:
        """The number of rows in the slot's context."""
        return self._parts.llm.cache.length(self._slot)

    @property
    def prompt(self) -> ChatPrompt:
        """The prompt of the running answer. If no answer runs, the prompt of the next one."""
        return self._builder.prompt

    def instruct(self, parts: Sequence[ChatPart]) -> int:
        """Add the system prompt, which must come first; return its number of rows."""
        prompt = self._builder.chat([ChatMessage(ChatRole.SYSTEM, tuple(parts))])
        self._prompt_rows = len(prompt.ids)
        return self._prompt_rows

    def hear(self, parts: Sequence[ChatPart]) -> int:
        """Add an utterance of the user and begin to answer; return the rows up to the answer."""
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
        """End the last exchange, build the prompt of the next one, and make room for it."""
        self._builder = self._next_prompt()
        self._builder.add_text(ANSWER_END)
        self._add_turn(said)
        before = self._prompt_rows + sum(self._exchange_rows)
        self._exchange_rows.append(self.context_length + self._end_rows - before)
        if not self._make_room(len(self.prompt.ids) - self._end_rows):
            # The last answer was dropped, so the next prompt does not begin with the end mark of
            # that answer.
            self._builder = self._next_prompt()
            self._add_turn(said)

    def _add_turn(self, said: Sequence[ChatPart]) -> None:
        self._builder.add_text(USER_MARK)
        self._builder.message(said, "parts")

    def _make_room(self, rows: int) -> bool:
        """Drop exchanges until `rows` and an answer fit; return whether the last exchange stays.

        The end of the last answer counts as part of its exchange, but is not in the context yet.
        """
        room = self._chats.prompt_room(self._options) + 1 - self._options.max_new_tokens
        high = min(self._window.high_tokens, max(room, 0))
        low = min(self._window.low_tokens, high)
        length = self._prompt_rows + sum(self._exchange_rows) + rows
        if length <= high:
            return True
        dropped = 0
        while self._exchange_rows and length > low:
            length -= self._exchange_rows[0]
            dropped += self._exchange_rows.pop(0)
        kept = min(self._prompt_rows + dropped, self.context_length)
        self._parts.llm.splice(self._slot, Slide(kept, self._prompt_rows, self._prompt_rows))
        return bool(self._exchange_rows)

    def _filled(self, part: ChatPart) -> ChatPart:
        """Pad the start of the first audio to the length of the first unit in a duplex session."""
        if not isinstance(part, ChatAudio) or self._has_heard:
            return part
        self._has_heard = True
        missing = max(0, FIRST_UNIT_FILL - len(part.samples))
        return ChatAudio(np.pad(part.samples, (missing, 0)))
