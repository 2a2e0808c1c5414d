"""Computes the memory that a checkpoint's model takes on a device. Loads no weights."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from duplane.worker.models.interface import LoadError
from duplane.worker.models.minicpm_o.audio.encoder import AudioEncoder
from duplane.worker.models.minicpm_o.audio.whisper import AudioConfig
from duplane.worker.models.minicpm_o.checkpoint import field, read_config
from duplane.worker.models.minicpm_o.dtype import torch_dtype
from duplane.worker.models.minicpm_o.llm.language_model import LanguageModel
from duplane.worker.models.minicpm_o.llm.sampling import PenalisedIds
from duplane.worker.models.minicpm_o.loader import overhang, prompt_room
from duplane.worker.models.minicpm_o.preparer_parts import VOCODER_FOLDER
from duplane.worker.models.minicpm_o.tts.talker import TURN_ROWS, Talker
from duplane.worker.models.minicpm_o.vision.resampler import Resampler
from duplane.worker.models.minicpm_o.vision.siglip import VisionConfig, VisionTransformer
from duplane.worker.models.minicpm_o.vocoder import harmonic
from duplane.worker.models.minicpm_o.vocoder.files import read_flow_config, read_hift_config
from duplane.worker.models.minicpm_o.vocoder.flow import Flow
from duplane.worker.models.minicpm_o.vocoder.harmonic import HarmonicVocoder
from duplane.worker.models.minicpm_o.vocoder.hift import HiFT
from duplane.worker.models.minicpm_o.vocoder.vocoder import Vocoder, VocoderOptions
from duplane.worker.models.minicpm_o.vocoder.voice import has_networks, load_vocoder_voice
from duplane.worker.settings import AUTO, WorkerSettings

_log = logging.getLogger(__name__)

META = torch.device("meta")

SOME = 8
"""Memory is computed for this number of slots and for one slot more; the difference is the memory
of one slot."""
WORK_SHARE = 0.1
"""Share of a device's memory that is kept free for the intermediate tensors of a step. It was not
measured on a GPU."""
GRAPH_BYTES = 32 * 32 * 2**20
"""Memory that is kept free for CUDA graphs: each of the 32 streams on which torch captures may get
a workspace of cuBLAS of 32 MiB. It was not measured on a GPU."""


@dataclass(frozen=True)
class StageMemory:
    """Memory of one stage: its weights and tables, and the state of each slot."""

    name: str
    fixed_bytes: int
    slot_bytes: int


def choose_slot_count(settings: WorkerSettings, dtype: str) -> int:
    """Return the number of slots of the settings; on a GPU, of `auto`, as many as fit.

    On a GPU, raises LoadError, which names the number that fits, if the slots do not fit into the
    memory that is free now. The memory of a CPU is not checked.
    """
    device = torch.device(settings.device)
    if device.type != "cuda":
        return settings.given_slot_count
    directory = Path(settings.checkpoint)
    held = stages(
        read_config(directory),
        capacity=settings.context_token_limit,
        dtype=torch_dtype(dtype),
        vocoder=plan_vocoder(directory / VOCODER_FOLDER),
        turn_rows=settings.turn_row_limit,
        share=settings.given_context_share,
    )
    free_bytes, _ = torch.cuda.mem_get_info(device)
    graph_bytes = GRAPH_BYTES if settings.cuda_graphs else 0
    fitting = slots_that_fit(held, free_bytes, graph_bytes=graph_bytes)
    wanted = fitting if settings.slot_count == AUTO else settings.slot_count
    fixed, slot = sum(s.fixed_bytes for s in held), sum(s.slot_bytes for s in held)
    plan = (
        f"{device} has {free_bytes / 1e9:.1f} GB free; the model takes {fixed / 1e9:.1f} GB, a slot"
        f" with {settings.given_context_share:.0%} of {settings.context_token_limit} tokens"
        f" {slot / 1e9:.3f} GB, and graphs and intermediate tensors"
        f" {(graph_bytes + free_bytes * WORK_SHARE) / 1e9:.1f} GB"
    )
    if not 0 < wanted <= fitting:
        most = f"at most {fitting} fit (--slots {fitting})" if fitting else "not even one fits"
        raise LoadError(f"slots is {settings.slot_count}, but {most}: {plan}")
    _log.info("%d slots, of %d that fit: %s", wanted, fitting, plan)
    return wanted


def stages(
    config: Mapping[str, Any],
    *,
    capacity: int,
    dtype: torch.dtype,
    vocoder: AnyVocoderPlan | None,
    turn_rows: int = TURN_ROWS,
    share: float = 1.0,
) -> list[StageMemory]:
    """Return the memory of every stage, for this `dtype`.

    Each slot reserves this `share` of its context of `capacity` rows.
    """

    def sizes(slots: int) -> list[tuple[str, int]]:
        held = _sizes(config, slots, capacity, dtype, turn_rows, share)
        return held if vocoder is None else [*held, ("vocoder", vocoder.size(slots))]

    return [
        StageMemory(name, one - SOME * (more - one), more - one)
        for (name, one), (_, more) in zip(sizes(SOME), sizes(SOME + 1), strict=True)
    ]


def slots_that_fit(
    stages: Iterable[StageMemory], device_bytes: int, *, graph_bytes: int = 0
) -> int:
    """Return how many slots fit a device with this memory.

    `WORK_SHARE` of the memory and `graph_bytes` stay free.
    """
    held = list(stages)
    fixed, slot = sum(s.fixed_bytes for s in held), sum(s.slot_bytes for s in held)
    room = int(device_bytes * (1 - WORK_SHARE)) - graph_bytes - fixed
    return max(0, room // slot)


@dataclass(frozen=True)
class VocoderPlan:
    """The vocoder's models on the meta device, and the length of the longest voice."""

    flow: Flow
    hift: HiFT
    max_prompt_frames: int

    @property
    def models(self) -> list[tuple[str, nn.Module]]:
        """The models and their names."""
        return [("flow", self.flow), ("HiFT", self.hift)]

    def size(self, slots: int) -> int:
        """Return the bytes of the vocoder with this number of slots."""
        options = VocoderOptions(max_prompt_frames=self.max_prompt_frames)
        return Vocoder(self.flow, self.hift, slot_count=slots, options=options).memory_bytes


