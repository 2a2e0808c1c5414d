"""Counts the tensors of the parts of a checkpoint, and names the tensors that the model reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from duplane.worker.models.minicpm_o.memory import AnyVocoderPlan, modules

Shape = tuple[int, ...]

PARTS = (
    ("LLM embeddings", "llm.model.embed_tokens."),
    ("LLM head", "llm.lm_head."),
    ("LLM layers", "llm."),
    ("vision encoder", "vpm."),
    ("resampler", "resampler."),
    ("audio encoder", "apm."),
    ("audio projector", "audio_projection_layer."),
    ("talker", "tts."),
)
OTHER = "other"


@dataclass(frozen=True)
class Count:
    """The number of tensors and parameters of one part."""

    part: str
    tensors: int
    parameters: int


def counts(shapes: Iterable[tuple[str, Shape]]) -> list[Count]:
    """Return the numbers of tensors and parameters of each part, in the order of `PARTS`."""
    tensors = dict.fromkeys([*(part for part, _ in PARTS), OTHER], 0)
    parameters = dict(tensors)
    for name, shape in shapes:
        part = next((part for part, prefix in PARTS if name.startswith(prefix)), OTHER)
        tensors[part] += 1
        parameters[part] += torch.Size(shape).numel()
    return [Count(part, tensors[part], parameters[part]) for part in tensors if tensors[part]]


def expected_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Return name and shape of every tensor that the model reads. Raises `CheckpointError`."""
    return {
        prefix + name: tuple(tensor.shape)
        for prefix, module in modules(config, 1, 1, torch.float32).items()
        for name, tensor in module.state_dict().items()
    }


def vocoder_counts(plan: AnyVocoderPlan) -> list[Count]:
    """Count the tensors of each model of the vocoder, with weight norm folded."""
    return [
        Count(name, len(state), sum(tensor.numel() for tensor in state.values()))
        for name, state in ((name, model.state_dict()) for name, model in plan.models)
    ]
