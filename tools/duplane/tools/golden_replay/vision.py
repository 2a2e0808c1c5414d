"""Replays units/vision and the frames of the duplex sessions through the vision encoder alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from numpy.typing import NDArray
from torch import Tensor

from duplane.tools.golden_replay.check import Check, compare, same, worst
from duplane.tools.golden_replay.target import CPU_TARGET, ReplayTarget
from duplane.worker.models.minicpm_o.checkpoint import Checkpoint, CheckpointError
from duplane.worker.models.minicpm_o.types import PreparedImage
from duplane.worker.models.minicpm_o.vision.encoder import Vision
from duplane.worker.models.minicpm_o.vision.layout import chat_layout

TOLERANCE = 1e-4
HEAD_PATCHES = 4
BATCH = "batch2"


def checks(golden: Path, target: ReplayTarget = CPU_TARGET) -> Iterator[Check]:
    """Yield all checks of the vision traces that the directory has."""
    trace = golden / "units" / "vision.json"
    sessions = sorted((golden / "sessions").glob("duplex_*.json"))
    with_frames = [path for path in sessions if any(_frames(orjson.loads(path.read_bytes())))]
    if not (trace.exists() or with_frames):
        return
    vision = load_vision(golden / "checkpoint", target)
    if trace.exists():
        yield from _units(vision, golden, orjson.loads(trace.read_bytes()))
    for path in with_frames:
        yield from _session(vision, golden, path)


def load_vision(checkpoint: Path, target: ReplayTarget = CPU_TARGET) -> Vision:
    """Load the checkpoint's vision encoder."""
    source = Checkpoint(checkpoint)
    vision = Vision.from_checkpoint(source, target.device, target.dtype)
    if vision is None:
        raise CheckpointError(f"{checkpoint} has no vision, but there are traces of it")
    vision.load(source)
    return vision


def _units(vision: Vision, golden: Path, trace: dict[str, Any]) -> Iterator[Check]:
    arrays = dict(np.load(golden / "units" / "vision.npz"))
    for name, unit in trace.items():
        if name == BATCH:
            continue
        data = (golden / "images" / unit["image"]).read_bytes()
        image = vision.prepare(data, unit["max_slice_nums"])
        yield from _layout(f"vision {name}", vision, image, unit)
        yield from _pixels(f"vision {name}", vision, image, unit, arrays[f"{name}_pixels_head"])
        embeds = vision.encode([image])[0]
        yield from _embeds(f"vision {name}", embeds, f"{name}_embeds", arrays)
    if BATCH in trace:
        names: list[str] = trace[BATCH]["images"]
        paths = [next((golden / "images").glob(f"{name}.*")) for name in names]
        images = [vision.prepare(path.read_bytes(), 1) for path in paths]
        embeds = torch.cat(vision.encode(images))
        yield from _embeds(f"vision {BATCH}", embeds, f"{BATCH}_embeds", arrays)


def _layout(
    name: str, vision: Vision, image: PreparedImage, unit: dict[str, Any]
) -> Iterator[Check]:
    sizes = [[tile.rows, tile.columns] for tile in image.tiles]
    yield same(f"{name} tgt_sizes", sizes, unit["tgt_sizes"])
    yield same(f"{name} n_slices", len(sizes), unit["n_slices"])
    yield same(f"{name} grid", image.grid and list(image.grid), unit["grid"])
    layout = chat_layout(vision.marks, image.grid, 0 if vision.marks.has_id else None)
    held = f"{vision.marks.unknown}*{vision.rows}"  # the notation of the traces
    text = "".join(part if isinstance(part, str) else held for part in layout)
    yield same(f"{name} placeholder", text, unit["placeholder"])


def _pixels(
    name: str, vision: Vision, image: PreparedImage, unit: dict[str, Any], head: NDArray[np.float32]
) -> Iterator[Check]:
    patch = vision.rules.patch_size
    # The traces store the patches side by side: [3, patch, patches * patch].
    strips = [
        vision.normalize(torch.as_tensor(tile.patches))
        .view(-1, 3, patch, patch)
        .permute(1, 2, 0, 3)
        .flatten(2)
        for tile in image.tiles
    ]
    heads = torch.stack([strip[..., : HEAD_PATCHES * patch] for strip in strips])
    yield same(f"{name} pixel_shapes", [list(x.shape) for x in strips], unit["pixel_shapes"])
    yield compare(f"{name} pixels_head", heads, head, TOLERANCE)
    sums = [float(strip.double().sum()) for strip in strips]
    yield compare(f"{name} pixel_sums", sums, unit["pixel_sums"], TOLERANCE)


def _embeds(name: str, embeds: Tensor, key: str, arrays: dict[str, Any]) -> Iterator[Check]:
    recorded = {key: embeds, f"{key}_r8": embeds[:, ::8]}
    for found, got in recorded.items():
        if found in arrays:
            label = f"{name} {found.removeprefix(key.removesuffix('embeds'))}"
            yield compare(label, got, arrays[found], TOLERANCE)


def _session(vision: Vision, golden: Path, path: Path) -> Iterator[Check]:
    arrays = dict(np.load(path.with_suffix(".npz")))
    found: list[Check] = []
    for index, names, slices in _frames(orjson.loads(path.read_bytes())):
        key = f"u{index}_vision_embeds"
        if key not in arrays:
            continue
        images = [
            vision.prepare((golden / "images" / name).read_bytes(), count)
            for name, count in zip(names, slices, strict=True)
        ]
        got = torch.cat(vision.encode(images))
        found.append(compare(f"unit {index}", got, arrays[key], TOLERANCE))
    if found:
        yield worst(f"vision {path.stem} frames", found)


def _frames(session: dict[str, Any]) -> Iterator[tuple[int, list[str], list[int]]]:
    """Yield the index, the file names and the largest slice counts of each unit with frames."""
    for index, unit in enumerate(session["units"]):
        names, allowed = unit["frames"], unit["max_slice_nums"]
        if names:
            is_shared = isinstance(allowed, int)
            yield index, names, [allowed] * len(names) if is_shared else allowed
