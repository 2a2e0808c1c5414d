"""The talker: from a unit's text and hidden states to speech tokens, many slots at once.

Decides how long it speaks and which tokens it draws; what is said and heard is not its matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from duplane.worker.model.checkpoint import Checkpoint, CheckpointError, field, section
from duplane.worker.model.decoder import Decoder, DecoderConfig, embedding, linear
from duplane.worker.model.graphs import StepGraphs
from duplane.worker.model.sampling import Uniforms
from duplane.worker.model.speech_steps import (
    STEPS,
    SpeechSteps,
)
from duplane.worker.model.transfer import download, upload

PREFIX = "tts."
FULL_ATTENTION, RECOMPUTING = "full_attention", "sliding_recompute"
TURN_ROWS = 2048
"""Rows that a turn may have before it goes on without what was spoken until then.

A unit adds 25 tokens, its text and a mark: a minute of speech, at the usual pace of a voice.
"""
LOOK_STEPS = 5
"""Steps between two looks whether all that may end early have: each look waits for the device."""


@dataclass(frozen=True)
class TalkerConfig:
    """The dimensions of the talker."""

    decoder: DecoderConfig
    llm_hidden_size: int
    text_rows: int
    speech_rows: int
    bos: int
    text_end: int
    capacity: int
    is_recomputing: bool = False
    """Whether a passage of a chat's answer is spoken over the one before alone, computed again."""

    @classmethod
    def from_json(cls, config: Mapping[str, Any], rows: int) -> TalkerConfig:
        """Read `tts_config` of the checkpoint's configuration; a cache has at most `rows` rows."""
        tts = section(config, "tts_config")
        if field(tts, "num_vq", int, 1) != 1:
            raise CheckpointError("tts_config: only one codebook (num_vq 1) is supported")
        if field(tts, "projector_type", str, "mlp") != "mlp":
            raise CheckpointError("tts_config: only projector_type 'mlp' is supported")
        # Where it is absent, the reference's own default holds.
        attention = field(tts, "attention_type", str, RECOMPUTING)
        if attention not in (FULL_ATTENTION, RECOMPUTING):
            raise CheckpointError(
                f"tts_config: attention_type is {attention!r}, only {FULL_ATTENTION!r} and "
                f"{RECOMPUTING!r} are supported"
            )
        return cls(
            decoder=DecoderConfig.from_json(tts, has_head_norm=False, rope_theta=10_000.0),
            llm_hidden_size=field(tts, "llm_dim", int),
            text_rows=field(tts, "num_text_tokens", int),
            speech_rows=field(tts, "num_audio_tokens", int),
            bos=field(tts, "audio_bos_token_id", int),
            text_end=field(tts, "text_eos_token_id", int),
            capacity=min(rows, field(tts, "max_position_embeddings", int, 4096)),
            is_recomputing=attention == RECOMPUTING,
        )


@dataclass(frozen=True)
class Speech:
    """What one slot is to say in this unit: its `condition` rows [rows, width].

    At the end of a turn, and in its first unit, the talker may stop early. Greedy, or at
    temperature 0, the most likely token is taken in place of every draw.
    """

    slot: int
    condition: Tensor
    is_turn_end: bool
    is_greedy: bool
    temperature: float
    uniforms: Uniforms

    @property
    def is_drawn(self) -> bool:
        """Whether its tokens are drawn."""
        return not self.is_greedy and self.temperature > 0


