"""Watches the stages of a model from outside: time, operations, bytes and waits of every call."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from duplane.tools.bench.host_waits import SyncCount
from duplane.tools.bench.peaks import synchronize
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.tts.sampling import UNIT_DRAWS
from duplane.worker.models.minicpm_o.vocoder.vocoder import Vocoder


class Stage(StrEnum):
    """The stages of a unit, in their order."""

    MEL = "mel"
    AUDIO = "audio encoder"
    VISION = "vision"
    PREFILL = "prefill"
    DECODE = "decode step"
    TALKER = "talker"
    FLOW = "flow"
    HIFT = "HiFT"
    SETTLE = "settle"


Call = Callable[..., Any]


class StageCall(NamedTuple):
    """One call of a method of a stage. Its `seconds` include those of the stages that it calls.

    `size` is the number of rows for the LLM's passes, else of conversations, chunks or tiles.
    """

    stage: Stage
    method: str
    size: int
    seconds: float


class StageWatch:
    """Measures the stages of one unit by wrapping the model's methods.

    The watch waits for the device before and after each stage, so that stages cannot overlap. The
    time of a stage within another stage counts for the inner stage only.
    """

    def __init__(self, model: DuplexModel, device: torch.device) -> None:
        self._device = device
        self._inner = [0.0]
        self.seconds: defaultdict[Stage, float] = defaultdict(float)
        self.flops: defaultdict[Stage, int] = defaultdict(int)
        self.syncs: defaultdict[Stage, int] = defaultdict(int)
        self.calls: defaultdict[Stage, int] = defaultdict(int)
        self.timed: list[StageCall] = []
        """The calls of the last unit, in their order, unless it was counted."""
        self._watched: list[tuple[object, str]] = []
        self.is_counting = False
        self.running: Stage | None = None
        """The innermost stage that runs now."""
        parts = model.parts
        self._stand_around(parts.audio.mel, "compute", lambda *_: Stage.MEL)
        self._stand_around(parts.audio, "launch", lambda *_: Stage.AUDIO)
        self._stand_around(parts.llm, "feed", _fed_stage)
        self._stand_around(parts.llm, "append", lambda *_: Stage.SETTLE)
        self._stand_around(model.sampling, "choose", lambda *_: Stage.DECODE, is_call=False)
        if parts.vision is not None:
            self._stand_around(parts.vision, "encode_all", lambda *_: Stage.VISION)
        if parts.talker is not None:
            self._stand_around(parts.talker, "speak", lambda *_: Stage.TALKER)
        if parts.vocoder is not None:
            self._stand_around(parts.vocoder, "encode", lambda *_: Stage.FLOW)
            self._stand_around(parts.vocoder, "decode_mel", lambda *_: Stage.HIFT)

    def clear(self) -> None:
        """Delete the figures of the last unit."""
        self.seconds.clear()
        self.calls.clear()
        self.timed.clear()

    def remove(self) -> None:
        """Give the model its own methods again."""
        for owner, name in self._watched:
            delattr(owner, name)

    def _stand_around(
        self, owner: object, name: str, stage_of: Callable[..., Stage], *, is_call: bool = True
    ) -> None:
        """Measure a method. If `is_call` is False, its time counts but not its number of calls."""
        call: Call = getattr(owner, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            stage = stage_of(*arguments)
            self.calls[stage] += is_call
            outer, self.running = self.running, stage
            try:
                if self.is_counting:
                    return self._counted(stage, lambda: call(*arguments, **named))
                result, seconds = self._timed(stage, lambda: call(*arguments, **named))
            finally:
                self.running = outer
            self.timed.append(StageCall(stage, name, _size(name, arguments[0]), seconds))
            return result

        setattr(owner, name, watched)
        self._watched.append((owner, name))

    def _counted(self, stage: Stage, call: Call) -> Any:
        flops = FlopCounterMode(display=False, custom_mapping=_packed_products())
        syncs = SyncCount()
        with syncs, flops:
            result = call()
        self.flops[stage] += flops.get_total_flops()
        self.syncs[stage] += syncs.count
        return result

    def _timed(self, stage: Stage, call: Call) -> tuple[Any, float]:
        """Return the result of a call, and its seconds."""
        synchronize(self._device)
        self._inner.append(0.0)
        begin = time.perf_counter()
        result = call()
        synchronize(self._device)
        spent = time.perf_counter() - begin
        self.seconds[stage] += spent - self._inner.pop()
        self._inner[-1] += spent
        return result, spent


def _packed_products() -> dict[Any, Call]:
    """Return how many operations products with packed weights have, by operator of torch.

    Builds of torch without oneDNN lack one of these operators.
    """

    def count(rows: Sequence[int], *_: Any, out_shape: Sequence[int], **__: Any) -> int:
        return 2 * math.prod(rows) * out_shape[-1]

    operators: Any = torch.ops
    names = (operators.quantized, "linear_dynamic_fp16"), (operators.mkldnn, "_linear_pointwise")
    return {getattr(*name): count for name in names if hasattr(*name)}


def _size(method: str, given: Sequence[Any]) -> int:
    return sum(rows for _, rows in given) if method in ("feed", "append") else len(given)


def _fed_stage(counts: Iterable[tuple[int, int]], *_: Any) -> Stage:
    return Stage.DECODE if all(rows == 1 for _, rows in counts) else Stage.PREFILL


def moved_bytes(model: DuplexModel, slots: int) -> dict[Stage, int]:
    """Return the bytes that one call of each stage must read: the weights and the slots' caches.

    This is a lower bound, because it excludes the values between layers. A call of the talker makes
    a unit of speech; a call of the flow makes a chunk.
    """
    parts = model.parts
    llm, audio = parts.llm, parts.audio
    layers = _bytes(llm) - llm.model.embed_tokens.weight.nbytes
    cache = llm.cache
    head = llm.model.embed_tokens.weight.nbytes
    row = cache.memory_bytes // (cache.slot_count * cache.capacity)
    held = row * sum(cache.length(slot) for slot in range(slots))
    per_position = audio.cache.nbytes // (model.slot_count * audio.config.position_count)
    heard = per_position * sum(audio.cache_length(slot) for slot in range(slots))
    found = {
        Stage.AUDIO: _bytes(audio.apm) + _bytes(audio.audio_projection_layer) + heard,
        Stage.PREFILL: layers + held,
        Stage.DECODE: layers + held,
        Stage.SETTLE: layers - (0 if llm.is_tied else head) + held,
    }
    if parts.vision is not None:
        found[Stage.VISION] = _bytes(parts.vision)
    if parts.talker is not None:
        decoder = _bytes(parts.talker.model)
        output = sum(buffer.nbytes for buffer in parts.talker.head_code.buffers())
        found[Stage.TALKER] = UNIT_DRAWS * (decoder + output)
    if isinstance(parts.vocoder, Vocoder):
        found |= _vocoder_bytes(parts.vocoder, slots)
    return found


def _vocoder_bytes(vocoder: Vocoder, slots: int) -> dict[Stage, int]:
    flow = vocoder.flow
    steps = len(flow.decoder.lengths)
    weights = _bytes(flow.encoder) + steps * _bytes(flow.decoder.estimator)
    live = vocoder.live.estimator_attention
    filled = max(vocoder.cached_frames(slot) for slot in range(slots)) / live.shape[-2]
    read = int(live[:slots].nbytes * filled)
    return {Stage.FLOW: weights + read, Stage.HIFT: _bytes(vocoder.stream.hift)}


def _bytes(module: nn.Module) -> int:
    tensors: list[Tensor] = list(module.parameters())
    return sum(tensor.nbytes for tensor in tensors)
