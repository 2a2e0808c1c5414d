"""Finds the parts of a checkpoint's model and the memory that they take. Loads no weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from duplane.worker.models.minicpm_o.audio.encoder import AudioEncoder
from duplane.worker.models.minicpm_o.audio.whisper import AudioConfig
from duplane.worker.models.minicpm_o.checkpoint import field
from duplane.worker.models.minicpm_o.llm.language_model import LanguageModel
from duplane.worker.models.minicpm_o.loader import overhang
from duplane.worker.models.minicpm_o.tts.talker import Talker
from duplane.worker.models.minicpm_o.vision.resampler import Resampler
from duplane.worker.models.minicpm_o.vision.siglip import VisionConfig, VisionTransformer
from duplane.worker.models.minicpm_o.vocoder.flow import Flow
from duplane.worker.models.minicpm_o.vocoder.harmonic import HarmonicVocoder
from duplane.worker.models.minicpm_o.vocoder.hift import HiFT
from duplane.worker.models.minicpm_o.vocoder.vocoder import Vocoder, VocoderOptions

Shape = tuple[int, ...]
META = torch.device("meta")

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
SOME = 8
"""Memory is computed for this number of slots and for one slot more; the difference is the memory
of one slot."""
WORK_SHARE = 0.1
"""Share of a device's memory that is kept free for the intermediate tensors of a step."""


@dataclass(frozen=True)
class Count:
    """The number of tensors and parameters of one part."""

    part: str
    tensors: int
    parameters: int


@dataclass(frozen=True)
class StageMemory:
    """Memory of one stage: its weights and tables, and the state of each slot."""

    name: str
    fixed_bytes: int
    slot_bytes: int


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
        for prefix, module in _modules(config, 1, 1, torch.float32)
        for name, tensor in module.state_dict().items()
    }


def stages(
    config: Mapping[str, Any], *, capacity: int, dtype: torch.dtype, vocoder: AnyVocoderPlan | None
) -> list[StageMemory]:
    """Return the memory of every stage, for contexts of `capacity` rows and for this `dtype`."""
    small, large = (
        [*_sizes(config, slots, capacity, dtype), *(vocoder.sizes(slots) if vocoder else [])]
        for slots in (SOME, SOME + 1)
    )
    return [
        StageMemory(name, one - SOME * (more - one), more - one)
        for (name, one), (_, more) in zip(small, large, strict=True)
    ]


def slots_that_fit(stages: Iterable[StageMemory], device_bytes: int) -> int:
    """Return how many slots fit a device with this memory, if `WORK_SHARE` of it stays free."""
    held = list(stages)
    fixed, slot = sum(s.fixed_bytes for s in held), sum(s.slot_bytes for s in held)
    room = int(device_bytes * (1 - WORK_SHARE)) - fixed
    return max(0, room // slot)


@dataclass(frozen=True)
class VocoderPlan:
    """The vocoder's models on the meta device, and the length of the longest voice."""

    flow: Flow
    hift: HiFT
    max_prompt_frames: int

    def sizes(self, slots: int) -> list[tuple[str, int]]:
        """Return the name and the bytes of each stage for this number of slots."""
        options = VocoderOptions(max_prompt_frames=self.max_prompt_frames)
        made = Vocoder(self.flow, self.hift, slot_count=slots, options=options)
        return [("vocoder", made.memory_bytes)]

    def counts(self) -> list[Count]:
        """Count the tensors of flow.pt and hift.pt, with weight norm folded."""
        return [
            Count(name, len(state), sum(tensor.numel() for tensor in state.values()))
            for name, state in (
                ("flow", self.flow.state_dict()),
                ("HiFT", self.hift.state_dict()),
            )
        ]


@dataclass(frozen=True)
class HarmonicPlan:
    """The harmonic vocoder, which has only one voice."""

    vocoder: HarmonicVocoder

    def sizes(self, slots: int) -> list[tuple[str, int]]:
        """Return the name and the bytes of each stage for this number of slots."""
        made = HarmonicVocoder(self.vocoder.network, slot_count=slots)
        return [("vocoder", made.memory_bytes)]

    def counts(self) -> list[Count]:
        """Count the tensors of vocoder.safetensors."""
        state = self.vocoder.network.state_dict()
        return [Count("vocoder", len(state), sum(tensor.numel() for tensor in state.values()))]


AnyVocoderPlan = VocoderPlan | HarmonicPlan


def _modules(
    config: Mapping[str, Any], slots: int, capacity: int, dtype: torch.dtype
) -> list[tuple[str, nn.Module]]:
    """Return the modules of the main checkpoint on the meta device, with their prefixes."""
    audio = AudioEncoder(AudioConfig.from_json(config), slots, META, dtype)
    found: list[tuple[str, nn.Module]] = [
        ("llm.", LanguageModel(config, slots, capacity, META, dtype)),
        ("apm.", audio.apm),
        ("audio_projection_layer.", audio.audio_projection_layer),
    ]
    if field(config, "init_vision", bool, True):
        vision = VisionConfig.from_json(config)
        found += [
            ("vpm.", VisionTransformer(vision, META, dtype)),
            (
                "resampler.",
                Resampler(vision.query_count, vision.hidden, vision.width, META, dtype),
            ),
        ]
    if field(config, "init_tts", bool, True):
        found.append(("tts.", Talker(config, slots, META, dtype)))
    return found


def _sizes(
    config: Mapping[str, Any], slots: int, capacity: int, dtype: torch.dtype
) -> list[tuple[str, int]]:
    """Return the name and the bytes of each stage for this number of slots."""
    heard = AudioConfig.from_json(config)
    is_seeing = field(config, "init_vision", bool, True)
    beyond = overhang(heard, VisionConfig.from_json(config).query_count if is_seeing else None)
    modules = dict(_modules(config, slots, capacity + beyond, dtype))
    llm = modules["llm."]
    talker = modules.get("tts.")
    assert isinstance(llm, LanguageModel)  # as `_modules` builds it
    audio = AudioEncoder(heard, slots, META, dtype)
    found = [("LLM", _bytes(llm) + llm.cache.memory_bytes), ("audio", _bytes(audio))]
    if "vpm." in modules:
        found.append(("vision", _bytes(modules["vpm."]) + _bytes(modules["resampler."])))
    if isinstance(talker, Talker):
        found.append(("talker", _bytes(talker) + talker.cache.memory_bytes))
    return found


def _bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
