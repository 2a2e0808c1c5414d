"""Replays units/tts: the talker alone, on given hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor

from duplane.tools.replay.check import Check, compare, same, skipped, worst
from duplane.worker.model.checkpoint import Checkpoint
from duplane.worker.model.sampling import SeededUniforms
from duplane.worker.model.talker import Speech, Talker

TOLERANCE = 1e-4
TEMPERATURE = 0.8
LATER = {"streaming": "turn-based speech", "oneshot": "turn-based speech"}
"""Parts of the trace that need what the model does not have yet."""


def checks(golden: Path) -> Iterator[Check]:
    """All checks of the talker traces that the directory has."""
    path = golden / "units" / "tts.json"
    if not path.exists():
        return
    trace = orjson.loads(path.read_bytes())
    arrays = np.load(path.with_suffix(".npz"))
    source = Checkpoint(golden / "checkpoint")
    talker = Talker(source.config, 1, torch.device("cpu"), torch.float32)
    with torch.inference_mode():
        talker.load(source)
        for number, turn in enumerate(trace["turns"]):
            yield from _turn(f"tts turn {number}", talker, turn, arrays)
    for part, need in LATER.items():
        if part in trace:
            yield skipped(f"tts {part}", f"needs {need}")


def _turn(name: str, talker: Talker, turn: list[dict[str, Any]], arrays: Any) -> Iterator[Check]:
    """One turn, chunk after chunk over one cache."""
    seen: dict[str, list[Check]] = {}
    talker.reset(0)
    for chunk in turn:
        for check in _chunk(talker, chunk, arrays):
            seen.setdefault(check.name, []).append(check)
    for kind, found in seen.items():
        yield worst(f"{name} {kind}", found)


def _chunk(talker: Talker, chunk: dict[str, Any], arrays: Any) -> Iterator[Check]:
    key, start = chunk["name"], talker.cache.length(0)
    condition = talker.condition(chunk["text_token_ids"], torch.tensor(arrays[f"{key}_hidden"]))
    yield compare("condition", condition.numpy(), arrays[f"{key}_condition"], TOLERANCE)
    yield same("text_start_pos", start, chunk["text_start_pos"])
    steps: list[Tensor] = []
    talker.on_step = lambda probabilities: steps.append(probabilities[0].clone())
    speech = Speech(0, condition, chunk["last"], True, TEMPERATURE, SeededUniforms(0))
    tokens = talker.speak([speech])[0]
    talker.on_step = None
    yield same("out_tokens", tokens, chunk["out_tokens"])
    yield same("sampled", [int(step.argmax()) for step in steps], chunk["sampled"])
    yield same("kv_after", start + len(condition) + len(tokens), chunk["kv_after"])
    ids = torch.tensor(arrays[f"{key}_top8_ids"]).long()
    likeliest = torch.stack(steps)
    if likeliest.shape[0] == ids.shape[0]:
        likeliest = likeliest.gather(1, ids)
    yield compare("top8_probs", likeliest.numpy(), arrays[f"{key}_top8_probs"], TOLERANCE)
