"""`duplane bench launches`: the number of kernels that each stage of the model launches.

Operations are counted on a CPU, but in the form in which a GPU would run them. An operation that
consists of others counts as its parts; views and allocations do not count. An operation for which
there is a Triton kernel counts as this kernel, attention as its two kernels. Batches are padded to
few sizes, as on a GPU.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from duplane.tools.bench.model import (
    KINDS,
    SEEING,
    TEXT_TOKENS,
    Inputs,
    model_directory,
    run_units,
)
from duplane.tools.bench.options import LaunchBench
from duplane.tools.bench.report import show
from duplane.tools.bench.stages import Stage, StageWatch
from duplane.worker.models.minicpm_o.llm.attention import TILE, Tiles
from duplane.worker.models.minicpm_o.llm.decoder import Decoder
from duplane.worker.models.minicpm_o.llm.kv_cache import KVCache
from duplane.worker.models.minicpm_o.llm.operations import place_heads, silu_times_up
from duplane.worker.models.minicpm_o.llm.pages import PageTable
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.vocoder.vocoder import Vocoder
from duplane.worker.models.types import ConversationOptions

CONTEXT = 512
UNITS = 2
"""Number of units of each kind that are counted, in every conversation."""
_aten = torch.ops.aten
# These operations launch nothing: they only allocate, or return their input in another form.
FREE = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.lift_fresh.default,
    _aten._unsafe_view.default,  # pyright: ignore[reportPrivateUsage]  has no public name
    _aten._local_scalar_dense.default,  # pyright: ignore[reportPrivateUsage]  has no public name
}
WHOLE = {
    _aten.scaled_dot_product_attention.default,
    _aten._fused_rms_norm.default,  # pyright: ignore[reportPrivateUsage]  has no public name
}
"""Operations that are one kernel on a GPU, although they have parts."""
ATTENTION_KERNELS = 2


class LaunchCount(TorchDispatchMode):
    """Counts the launches of each stage.

    The key None stands for launches outside of all stages.
    """

    def __init__(self, watch: StageWatch) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]  untyped in torch
        self._watch = watch
        self._is_paused = False
        self._without_parts = {*WHOLE}
        self.launches: defaultdict[Stage | None, int] = defaultdict(int)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if self._is_paused:
            return func(*args, **named)
        if func not in self._without_parts:
            with self:
                result = func.decompose(*args, **named)
            if result is not NotImplemented:
                return result
            self._without_parts.add(func)
        self.launches[self._watch.running] += not (func.is_view or func in FREE)
        return func(*args, **named)

    def stand_in(self, call: Callable[..., Tensor], kernels: int = 1) -> Callable[..., Tensor]:
        """Return a function that does the same as `call`, but counts as so many kernels."""

        def counted(*arguments: Any) -> Tensor:
            self._is_paused = True
            result = call(*arguments)
            self._is_paused = False
            self.launches[self._watch.running] += kernels
            return result

        return counted

    def use_kernels(self, decoder: Decoder, *, is_fused: bool = True) -> None:
        """Let the decoder attend by a stand-in; if `is_fused`, also compute other parts by one."""
        decoder.cache.kernel = self.stand_in(attend_to_pages, ATTENTION_KERNELS)
        if is_fused:
            decoder.operations.silu_times_up = self.stand_in(silu_times_up)
            decoder.operations.place_heads = self.stand_in(place_heads)


def attend_to_pages(
    queries: Tensor, keys: Tensor, values: Tensor, pages: PageTable, positions: Tensor, tiles: Tiles
) -> Tensor:
    """Attend in torch as the kernel does, for any device: an `attention.Kernel`.

    It reads all pages of each tile's slot, but needs nothing of the device.
    """
    device, heads, group = queries.device, len(keys), queries.shape[1] // len(keys)
    slots, starts, counts = tiles.numbers.unbind(1)
    packed = torch.arange(len(queries), device=device)
    tile = torch.arange(len(slots), device=device)
    tile = tile.repeat_interleave(counts, output_size=len(queries))
    most = max(1, TILE // group)
    if len(slots) >= len(queries):  # each row as a tile of its own costs less
        slots, starts, tile, most = slots[tile], packed, packed, 1
    rows = starts[:, None] + torch.arange(most, device=device)
    rows = rows.clamp_(max=len(queries) - 1)  # a tile may not be full
    is_seen = torch.arange(pages.slot_rows, device=device) <= positions[rows][..., None]
    numbers = pages.table[slots].flatten()

    def contexts(pool: Tensor) -> Tensor:
        read = pool.view(heads, -1, pages.page_rows, pool.shape[2]).index_select(1, numbers)
        return read.view(heads, len(slots), pages.slot_rows, -1).transpose(0, 1)

    own = queries[rows].view(*rows.shape, heads, group, -1).permute(0, 2, 3, 1, 4)
    attended = functional.scaled_dot_product_attention(
        own.flatten(2, 3),
        contexts(keys),
        contexts(values),
        attn_mask=is_seen.repeat(1, group, 1)[:, None],
    )
    attended = attended.view(own.shape).permute(0, 3, 1, 2, 4)
    return attended[tile, packed - starts[tile]].flatten(1, 2)


def decoders(model: DuplexModel) -> list[Decoder]:
    """Return the decoders of the LLM and of the talker, if there is one."""
    return [part.model for part in (model.parts.llm, model.parts.talker) if part is not None]


def caches(model: DuplexModel) -> list[KVCache]:
    """Return the caches of the decoders."""
    return [decoder.cache for decoder in decoders(model)]


def count_launches(
    model: DuplexModel, watch: StageWatch, slots: Sequence[int]
) -> dict[Stage | None, float]:
    """Return the launches in one call of each stage, with a conversation in each of `slots`.

    The key None has the launches of one round that belong to no stage. Afterwards the slots are
    clean again.
    """
    for index, slot in enumerate(slots):
        options = ConversationOptions(
            seed=index, force_listen_count=0, max_new_speak_tokens_per_chunk=TEXT_TOKENS + 1
        )
        model.open(slot, options)
    inputs = Inputs(model, slots, frames=1)
    kinds = [kind for kind in KINDS if kind != SEEING or model.parts.vision is not None]
    watch.clear()
    with LaunchCount(watch) as count:
        for decoder in decoders(model):
            count.use_kernels(decoder)
        for kind in kinds:
            for _ in range(UNITS):
                run_units(model, inputs.next(kind))
    for slot in slots:
        model.close(slot)
    calls: dict[Stage | None, int] = {**watch.calls, None: UNITS * len(kinds)}
    return {stage: number / max(1, calls[stage]) for stage, number in count.launches.items()}


def load_padding(directory: Path, slot_count: int) -> DuplexModel:
    """Load a model that pads batches and passes, as on a GPU."""
    model = DuplexModel.load(directory, slot_count=slot_count, context_capacity=CONTEXT)
    for decoder in decoders(model):
        decoder.cache.kernel = attend_to_pages
    model.capture(is_replayed=False)
    model.parts.audio.has_buckets = True
    if isinstance(model.parts.vocoder, Vocoder):
        model.parts.vocoder.stream.has_buckets = model.parts.vocoder.is_static = True
    return model


def scattered(count: int, slot_count: int) -> list[int]:
    """Return scattered slots below `slot_count`. Every call returns the same slots."""
    return sorted(random.Random(0).sample(range(slot_count), count))


def bench_launches(bench: LaunchBench) -> None:
    """Load a model, count its launches and print them. Raises `CheckpointError` and ValueError."""
    torch.set_num_threads(1)
    with model_directory(bench) as directory:
        model = load_padding(directory, 2 * max(bench.slots))
    watch = StageWatch(model, torch.device("cpu"))
    found = {
        (count, name): count_launches(model, watch, slots)
        for count in bench.slots
        for name, slots in (
            ("neighbours", range(count)),
            ("scattered", scattered(count, model.slot_count)),
        )
    }
    rows = [
        (
            "outside of the stages" if stage is None else stage.value,
            *(
                f"{launches[stage]:,.0f}" if stage in launches else ""
                for launches in found.values()
            ),
        )
        for stage in (*Stage, None)
        if any(stage in launches for launches in found.values())
    ]
    heads = [f"{count} {name}" for count, name in found]
    show("launches in one call of a stage, by conversations", ("stage", *heads), rows)
