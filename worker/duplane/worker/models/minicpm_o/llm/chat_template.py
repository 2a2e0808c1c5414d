"""The checkpoint's chat template, which renders text messages to the text of a prompt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase


class ChatTemplate:
    """Renders messages with the template of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer

    def render(self, messages: Iterable[tuple[str, str]], *, is_thinking: bool = False) -> str:
        """Return the prompt of `(role, text)` messages, without the mark that begins an answer.

        Raises ValueError if the template refuses the messages.
        """
        turns = [{"role": role, "content": text} for role, text in messages]
        try:
            rendered = self._tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=False, enable_thinking=is_thinking
            )
        except TemplateError as error:
            raise ValueError(str(error)) from error
        return cast("str", rendered)
