"""Forces a session to the recorded ids, so that one other choice does not change all that follows.

The model computes its choices as always. Those of the LLM are counted if they differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from duplane.tools.golden_replay.check import Check, compare
from duplane.tools.golden_replay.recording import RecordedUniforms
from duplane.worker.models.minicpm_o.duplex.requested_speech import Required
from duplane.worker.models.minicpm_o.duplex.sampling import Choice, SlotSampling
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.tts.sampling import SpeechRequest
from duplane.worker.models.minicpm_o.tts.talker import Talker

MOST_DIFFERENT = 0.25
"""Largest share of the own choices that may differ from the recorded ones."""


class TeacherForcing:
    """The recorded ids and speech tokens of one unit after the other."""

    def __init__(self) -> None:
        self._ids: deque[int] = deque()
        self._tokens: deque[int] = deque()
        self._choice_count = self._different_count = 0

    def begin_unit(self, unit: dict[str, Any]) -> None:
        """Take the ids of the next unit of the trace."""
        self._ids = deque(unit["decoded_ids"])
        speech: dict[str, Any] = unit.get("tts") or {"tokens": ()}
        self._tokens = deque(speech["tokens"])

    def check(self, name: str) -> Check:
        """Check how many of the LLM's own choices differed."""
        share = self._different_count / max(self._choice_count, 1)
        return compare(name, share, 0.0, MOST_DIFFERENT)

    @contextmanager
    def of(self, model: DuplexModel) -> Generator[None]:
        """Force the choices of a model with one conversation."""
        sampling, talker = model.sampling, model.parts.talker
        choose, follow = sampling.choose, sampling._following  # pyright: ignore[reportPrivateUsage] - the own choice is in no result

        def forced(
            conversations: Sequence[SlotSampling],
            logits: Tensor,
            begins_unit: Sequence[bool] = (),
            required: Sequence[Required | None] = (),
        ) -> list[Choice]:
            if self._ids:
                required = [Required(self._ids.popleft(), may_end=False)]
            return choose(conversations, logits, begins_unit, required)

        def following(choice: Choice, required: Required | None) -> Choice:
            if required is not None:
                self._choice_count += 1
                self._different_count += choice.token != required.token
            return follow(choice, required)

        with ExitStack() as stack:
            stack.enter_context(patch.object(sampling, "choose", forced))
            stack.enter_context(patch.object(sampling, "_following", following))
            if talker is not None:
                stack.enter_context(self._of_talker(talker))
            yield

    @contextmanager
    def _of_talker(self, talker: Talker) -> Generator[None]:
        draw = talker.draw

        def forced(requests: Sequence[SpeechRequest]) -> list[list[int]]:
            free = [
                replace(
                    request,
                    is_greedy=False,
                    temperature=request.temperature or 1.0,
                    uniforms=RecordedUniforms(()),
                )
                for request in requests
            ]
            drawn = draw(free)
            for request, tokens in zip(requests, drawn, strict=True):
                request.uniforms.advance(len(tokens) if request.is_drawn else 0)
            return drawn

        def choose(probabilities: Tensor) -> None:
            token = self._tokens.popleft() if self._tokens else talker.end
            probabilities.zero_()
            probabilities[:, token] = 1.0

        with patch.object(talker, "draw", forced), patch.object(talker, "on_step", choose):
            yield