class Projector(nn.Module):
    """Two linear layers from the LLM's width to the talker's."""

    def __init__(self, inputs: int, outputs: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear1 = linear(inputs, outputs, bias=True, device=device, dtype=dtype)
        self.linear2 = linear(outputs, outputs, bias=True, device=device, dtype=dtype)

    def forward(self, states: Tensor) -> Tensor:
        return self.linear2(functional.relu(self.linear1(states)))


class Talker(nn.Module):
    """Llama over text conditions and speech tokens, with a slotted cache that lasts one turn."""

    def __init__(
        self,
        config: Mapping[str, Any],
        slot_count: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        rows: int = TURN_ROWS,
    ) -> None:
        super().__init__()
        self.dims = dims = TalkerConfig.from_json(config, rows)
        width = dims.decoder.hidden_size
        self.emb_text = embedding(dims.text_rows, width, device=device, dtype=dtype)
        self.emb_code = nn.ModuleList(
            [embedding(dims.speech_rows, width, device=device, dtype=dtype)]
        )
        self.projector_semantic = Projector(dims.llm_hidden_size, width, device, dtype)
        self.model = Decoder(dims.decoder, slot_count, dims.capacity, device, dtype)
        self.cache = self.model.cache
        self.head_code = nn.ModuleList([_NormedHead(width, dims.speech_rows, device, dtype)])
        self.end = dims.speech_rows - 1
        self.graphs: StepGraphs[SpeechSteps] | None = None
        self.on_step: Callable[[Tensor], None] | None = None
        """Sees the probabilities of every step; for comparisons with recorded traces."""

    def load(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """Fill the weights; returns the tensors of the talker that have no place in it."""
        unused = checkpoint.load_into(self, PREFIX)
        self.fold()
        return unused

    def fold(self) -> None:
        """Compute what depends on the weights alone; to be called once they are there."""
        cast("_NormedHead", self.head_code[0]).fold()

    def condition(self, ids: Sequence[int], hidden: Tensor, *, is_text_end: bool = False) -> Tensor:
        """Text embeddings plus normed projected hidden states, then BOS: [ids + 1, width].

        With `is_text_end` the mark that no more text follows comes before BOS.
        """
        table = self.emb_text.weight
        marks = [self.dims.text_end, self.dims.bos] if is_text_end else [self.dims.bos]
        rows = self.emb_text(upload([*ids, *marks], table.device))
        if ids:
            projected = self.projector_semantic(hidden.to(table.dtype))
            rows[: len(ids)] += functional.normalize(projected, p=2.0, dim=-1)
        return rows

    def is_turn_start(self, slot: int) -> bool:
        """Whether nothing of the turn has been spoken yet."""
        return self.cache.length(slot) == 0

    def speak(self, speeches: Sequence[Speech]) -> list[list[int]]:
        """Draw each slot's speech tokens, at most 25; slots ascending.

        The last token drawn (the 26th, or the end) is not part of the speech. The cache then
        holds the conditions and the tokens returned, or nothing where the turn has ended. A turn
        that outgrows the cache goes on without what was spoken before.
        """
        counts = [(speech.slot, len(speech.condition)) for speech in speeches]
        for slot, count in counts:
            if self.cache.length(slot) + count + STEPS > self.cache.capacity:
                self.cache.truncate(slot, 0)
        shortest = [
            0 if speech.is_turn_end or self.is_turn_start(speech.slot) else STEPS
            for speech in speeches
        ]
        rows = self.cache.extend(counts)
        starts = [self.cache.length(slot) for slot, _ in counts]
        hidden = self.model(torch.cat([speech.condition for speech in speeches]), rows)[rows.last]
        self.cache.grow([(slot, STEPS - 1) for slot, _ in counts])
        drawn = self._draw(speeches, hidden, starts, shortest)
        spoken: list[list[int]] = []
        for speech, start, tokens in zip(speeches, starts, drawn, strict=True):
            kept = tokens.index(self.end) if self.end in tokens else len(tokens) - 1
            speech.uniforms.advance(kept + 1 if speech.is_drawn else 0)
            self.cache.truncate(speech.slot, 0 if speech.is_turn_end else start + kept)
            spoken.append(tokens[:kept])
        return spoken

    def _draw(
        self,
        speeches: Sequence[Speech],
        hidden: Tensor,
        starts: Sequence[int],
        shortest: Sequence[int],
    ) -> list[list[int]]:
        """Draw up to `STEPS` tokens per slot; what follows an end is without meaning.

        All slots step together, so a slot's draws do not depend on the others; where all of them
        may end early, the host looks now and then whether they have.
        """
        steps, run, places = self._begin(speeches, hidden, starts, shortest)
        look = LOOK_STEPS if self.on_step is None else 1
        for step in range(1, STEPS):
            if step % look == 0 and step >= max(shortest) and self._have_ended(steps, places):
                break
            run()
        drawn = download(steps.drawn if places is None else steps.drawn[places])
        return [_until(tokens, self.end) for tokens in drawn.tolist()]

    def _begin(
        self,
        speeches: Sequence[Speech],
        hidden: Tensor,
        starts: Sequence[int],
        shortest: Sequence[int],
    ) -> tuple[SpeechSteps, Callable[[], None], Tensor | None]:
        """Steps that have drawn the first token, how to do one more, and the rows of the slots."""
        slots, length = [speech.slot for speech in speeches], max(starts) + STEPS - 1
        numbers = upload(_numbers(speeches, shortest), hidden.device, torch.float64)
        found = None
        if self.graphs is not None and self.on_step is None:
            found = self.graphs.find(slots, length)
        if found is None:
            has_draws = any(speech.is_drawn for speech in speeches)
            steps = SpeechSteps(self, slots, length, has_draws=has_draws)
            steps.begin(starts, numbers)
            steps.choose(hidden)
            return steps, steps.run, None
        steps, run = found
        width = len(steps.drawn)
        places, index = [self.cache.capacity] * width, upload(slots, hidden.device)
        for slot, start in zip(slots, starts, strict=True):
            places[slot] = start
        steps.begin(places, _spread(numbers, index, width, 1.0))
        steps.choose(_spread(hidden, index, width, 0.0))
        return steps, run, index

    def _have_ended(self, steps: SpeechSteps, places: Tensor | None) -> bool:
        drawn = steps.drawn if places is None else steps.drawn[places]
        return bool(download((drawn == self.end).any(-1).all()))

    def capture(self, *, is_replayed: bool = True) -> None:
        """Capture the steps as CUDA graphs; `speak` uses them from then on."""
        weights = sum(tensor.nbytes for tensor in self.model.layers.parameters())
        self.graphs = StepGraphs[SpeechSteps](self.cache, weights)

        def make(width: int, length: int) -> SpeechSteps:
            return SpeechSteps(self, range(width), length)

        self.graphs.capture(make, is_replayed=is_replayed)

    def reset(self, slot: int) -> None:
        """Forget everything of the slot."""
        self.cache.reset(slot)


class _NormedHead(nn.Module):
    """The output layer, stored as directions and lengths: weight = g * v / |v|, row by row."""

    weight: Tensor

    def __init__(self, width: int, outputs: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        lengths = torch.empty(outputs, 1, device=device, dtype=torch.float32)
        directions = torch.empty(outputs, width, device=device, dtype=torch.float32)
        stored = nn.Module()
        stored.original0, stored.original1 = _fixed(lengths), _fixed(directions)
        self.parametrizations = nn.ModuleDict({"weight": stored})
        weight = torch.zeros(outputs, width, device=device, dtype=dtype)
        self.register_buffer("weight", weight, persistent=False)

    def fold(self) -> None:
        """Compute the weight, once, after both parts of it have been loaded."""
        stored: Any = self.parametrizations["weight"]
        self.weight.copy_(functional.normalize(stored.original1, dim=-1) * stored.original0)

    def forward(self, states: Tensor) -> Tensor:
        return functional.linear(states, self.weight)


def _fixed(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


def _numbers(speeches: Sequence[Speech], shortest: Sequence[int]) -> list[list[float]]:
    """What the steps need to know of each slot, in one piece, [slots, SETTINGS + STEPS]."""
    return [
        [
            *(speech.temperature or 1.0, fewest, speech.is_drawn),
            *(speech.uniforms.peek(STEPS) if speech.is_drawn else [0.0] * STEPS),
        ]
        for speech, fewest in zip(speeches, shortest, strict=True)
    ]


def _spread(rows: Tensor, index: Tensor, width: int, rest: float) -> Tensor:
    """Rows at their places among `width`; the others are `rest`."""
    wide = torch.full((width, *rows.shape[1:]), rest, dtype=rows.dtype, device=rows.device)
    return wide.index_copy_(0, index, rows)


def _until(tokens: list[int], end: int) -> list[int]:
    """Tokens up to their end, and with it; all of them where there is none."""
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens
