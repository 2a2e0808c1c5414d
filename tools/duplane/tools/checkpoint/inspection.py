"""`duplane checkpoint inspect` and `random --dry`: print the contents of a checkpoint as tables."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from duplane.tools.bench.report import show
from duplane.tools.checkpoint.dimensions import VOICE_TOKENS, dimensions
from duplane.tools.checkpoint.flow_yaml import flow_yaml
from duplane.tools.checkpoint.options import MemoryOptions
from duplane.tools.checkpoint.parts import (
    Count,
    Shape,
    counts,
    expected_shapes,
    vocoder_counts,
)
from duplane.tools.checkpoint.tensor_shapes import tensor_shapes
from duplane.tools.checkpoint.tokenizer_files import train_tokenizer
from duplane.worker.models.minicpm_o.checkpoint import Checkpoint
from duplane.worker.models.minicpm_o.dtype import torch_dtype
from duplane.worker.models.minicpm_o.memory import (
    GRAPH_BYTES,
    WORK_SHARE,
    AnyVocoderPlan,
    StageMemory,
    VocoderPlan,
    plan_vocoder,
    slots_that_fit,
    stages,
    vocoder_modules,
)
from duplane.worker.models.minicpm_o.preparer_parts import VOCODER_FOLDER
from duplane.worker.models.minicpm_o.vocoder import harmonic
from duplane.worker.settings import Dtype

FILES = (
    ("config.json", "dimensions"),
    ("tokenizer.json", "tokenizer"),
    ("tokenizer_config.json", "tokenizer: names, forbidden ids, chat template"),
    ("preprocessor_config.json", "slicing of images"),
    ("generation_config.json", "generation settings"),
    ("assets/system_ref_audio.wav", "default voice of the prompt"),
    ("assets/HT_ref_audio.wav", "default voice of the vocoder"),
)
VOCODER_FILES = (
    ("assets/token2wav/flow.yaml", "vocoder: dimensions"),
    ("assets/token2wav/flow.pt", "vocoder: flow"),
    ("assets/token2wav/hift.pt", "vocoder: HiFT"),
    ("assets/token2wav/voice.safetensors", "vocoder: built-in voice"),
    ("assets/token2wav/campplus.onnx", "voices: speaker"),
    ("assets/token2wav/speech_tokenizer_v2_25hz.onnx", "voices: speech tokens"),
)
HARMONIC_FILES = (
    ("assets/token2wav/vocoder.json", "vocoder: kind and dimensions"),
    ("assets/token2wav/vocoder.safetensors", "vocoder: weights, with the only voice"),
)
LISTED = 20
SHORTEST_CONTEXT = 512


def inspect_checkpoint(directory: Path, options: MemoryOptions) -> bool:
    """Print the contents and the faults of a directory; return False if the model cannot be loaded.

    Raises `CheckpointError` if the directory cannot be inspected.
    """
    checkpoint = Checkpoint(directory)
    shapes = checkpoint.shapes()
    _show_files(directory, checkpoint)
    plan = plan_vocoder(directory / VOCODER_FOLDER)
    if plan is None:
        print("warning: the vocoder is absent: answers are text without speech\n")
    _show_counts("parameters", [*counts(shapes.items()), *(vocoder_counts(plan) if plan else [])])
    is_whole = _show_faults(shapes, expected_shapes(checkpoint.config))
    _show_memory(checkpoint.config, plan, options)
    return is_whole


def describe(like: str, factor: float, options: MemoryOptions) -> None:
    """Print the parts and sizes of a random checkpoint. Raises ValueError as `dimensions` does."""
    made = dimensions(like, factor, train_tokenizer())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "flow.yaml").write_text(flow_yaml(made.flow), encoding="utf-8")
        (folder / "hift_dims.json").write_bytes(orjson.dumps(made.hift))
        plan = VocoderPlan(*vocoder_modules(folder), 2 * VOICE_TOKENS)
    found = counts(tensor_shapes(made.config))
    _show_counts(f"{like} at scale {factor:g}", [*found, *vocoder_counts(plan)])
    _show_memory(made.config, plan, options)


def _show_files(directory: Path, checkpoint: Checkpoint) -> None:
    is_harmonic = (directory / VOCODER_FOLDER / harmonic.CONFIG).exists()
    files = (*FILES, *(HARMONIC_FILES if is_harmonic else VOCODER_FILES))
    wanted = [(f"{name} ({what})", directory / name) for name, what in files]
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
    config: Mapping[str, Any], plan: AnyVocoderPlan | None, options: MemoryOptions
) -> None:
    dtype = torch_dtype(options.dtype)
    share = options.context_share
    found = stages(config, capacity=options.context, dtype=dtype, vocoder=plan, share=share)
    whole = StageMemory("all", sum(s.fixed_bytes for s in found), sum(s.slot_bytes for s in found))
    kind = options.dtype
    show(
        f"memory in {kind}, contexts of {options.context} rows, of which {share:.0%} are reserved",
        ("stage", "weights and tables, MB", "per slot, MB"),
        [(s.name, _megabytes(s.fixed_bytes), _megabytes(s.slot_bytes)) for s in (*found, whole)],
    )
    if options.device_memory is not None:
        _show_fit(config, plan, found, options, options.device_memory)


def _show_fit(
    config: Mapping[str, Any],
    plan: AnyVocoderPlan | None,
    found: Sequence[StageMemory],
    options: MemoryOptions,
    device_bytes: int,
) -> None:
    """Print how many slots fit. If no slot fits, print why, and which settings would fit."""
    fitting = slots_that_fit(found, device_bytes, graph_bytes=GRAPH_BYTES)
    print(f"a device of {device_bytes / 1e9:g} GB has room for {fitting} slots")
    if fitting:
        return
    fixed, slot = sum(s.fixed_bytes for s in found), sum(s.slot_bytes for s in found)
    print(
        f"weights and tables take {fixed / 1e9:.1f} GB, one slot {slot / 1e9:.1f} GB, and"
        f" {WORK_SHARE:.0%} of the device is kept free for intermediate tensors, and"
        f" {GRAPH_BYTES / 1e9:.1f} GB for CUDA graphs"
    )
    one = (fixed + slot + GRAPH_BYTES) / (1 - WORK_SHARE)
    print(f"one slot fits a device of {one / 1e9:.1f} GB")
    for dtype, context in _smaller(options):
        smaller = stages(
            config,
            capacity=context,
            dtype=torch_dtype(dtype),
            vocoder=plan,
            share=options.context_share,
        )
        if count := slots_that_fit(smaller, device_bytes, graph_bytes=GRAPH_BYTES):
            print(f"with --dtype {dtype} --context {context}, {count} slots fit this device")
            return
    print("no shorter context and no smaller dtype fits this device: it needs a smaller model")


def _smaller(options: MemoryOptions) -> Iterator[tuple[Dtype, int]]:
    """Yield settings that need less memory, beginning with the smallest change."""
    dtype: Dtype = "bfloat16" if options.dtype == "float32" else options.dtype
    if dtype != options.dtype:
        yield dtype, options.context
    context = options.context // 2
    while context >= SHORTEST_CONTEXT:
        yield dtype, context
        context //= 2


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f}"
