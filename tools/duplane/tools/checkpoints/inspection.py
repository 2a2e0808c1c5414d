"""`duplane checkpoint inspect` and `random --dry`: what a checkpoint is, as tables."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch

from duplane.tools.bench.table import show
from duplane.tools.checkpoints.footprint import (
    Count,
    Shape,
    Stage,
    VocoderPlan,
    counts,
    expected_shapes,
    slots_that_fit,
    stages,
)
from duplane.tools.checkpoints.random_weights import vocoder_modules
from duplane.tools.checkpoints.released import VOICE_TOKENS, dimensions
from duplane.tools.tiny.flow_yaml import flow_yaml
from duplane.tools.tiny.layout import tensor_shapes
from duplane.tools.tiny.tokenizer_files import train_tokenizer
from duplane.worker.model.checkpoint import Checkpoint
from duplane.worker.model.parts import VOCODER_FOLDER, prompt_room
from duplane.worker.model.voice_networks import has_networks
from duplane.worker.model.voices import load_vocoder_voice

FILES = (
    ("config.json", "dimensions"),
    ("tokenizer.json", "tokenizer"),
    ("tokenizer_config.json", "tokenizer: names, forbidden ids, chat template"),
    ("preprocessor_config.json", "how images are cut"),
    ("generation_config.json", "generation settings"),
    ("assets/system_ref_audio.wav", "voice of the prompt when the client sends none"),
    ("assets/token2wav/flow.yaml", "vocoder: dimensions"),
    ("assets/token2wav/flow.pt", "vocoder: flow"),
    ("assets/token2wav/hift.pt", "vocoder: HiFT"),
    ("assets/token2wav/voice.safetensors", "vocoder: built-in voice"),
    ("assets/token2wav/campplus.onnx", "voices: speaker"),
    ("assets/token2wav/speech_tokenizer_v2_25hz.onnx", "voices: speech tokens"),
)
LISTED = 20


@dataclass(frozen=True)
class MemoryQuestion:
    """For which settings memory is asked: rows per context, numbers, device (None: no matter)."""

    capacity: int
    dtype: torch.dtype
    device_bytes: int | None


def byte_count(text: str) -> int:
    """Read a size like 141GB or 80 GiB; ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(k|M|G|T)(i?)B", text.strip())
    if match is None:
        raise ValueError(f"device-memory: {text!r} is not a size like 141GB or 80GiB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** ("kMGT".index(match[2]) + 1))


def inspect(directory: Path, question: MemoryQuestion) -> bool:
    """Print what a directory holds and needs; False if the model cannot be loaded from it.

    Raises `CheckpointError` where nothing can be said.
    """
    checkpoint = Checkpoint(directory)
    shapes = checkpoint.shapes()
    _show_files(directory, checkpoint)
    plan = _plan(directory / VOCODER_FOLDER)
    _show_counts("parameters", [*counts(shapes.items()), *(plan.counts() if plan else [])])
    is_whole = _show_faults(shapes, expected_shapes(checkpoint.config))
    _show_memory(checkpoint.config, plan, question)
    return is_whole


def describe(like: str, factor: float, question: MemoryQuestion) -> None:
    """Print what a random checkpoint would be. Raises ValueError as `dimensions` does."""
    made = dimensions(like, factor, train_tokenizer())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "flow.yaml").write_text(flow_yaml(made.flow), encoding="utf-8")
        (folder / "hift_dims.json").write_bytes(orjson.dumps(made.hift))
        plan = VocoderPlan(*vocoder_modules(folder), 2 * VOICE_TOKENS)
    found = counts(tensor_shapes(made.config))
    _show_counts(f"{like} at scale {factor:g}", [*found, *plan.counts()])
    _show_memory(made.config, plan, question)


def _plan(folder: Path) -> VocoderPlan | None:
    if not (folder / "flow.yaml").exists():
        return None
    frames = prompt_room(load_vocoder_voice(folder), reads_clips=has_networks(folder))
    return VocoderPlan(*vocoder_modules(folder), frames)


def _show_files(directory: Path, checkpoint: Checkpoint) -> None:
    wanted = [(f"{name} ({what})", directory / name) for name, what in FILES]
    held = [*wanted, *((f"{path.name} (weights)", path) for path in checkpoint.files)]
    rows = [
        (name, _megabytes(path.stat().st_size) if path.exists() else "absent")
        for name, path in held
    ]
    show(str(directory), ("file", "MB"), rows)


def _show_counts(title: str, found: Sequence[Count]) -> None:
    whole = Count("all", sum(c.tensors for c in found), sum(c.parameters for c in found))
    show(
        title,
        ("part", "tensors", "millions"),
        [(c.part, str(c.tensors), f"{c.parameters / 1e6:,.2f}") for c in (*found, whole)],
    )


def _show_faults(shapes: Mapping[str, Shape], expected: Mapping[str, Shape]) -> bool:
    missing = [name for name in expected if name not in shapes]
    wrong = [
        f"{name} {list(shapes[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    _show_names("missing", missing)
    _show_names("misshapen", wrong)
    _show_names("unused", [name for name in shapes if name not in expected])
    print()
    return not missing and not wrong


def _show_names(what: str, names: Sequence[str]) -> None:
    print(f"{what}: {len(names) or 'none'}")
    for name in sorted(names)[:LISTED]:
        print(f"  {name}")
    if len(names) > LISTED:
        print(f"  … and {len(names) - LISTED} more")


def _show_memory(
    config: Mapping[str, Any], plan: VocoderPlan | None, question: MemoryQuestion
) -> None:
    found = stages(config, capacity=question.capacity, dtype=question.dtype, vocoder=plan)
    whole = Stage("all", sum(s.fixed_bytes for s in found), sum(s.slot_bytes for s in found))
    kind = str(question.dtype).removeprefix("torch.")
    show(
        f"memory in {kind}, contexts of {question.capacity} rows",
        ("stage", "weights and tables, MB", "per slot, MB"),
        [(s.name, _megabytes(s.fixed_bytes), _megabytes(s.slot_bytes)) for s in (*found, whole)],
    )
    if question.device_bytes is not None:
        fitting = slots_that_fit(found, question.device_bytes)
        print(f"a device of {question.device_bytes / 1e9:g} GB has room for {fitting} slots")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f}"
