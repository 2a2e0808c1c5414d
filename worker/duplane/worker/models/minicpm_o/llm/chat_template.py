"""The checkpoint's chat template, which renders text messages to the text of a prompt."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from duplane.worker.models.minicpm_o.checkpoint import CheckpointError, read_json
from duplane.worker.models.minicpm_o.llm.tokenizer import CONFIG_FILE

TEMPLATE_FILE = "chat_template.jinja"


class ChatTemplate:
    """Renders messages with the template of the checkpoint's configuration."""

    def __init__(self, template: str) -> None:
        # The tokenizer needs no vocabulary, because only its template is used.
        self._renderer: Any = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(BPE()), chat_template=template
        )

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate | None:
        """Read the template; return None if the checkpoint has none."""
        path = directory / TEMPLATE_FILE
        if path.exists():
            return cls(path.read_text(encoding="utf-8"))
        template = read_json(directory / CONFIG_FILE).get("chat_template")
        if template is not None and not isinstance(template, str):
            raise CheckpointError(f"{CONFIG_FILE}: chat_template is not one text")
        return None if template is None else cls(template)

    def render(self, messages: Iterable[tuple[str, str]], *, is_thinking: bool = False) -> str:
        """Return the prompt of `(role, text)` messages, without the mark that begins an answer.

        Raises ValueError if the template refuses the messages.
        """
        turns = [{"role": role, "content": text} for role, text in messages]
        try:
            rendered = self._renderer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=False, enable_thinking=is_thinking
            )
        except TemplateError as error:
            raise ValueError(str(error)) from error
        return cast("str", rendered)
