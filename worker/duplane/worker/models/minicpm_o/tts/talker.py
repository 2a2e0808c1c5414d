"""The talker: a Llama decoder that maps text conditions to speech tokens, for a batch of slots.

Parameter names are those under the checkpoint's prefix `tts.`. Source: class `MiniCPMTTS` of
`MiniCPMO45/modeling_minicpmo_unified.py` in OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from duplane.worker.models.minicpm_o.checkpoint import Checkpoint, CheckpointError, field, section
from duplane.worker.models.minicpm_o.layers import embedding, linear
from duplane.worker.models.minicpm_o.llm.attention import Rows
from duplane.worker.models.minicpm_o.llm.decoder import Decoder, DecoderConfig
from duplane.worker.models.minicpm_o.llm.language_model import PREFILL_ROWS
from duplane.worker.models.minicpm_o.transfer import download, upload
from duplane.worker.models.minicpm_o.tts.sampling import UNIT_DRAWS, DrawState, SpeechRequest

PREFIX = "tts."
FULL_ATTENTION, RECOMPUTING = "full_attention", "sliding_recompute"
TURN_ROWS = 2048
"""Maximum number of rows of a turn in the cache. A longer turn continues without its earlier rows.

A unit adds 25 tokens, its text and one mark, so this is about a minute of speech.
"""
CHECK_STEPS = 5
"""Steps between two checks whether all slots have ended. Each check waits for the device."""


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
    """Whether a passage of a chat answer attends only to the previous passage, which is fed again.
    """

    @classmethod
    def from_json(cls, config: Mapping[str, Any], rows: int) -> TalkerConfig:
        """Read `tts_config` of config.json; the cache gets at most `rows` rows."""
        tts = section(config, "tts_config")
        if field(tts, "num_vq", int, 1) != 1:
            raise CheckpointError("tts_config: only one codebook (num_vq 1) is supported")
        if field(tts, "projector_type", str, "mlp") != "mlp":
            raise CheckpointError("tts_config: only projector_type 'mlp' is supported")
        # An absent value means the default of the reference.
        attention = field(tts, "attention_type", str, RECOMPUTING)
        if attention not in (FULL_ATTENTION, RECOMPUTING):
            raise CheckpointError(
                f"tts_config: attention_type is {attention!r}, only {FULL_ATTENTION!r} and "
                f"{RECOMPUTING!r} are supported"
            )
        return cls(
            decoder=DecoderConfig.from_json(tts, has_head_norm=False),
            llm_hidden_size=field(tts, "llm_dim", int),
            text_rows=field(tts, "num_text_tokens", int),
            speech_rows=field(tts, "num_audio_tokens", int),
            bos=field(tts, "audio_bos_token_id", int),
            text_end=field(tts, "text_eos_token_id", int),
            capacity=min(rows, field(tts, "max_position_embeddings", int, 4096)),
            is_recomputing=attention == RECOMPUTING,
        )


class Projector(nn.Module):
    """Two linear layers from the LLM's width to the talker's width."""

    def __init__(self, inputs: int, outputs: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear1 = linear(inputs, outputs, bias=True, device=device, dtype=dtype)
        self.linear2 = linear(outputs, outputs, bias=True, device=device, dtype=dtype)

    def forward(self, states: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]."""
        return self.linear2(functional.relu(self.linear1(states)))


class SpeechBlock(Protocol):
    """What draws speech in passes of fixed sizes: a `TalkBlock`."""

    def draw(self, requests: Sequence[SpeechRequest], /) -> Tensor | None: ...