@dataclass(frozen=True)
class HarmonicPlan:
    """The harmonic vocoder, which has only one voice."""

    vocoder: HarmonicVocoder

    @property
    def models(self) -> list[tuple[str, nn.Module]]:
        """The only model and its name."""
        return [("vocoder", self.vocoder.network)]

    def size(self, slots: int) -> int:
        """Return the bytes of the vocoder with this number of slots."""
        return HarmonicVocoder(self.vocoder.network, slot_count=slots).memory_bytes


AnyVocoderPlan = VocoderPlan | HarmonicPlan


def plan_vocoder(folder: Path) -> AnyVocoderPlan | None:
    """Return the plan of the vocoder in this folder; None if there is none."""
    if (folder / harmonic.CONFIG).exists():
        return HarmonicPlan(HarmonicVocoder.load(folder, slot_count=1))
    if not (folder / "flow.yaml").exists():
        return None
    frames = prompt_room(load_vocoder_voice(folder), reads_clips=has_networks(folder))
    return VocoderPlan(*vocoder_modules(folder), frames)


def vocoder_modules(folder: Path) -> tuple[Flow, HiFT]:
    """Build the two models of the folder's configuration on the meta device, without weights."""
    with torch.device("meta"):
        return Flow(read_flow_config(folder), steps=1), HiFT(read_hift_config(folder))


def modules(
    config: Mapping[str, Any],
    slots: int,
    capacity: int,
    dtype: torch.dtype,
    turn_rows: int = TURN_ROWS,
    share: float = 1.0,
) -> dict[str, nn.Module]:
    """Return the modules of the main checkpoint on the meta device, by their prefixes."""
    audio = AudioEncoder(AudioConfig.from_json(config), slots, META, dtype)
    found: dict[str, nn.Module] = {
        "llm.": LanguageModel(config, slots, capacity, META, dtype, share),
        "apm.": audio.apm,
        "audio_projection_layer.": audio.audio_projection_layer,
    }
    if field(config, "init_vision", bool, True):
        vision = VisionConfig.from_json(config)
        size = vision.query_count, vision.hidden, vision.width
        found["vpm."] = VisionTransformer(vision, META, dtype)
        found["resampler."] = Resampler(*size, META, dtype)
    if field(config, "init_tts", bool, True):
        found["tts."] = Talker(config, slots, META, dtype, rows=turn_rows)
    return found


def _sizes(
    config: Mapping[str, Any],
    slots: int,
    capacity: int,
    dtype: torch.dtype,
    turn_rows: int,
    share: float,
) -> list[tuple[str, int]]:
    """Return the name and the bytes of each stage for this number of slots."""
    heard = AudioConfig.from_json(config)
    is_seeing = field(config, "init_vision", bool, True)
    beyond = overhang(heard, VisionConfig.from_json(config).query_count if is_seeing else None)
    made = modules(config, slots, capacity + beyond, dtype, turn_rows, share)
    audio = AudioEncoder(heard, slots, META, dtype)
    found = [("LLM", 0), ("audio", _bytes(audio))]
    for module in made.values():
        match module:
            case LanguageModel():
                penalised = PenalisedIds(slots, module.vocabulary, META).memory_bytes
                # Conversations and chats each have their table of penalised ids.
                size = _bytes(module) + module.cache.memory_bytes + 2 * penalised
                found[0] = ("LLM", size)
            case Talker():
                found.append(("talker", _bytes(module) + module.cache.memory_bytes))
            case VisionTransformer():
                found.append(("vision", _bytes(module) + _bytes(made["resampler."])))
            case _:
                pass
    return found


def _bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
