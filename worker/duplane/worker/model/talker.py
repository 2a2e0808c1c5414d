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
from duplane.worker.model.sampling import Uniforms, draw

PREFIX = "tts."
TOKENS_PER_UNIT = 25
STEPS = TOKENS_PER_UNIT + 1
REPETITION_PENALTY = 1.05
REPETITION_WINDOW = 16
FULL_ATTENTION, RECOMPUTING = "full_attention", "sliding_recompute"


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
    def from_json(cls, config: Mapping[str, Any]) -> TalkerConfig:
        """Read `tts_config` of the checkpoint's configuration."""
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
            capacity=field(tts, "max_position_embeddings", int, 4096),
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
        self, config: Mapping[str, Any], slot_count: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.dims = dims = TalkerConfig.from_json(config)
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
        rows = self.emb_text(torch.tensor([*ids, *marks]).to(table.device))
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
        starts = [self.cache.length(slot) + count for slot, count in counts]
        rows = self.cache.extend(counts)
        hidden = self.model(torch.cat([speech.condition for speech in speeches]), rows)[rows.last]
        drawn = self._draw_steps(speeches, hidden, shortest)
        spoken: list[list[int]] = []
        for speech, start, tokens in zip(speeches, starts, drawn, strict=True):
            kept = tokens.index(self.end) if self.end in tokens else len(tokens) - 1
            speech.uniforms.advance(kept + 1 if speech.is_drawn else 0)
            self.cache.truncate(speech.slot, 0 if speech.is_turn_end else start + kept)
            spoken.append(tokens[:kept])
        return spoken

    def _draw_steps(
        self, speeches: Sequence[Speech], hidden: Tensor, shortest: Sequence[int]
    ) -> list[list[int]]:
        """Draw up to `STEPS` tokens per slot; what follows an end is without meaning.

        All slots step together until all have ended, so a slot's draws do not depend on the
        others, and the host waits for the device only where an early end is possible.
        """
        device = hidden.device
        plan = _Plan.of(speeches, shortest, device)
        drawn = torch.zeros(len(speeches), STEPS, dtype=torch.long, device=device)
        has_ended = torch.zeros(len(speeches), dtype=torch.bool, device=device)
        step = 0
        for step in range(STEPS):
            if step:
                rows = self.cache.extend([(speech.slot, 1) for speech in speeches])
                hidden = self.model(self.emb_code[0](drawn[:, step - 1]), rows)
            scores = self.head_code[0](hidden).float() / plan.temperature
            scores = penalise(scores, drawn[:, max(0, step - REPETITION_WINDOW) : step])
            scores[:, self.end] += torch.where(step < plan.shortest, float("-inf"), 0.0)
            drawn[:, step] = self._choose(scores, plan, step)
            has_ended |= drawn[:, step] == self.end
            if min(shortest) <= step and bool(has_ended.all()):
                break
        return drawn[:, : step + 1].cpu().numpy().tolist()

    def _choose(self, scores: Tensor, plan: _Plan, step: int) -> Tensor:
        likeliest = scores.argmax(-1)
        if self.on_step is None and not plan.has_draws:
            return likeliest
        probabilities = scores.softmax(-1)
        if self.on_step is not None:
            self.on_step(probabilities)
        return torch.where(plan.is_drawn, draw(probabilities, plan.uniforms[:, step]), likeliest)

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


@dataclass(frozen=True)
class _Plan:
    """The per-slot numbers of one `speak`, on the device, rows in its order."""

    temperature: Tensor
    shortest: Tensor
    uniforms: Tensor
    is_drawn: Tensor
    has_draws: bool

    @staticmethod
    def of(speeches: Sequence[Speech], shortest: Sequence[int], device: torch.device) -> _Plan:
        is_drawn = [speech.is_drawn for speech in speeches]
        ahead = [
            speech.uniforms.peek(STEPS) if drawn else [0.0] * STEPS
            for speech, drawn in zip(speeches, is_drawn, strict=True)
        ]
        temperatures = [speech.temperature or 1.0 for speech in speeches]
        return _Plan(
            temperature=torch.tensor(temperatures).to(device).unsqueeze(-1),
            shortest=torch.tensor(shortest).to(device),
            uniforms=torch.tensor(ahead, dtype=torch.float64).to(device),
            is_drawn=torch.tensor(is_drawn).to(device),
            has_draws=any(is_drawn),
        )


def penalise(scores: Tensor, recent: Tensor) -> Tensor:
    """Push down ids `[rows, ids]` by how often each occurs in `recent` `[rows, tokens]`.

    Positive scores are divided by the penalty, negative ones multiplied, once per occurrence.
    """
    if not recent.shape[1]:
        return scores
    counts = (recent.unsqueeze(-1) == recent.unsqueeze(-2)).sum(-1)
    factors = REPETITION_PENALTY ** counts.to(scores.dtype)
    chosen = scores.gather(1, recent)
    return scores.scatter(1, recent, torch.where(chosen < 0, chosen * factors, chosen / factors))