class Talker(nn.Module):
    """Embeddings, decoder and output layer, with a slotted cache whose rows last for one turn."""

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
        self.head_code = nn.ModuleList([WeightNormHead(width, dims.speech_rows, device, dtype)])
        self.end = dims.speech_rows - 1
        self.block: SpeechBlock | None = None
        self.on_step: Callable[[Tensor], None] | None = None
        """A function that gets the probabilities of every step, for comparison with traces."""

    def load(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """Fill the weights; return the names of the talker's tensors that are not used."""
        unused = checkpoint.load_into(self, PREFIX)
        self.fold()
        return unused

    def fold(self) -> None:
        """Compute the weight of the output layer. Call this after the parameters are set."""
        cast("WeightNormHead", self.head_code[0]).fold()

    def condition(
        self, ids: Sequence[int], hidden: Iterable[Tensor], *, is_text_end: bool = False
    ) -> Tensor:
        """Return condition rows [ids + 1, width] for the text `ids`.

        `hidden` has the LLM's state of each id. Each row is the sum of a text embedding and the
        normalised projection of a state. The last row is the mark that begins audio. If
        `is_text_end`, a row with the mark of the end of the text precedes that row.
        """
        table = self.emb_text.weight
        marks = [self.dims.text_end, self.dims.bos] if is_text_end else [self.dims.bos]
        rows = self.emb_text(upload([*ids, *marks], table.device))
        if ids:
            projected = self.projector_semantic(torch.stack(tuple(hidden)).to(table.dtype))
            rows[: len(ids)] += functional.normalize(projected, p=2.0, dim=-1)
        return rows

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """Return the embeddings [tokens, width] of speech tokens."""
        return self.emb_code[0](upload(tokens, self.emb_text.weight.device, torch.long))

    def speak(self, requests: Sequence[SpeechRequest]) -> list[list[int]]:
        """Return at most 25 tokens for each slot: those of one unit. The slots must be ascending.

        Inside a turn a unit has 25 tokens; in the first and the last unit of a turn, speech may end
        earlier. The last drawn token is not returned. Afterwards the cache holds the conditions and
        the returned tokens; after the end of a turn it is empty.
        """
        for request in requests:
            self.make_room(request.slot, len(request.condition) + UNIT_DRAWS)
        bounded = [
            request
            if request.is_turn_end or self.cache.length(request.slot) == 0
            else replace(request, fewest=UNIT_DRAWS)
            for request in requests
        ]
        drawn = self.draw(bounded)
        for request in requests:
            if request.is_turn_end:
                self.cache.truncate(request.slot, 0)
        return [tokens[:-1] for tokens in drawn]

    def repeat(self, slot: int, spoken: Sequence[tuple[Tensor, Sequence[int]]]) -> None:
        """Add the conditions and tokens of units that were spoken before, all of one open turn.

        The cache is then as after `speak`: old rows of the turn are dropped at the same units.
        """
        rows: list[Tensor] = []
        for condition, tokens in spoken:
            held = self.cache.length(slot) + sum(map(len, rows))
            if not self.has_room(held, len(condition)):
                self.cache.truncate(slot, 0)
                rows.clear()
            rows += [condition, self.embed(tokens)]
        embeds = torch.cat(rows)
        for start in range(0, len(embeds), PREFILL_ROWS):
            part = embeds[start : start + PREFILL_ROWS]
            self.model(part, self.cache.extend([(slot, len(part))]))

    def has_room(self, held: int, rows: int) -> bool:
        """Whether a unit with a condition of `rows` rows fits into a cache that holds `held`."""
        return held + rows + UNIT_DRAWS <= self.cache.capacity

    def make_room(self, slot: int, rows: int) -> None:
        """Drop the rows of the slot if `rows` more do not fit into its cache."""
        if self.cache.length(slot) + rows > self.cache.capacity:
            self.cache.truncate(slot, 0)

    def draw(self, requests: Sequence[SpeechRequest]) -> list[list[int]]:
        """Feed each condition; return the tokens drawn, up to and including the end of speech.

        The slots must be ascending. Afterwards the cache holds the conditions and all drawn tokens
        but the last. All slots are computed together; their tokens do not depend on each other.
        """
        starts = [self.cache.length(request.slot) for request in requests]
        tokens = None
        if self.block is not None and self.on_step is None:
            tokens = self.block.draw(requests)
        if tokens is None:
            tokens = self._draw_plainly(requests)
        found: list[list[int]] = download(tokens).tolist()
        drawn: list[list[int]] = []
        for request, start, row in zip(requests, starts, found, strict=True):
            end = row.index(self.end) + 1 if self.end in row else len(row)
            kept = row[: min(end, request.most)]
            request.uniforms.advance(len(kept) if request.is_drawn else 0)
            self.cache.truncate(request.slot, start + len(request.condition) + len(kept) - 1)
            drawn.append(kept)
        return drawn

    def _draw_plainly(self, requests: Sequence[SpeechRequest]) -> Tensor:
        """Draw tokens [slots, n] in passes of the real size, until all slots have ended."""
        counts = [(request.slot, len(request.condition)) for request in requests]
        most = max(request.most for request in requests)
        state = DrawState.of(requests, most, self.cache.keys.device)
        condition = torch.cat([request.condition for request in requests])
        self.begin(state, condition, self.cache.extend(counts))
        fewest = max(request.fewest for request in requests)
        check = CHECK_STEPS if self.on_step is None else 1
        for step in range(1, most):
            is_checked = step % check == 0 and step >= fewest
            if is_checked and download(state.have_ended(self.end).all()):
                break
            self.step(state, self.cache.extend([(slot, 1) for slot, _ in counts]))
        return state.tokens

    def begin(self, state: DrawState, condition: Tensor, rows: Rows) -> None:
        """Feed condition rows, and draw the first token of each slot."""
        self._choose(state, self.model(condition, rows)[rows.last])

    def step(self, state: DrawState, rows: Rows) -> None:
        """Feed the last token of each slot into these rows, and draw the next one."""
        self._choose(state, self.model(self.emb_code[0](state.last.clamp(min=0)), rows))

    def _choose(self, state: DrawState, hidden: Tensor) -> None:
        state.choose(self.head_code[0](hidden).float(), self.end, self.on_step)


class WeightNormHead(nn.Module):
    """A linear layer stored with weight norm: each row of the weight is g * v / |v|."""

    weight: Tensor

    def __init__(self, width: int, outputs: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        stored = nn.Module()
        for name, columns in (("original0", 1), ("original1", width)):
            values = torch.empty(outputs, columns, device=device, dtype=torch.float32)
            stored.register_parameter(name, nn.Parameter(values, requires_grad=False))
        self.parametrizations = nn.ModuleDict({"weight": stored})
        weight = torch.zeros(outputs, width, device=device, dtype=dtype)
        self.register_buffer("weight", weight, persistent=False)

    def fold(self) -> None:
        """Compute the weight from both stored parts."""
        stored: Any = self.parametrizations["weight"]
        self.weight.copy_(functional.normalize(stored.original1, dim=-1) * stored.original0)

    def forward(self, states: Tensor) -> Tensor:
        """Map [..., width] to [..., outputs]."""
        return functional.linear(states, self.weight)
