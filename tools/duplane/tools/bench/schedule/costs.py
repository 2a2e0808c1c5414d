"""What a launch costs: tables computed for two GPUs, and tables that `tools/gpu/hour.py` measured.

Nothing in the computed tables was measured on a GPU. They follow from the bytes and operations of
MiniCPM-o 4.5 in bfloat16, the rates that a GPU reaches, and the number of its kernels.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import orjson

from duplane.worker.engine.schedule import Block

VOICE_MS = 40.0
"""The prompt of a voice after an opening. It is assumed, also with a measured file."""
BEGIN_MS = 0.06
"""Work of the host for each unit that begins."""
CHOICE_MS, SEE_KERNELS_MS = 0.4, 2.0
"""Time in which the host launches the 57 kernels of the choice of ids, and those kernels of vision
(up to 300) that its matrix products do not hide: 5 to 7 us each, as neither is a CUDA graph."""
UNIT_STEPS = 26
"""Steps of the talker for one unit."""

Vocoder = Literal["float32", "tf32"]


@dataclass(frozen=True, slots=True)
class Size:
    """What the time of a launch depends on.

    - `count`: units, pieces of pictures, rows, slots or chunks.
    - `contexts`: of a pass, the rows of context of each of its slots.
    - `fills`: whether a pass has input of units or prompts, and not only next ids.
    - `steps`: of the talker, the steps of the slot that has the most.
    """

    block: Block
    count: int
    contexts: tuple[int, ...] = ()
    fills: bool = False
    steps: int = UNIT_STEPS


class Costs(Protocol):
    """The time of launches on one device.

    `host_ms` is the host's time for a launch, and `contention` how many times as long a launch
    takes while the other lane runs.
    """

    @property
    def device(self) -> str: ...
    @property
    def host_ms(self) -> float: ...
    @property
    def contention(self) -> float: ...

    def device_ms(self, size: Size) -> float:
        """Return the milliseconds of the blocks HEAR, SEE, PASS, TALK and VOCODE on the device."""
        ...


def launch_ms(costs: Costs, size: Size) -> float:
    """Return the milliseconds of a launch while the other lane is idle."""
    match size.block:
        case Block.BEGIN:  # work of the host alone
            return BEGIN_MS * size.count
        case Block.OPEN:  # its prompt and its voice have launches of their own
            return costs.host_ms
        case Block.VOICE:
            return VOICE_MS + costs.host_ms
        case Block.VOCODE:  # flow and HiFT are two launches
            return costs.device_ms(size) + 2 * costs.host_ms
        case _:
            return costs.device_ms(size) + costs.host_ms


@dataclass(frozen=True)
class Computed:
    """Times from rates. A launch costs what the next larger captured size costs.

    - `bandwidth`: bytes per second from memory; `flops`: operations per second in bfloat16.
    - `vocoder_ms`: each chunk of flow and HiFT.
    """

    device: str
    bandwidth: float
    flops: float = 550e12
    vocoder_ms: float = 3.46
    host_ms: float = 0.25
    contention: float = 1.25
    hear_sizes: tuple[int, ...] = (1, 2, 8)
    pass_sizes: tuple[int, ...] = (4, 32, 128, 512)
    talk_sizes: tuple[int, ...] = (4, 16, 64)
    vocode_sizes: tuple[int, ...] = (1, 2, 4, 8)

    def device_ms(self, size: Size) -> float:
        match size.block:
            case Block.HEAR:
                return 1.5 + 0.18 * _padded(size.count, self.hear_sizes)
            case Block.SEE:
                return SEE_KERNELS_MS + 1e3 * 1.44e12 * size.count / self.flops
            case Block.TALK:
                slots = _padded(size.count, self.talk_sizes)
                step = 0.63 + 1e3 * 0.39e9 / self.bandwidth
                step += 0.02 * slots * math.sqrt(H200_BANDWIDTH / self.bandwidth)
                return size.steps * step
            case Block.VOCODE:
                return 5.0 + self.vocoder_ms * _padded(size.count, self.vocode_sizes)
            case _:
                return self._pass_ms(size)

    def _pass_ms(self, size: Size) -> float:
        """Weights and products overlap in part. A context is read by parts of the device."""
        weights = 1e3 * 15.1e9 / self.bandwidth
        products = 1e3 * 14e9 * _padded(size.count, self.pass_sizes) / self.flops
        longest = 36 * 512 * max(size.contexts, default=0) / 60e9
        contexts = 1e3 * max(147_456 * sum(size.contexts) / self.bandwidth, longest)
        kernels = 0.55 + CHOICE_MS + 0.005 * len(size.contexts)
        overlap = max(weights, products) + 0.15 * min(weights, products)
        return overlap + contexts + kernels


H200_BANDWIDTH = 4.3e12
TF32_VOCODER_MS = 0.94
BUILT_IN = {
    "h200": Computed("H200, computed", H200_BANDWIDTH),
    "h100": Computed("H100 80 GB, computed", 3.0e12),
}
SCHEMA = 1
NEEDED = ("hear", "vision", "pass", "step", "choose", "talk", "voc")


class CostsError(ValueError):
    """A costs file cannot be used. The message says why."""


@dataclass(frozen=True)
class Point:
    """A measured time of a block."""

    bucket: int
    context: int
    ms: float


@dataclass(frozen=True)
class Measured:
    """Times that `hour.py` has measured; linear between its sizes, in proportion above them."""

    device: str
    host_ms: float
    contention: float
    points: dict[str, tuple[Point, ...]]

    def device_ms(self, size: Size) -> float:
        match size.block:
            case Block.HEAR:
                return self._at("hear", size.count)
            case Block.SEE:
                return self._at("vision", size.count)
            case Block.TALK:
                return size.steps / UNIT_STEPS * self._at("talk", size.count)
            case Block.VOCODE:
                return self._at("voc", size.count)
            case _:
                context = sum(size.contexts) / max(1, len(size.contexts))
                fed = self._at("pass" if size.fills else "step", size.count, context)
                return fed + self._at("choose", len(size.contexts))

    def _at(self, block: str, count: int, context: float = 0.0) -> float:
        """Return the time of this number between the two nearest contexts."""
        sizes: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        for point in self.points[block]:
            sizes[point.context].append((point.bucket, point.ms))
        times = [(float(rows), _between(sizes[rows], count, grows=True)) for rows in sorted(sizes)]
        return _between(times, context, grows=False)


def _padded(count: int, sizes: Sequence[int]) -> int:
    return next((size for size in sizes if size >= count), count)


def _between(points: Sequence[tuple[float, float]], place: float, *, grows: bool) -> float:
    """Return the value at a place, linear between points; `grows`: in proportion above the last."""
    places = [point[0] for point in points]
    after = bisect_left(places, place)
    if after == 0:
        return points[0][1]
    if after == len(points):
        last, value = points[-1]
        return value * place / last if grows else value
    (left, low), (right, high) = points[after - 1], points[after]
    return low + (high - low) * (place - left) / (right - left)


def read_costs(path: Path) -> Measured:
    """Read a file that `tools/gpu/hour.py` wrote. Raises CostsError."""
    try:
        content: Any = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise CostsError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise CostsError(f"{path}: not a file of costs")
    fields = cast("dict[str, Any]", content)
    if fields.get("schema") != SCHEMA:
        raise CostsError(f"{path}: schema is {fields.get('schema')}, must be {SCHEMA}")
    points: defaultdict[str, list[Point]] = defaultdict(list)
    for one in fields["points"]:
        points[one["block"]].append(Point(one["bucket"], one["context"], one["ms"]))
    missing = [block for block in NEEDED if not points[block]]
    missing += [name for name in ("host_ms", "contention") if fields.get(name) is None]
    if missing:
        raise CostsError(f"{path} lacks {', '.join(missing)}: measure the group `costs` again")
    return Measured(
        device=f"{fields['device']}, {path.name}",
        host_ms=fields["host_ms"],
        contention=fields["contention"],
        points={
            block: tuple(sorted(found, key=lambda point: (point.context, point.bucket)))
            for block, found in points.items()
        },
    )
