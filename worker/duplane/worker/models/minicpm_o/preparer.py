"""The half of the model without weights: lays out prompts, prepares pictures, computes voices."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace

from PIL.Image import Image

from duplane.worker.models.chat import ChatRequest
from duplane.worker.models.minicpm_o.chat.prompt import (
    Check,
    PreparedChat,
    PromptBuilder,
    go_on,
    prompt_room,
    row_count,
)
from duplane.worker.models.minicpm_o.duplex.inputs import count_rows, prepare_steps, prepare_unit
from duplane.worker.models.minicpm_o.duplex.prompt import DuplexPrompt, lay_out
from duplane.worker.models.minicpm_o.duplex.requested_speech import prepared_speech
from duplane.worker.models.minicpm_o.preparer_parts import PreparerParts
from duplane.worker.models.minicpm_o.types import PreparedImage, WindowRules
from duplane.worker.models.minicpm_o.vocoder.types import VocoderVoice
from duplane.worker.models.types import (
    ConversationOptions,
    ImageError,
    OptionError,
    Unit,
    UnitFailure,
)


@dataclass(frozen=True)
class PreparedConversation:
    """A conversation that can be opened.

    - `rules`: the options of the context window, with the checkpoint's values.
    - `speaks`: whether the conversation has audio. `voice` is the voice to speak with.
    - `ignored`: the options that have no effect.
    """

    options: ConversationOptions
    prompt: DuplexPrompt
    rules: WindowRules
    speaks: bool
    voice: VocoderVoice | None
    ignored: tuple[str, ...]

    @property
    def rows(self) -> int:
        """The number of rows of the prompt."""
        return self.prompt.row_count


class Preparer:
    """Prepares conversations, units and chats of one checkpoint; safe in several threads."""

    def __init__(self, parts: PreparerParts, capacity: int) -> None:
        """Limit each context to `capacity` rows."""
        self._prompts, self._capacity, self._voices = parts.prompts, capacity, parts.voices
        self._prompt_voice, self._windows = parts.prompt_voice, parts.windows

    def conversation(self, options: ConversationOptions) -> PreparedConversation:
        """Lay out the prompt of a conversation and compute its voice.

        Raises `OptionError` for a prompt that does not fit or a voice that cannot be read.
        """
        heard = self._prompt_voice if options.llm_voice is None else options.llm_voice
        room = self._capacity - options.max_new_speak_tokens_per_chunk
        rules = self._windows.chosen(options, self._capacity)
        prompt = lay_out(self._prompts, options.system_prompt, heard, room)
        is_ignored = options.tts_voice is not None and not self._reads_clips
        ignored = ("tts_voice",) if is_ignored else ()
        voice = None
        if options.generate_audio and self._voices is not None:
            voice = self._voices.choose(options.tts_voice, options.llm_voice)
        if options.generate_audio and voice is None:
            ignored = (*ignored, "generate_audio")
        return PreparedConversation(options, prompt, rules, voice is not None, voice, ignored)

    def unit(self, unit: Unit) -> Unit | UnitFailure:
        """Decode a unit's frames that are not decoded yet, and count the rows of its input.

        The texts that it must speak get their ids.
        """
        return self._counted(prepare_unit(self._prompts.pictures, unit))

    def unit_steps(self, unit: Unit) -> Generator[None, None, Unit | UnitFailure]:
        """Do what `unit` does; yield between frames."""
        return self._counted((yield from prepare_steps(self._prompts.pictures, unit)))

    def _counted(self, prepared: Unit | UnitFailure) -> Unit | UnitFailure:
        if isinstance(prepared, UnitFailure):
            return prepared
        if prepared.speech:
            prepared = prepared_speech(self._prompts.tokens, prepared)
        return replace(prepared, rows=sum(count_rows(self._prompts, prepared)))

    def picture(self, picture: Image, max_slices: int | None) -> PreparedImage:
        """Cut an RGB picture of a video for a chat; raises `ImageError`."""
        if self._prompts.pictures is None:
            raise ImageError("this checkpoint has no vision encoder")
        return self._prompts.pictures.prepare_picture(picture, max_slices)

    def chat(self, request: ChatRequest, check: Check = go_on) -> PreparedChat:
        """Check a request and lay out its prompt. Raises `OptionError` that names the bad field.

        `check` is called before every picture, sound and voice; it raises an exception to stop the
        work.
        """
        options = request.options
        room = prompt_room(self._prompts.tokens, options, self._capacity)
        builder = PromptBuilder(self._prompts, options, room, check=check)
        prompt = builder.chat(request.messages)
        check()
        return PreparedChat(
            options=options,
            prompt=prompt,
            prompt_rows=len(prompt.ids),
            image_rows=row_count(prompt.image_bounds),
            audio_rows=row_count(prompt.audio_bounds),
            voice=self._chat_voice(request) if options.generate_audio else None,
            uses_tts_voice=(
                options.generate_audio and options.tts_voice is not None and self._reads_clips
            ),
        )

    @property
    def _reads_clips(self) -> bool:
        return self._voices is not None and self._voices.reads_clips

    def _chat_voice(self, request: ChatRequest) -> VocoderVoice:
        voice = None if self._voices is None else self._voices.choose(request.options.tts_voice)
        if voice is None:
            raise OptionError("generate_audio", "is not possible: this checkpoint has no voice")
        return voice
