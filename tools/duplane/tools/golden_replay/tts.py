"""Replays units/tts: the talker alone, with recorded hidden states as input."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor

from duplane.tools.golden_replay.check import Check, compare, same, skipped, worst
from duplane.tools.golden_replay.forcing import MOST_DIFFERENT
from duplane.tools.golden_replay.recording import RecordedUniforms
from duplane.tools.golden_replay.target import CPU_TARGET, ReplayTarget
from duplane.worker.models.minicpm_o.checkpoint import Checkpoint
from duplane.worker.models.minicpm_o.llm.sampling import SeededUniforms
from duplane.worker.models.minicpm_o.transfer import upload
from duplane.worker.models.minicpm_o.tts.passages import SpeechStream, advance
from duplane.worker.models.minicpm_o.tts.sampling import TOKENS_PER_UNIT, SpeechRequest
from duplane.worker.models.minicpm_o.tts.talker import Talker

TOLERANCE = 1e-4
TEMPERATURE = 0.8


def checks(golden: Path, target: ReplayTarget = CPU_TARGET) -> Iterator[Check]:
    """Yield all checks of the talker traces that the directory has."""
    path = golden / "units" / "tts.json"
    if not path.exists():
        return
    trace = orjson.loads(path.read_bytes())
    arrays = np.load(path.with_suffix(".npz"))
    source = Checkpoint(golden / "checkpoint")
    talker = Talker(source.config, 1, target.device, target.dtype)
    with torch.inference_mode():
        talker.load(source)
        for number, turn in enumerate(trace["turns"]):
            yield from _turn(
                f"tts turn {number}", talker, turn, arrays, is_forced=not target.is_exact
            )
        for name, part in (("streaming", _streaming), ("oneshot", _oneshot)):
            if name in trace and target.is_exact:
                yield from part(talker, trace[name], arrays)
            elif name in trace:
                yield skipped(f"tts {name}", "has only tokens, which rounding changes")


def _turn(
    name: str, talker: Talker, turn: list[dict[str, Any]], arrays: Any, *, is_forced: bool
) -> Iterator[Check]:
    """Check one turn: its chunks run one after the other and share a cache.

    If it `is_forced`, every step feeds the recorded token. Of the own tokens some may differ.
    """
    seen: dict[str, list[Check]] = {}
    talker.cache.reset(0)
    for chunk in turn:
        for check in _chunk(talker, chunk, arrays, is_forced=is_forced):
            seen.setdefault(check.name, []).append(check)
    for kind, found in seen.items():
        yield worst(f"{name} {kind}", found)


def _chunk(
    talker: Talker, chunk: dict[str, Any], arrays: Any, *, is_forced: bool
) -> Iterator[Check]:
    key = chunk["name"]
    start = talker.cache.length(0)
    condition = _condition(talker, chunk["text_token_ids"], arrays[f"{key}_hidden"])
    yield compare("condition", condition, arrays[f"{key}_condition"], TOLERANCE)
    yield same("text_start_pos", start, chunk["text_start_pos"])
    steps: list[Tensor] = []

    def on_step(probabilities: Tensor) -> None:
        steps.append(probabilities[0].clone())
        if is_forced:
            probabilities.zero_()
            probabilities[:, chunk["sampled"][len(steps) - 1]] = 1.0

    talker.on_step = on_step
    uniforms = RecordedUniforms(()) if is_forced else SeededUniforms(0)
    request = SpeechRequest(
        0, condition, uniforms, not is_forced, TEMPERATURE, is_turn_end=chunk["last"]
    )
    tokens = talker.speak([request])[0]
    talker.on_step = None
    yield same("out_tokens", tokens, chunk["out_tokens"])
    sampled = [int(step.argmax()) for step in steps]
    if is_forced:
        pairs = zip(sampled, chunk["sampled"], strict=True)
        share = sum(own != recorded for own, recorded in pairs) / len(sampled)
        yield compare("own tokens", share, 0.0, MOST_DIFFERENT)
    else:
        yield same("sampled", sampled, chunk["sampled"])
    yield same("kv_after", start + len(condition) + len(tokens), chunk["kv_after"])
    ids = upload(arrays[f"{key}_top8_ids"], condition.device, torch.long)
    likeliest = torch.stack(steps)
    if likeliest.shape[0] == ids.shape[0]:
        likeliest = likeliest.gather(1, ids)
    recorded = arrays[f"{key}_top8_probs"]
    if is_forced:
        # Errors of scores, and so of logarithms, do not depend on their size. The talker of the
        # public traces is so narrow that they are twice as large as those of other values.
        check = compare("top8_logs", likeliest.log(), np.log(recorded), TOLERANCE)
        yield check if check.relative is None else replace(check, relative=check.relative / 2)
    else:
        yield compare("top8_probs", likeliest, recorded, TOLERANCE)


def _streaming(talker: Talker, trace: dict[str, Any], arrays: Any) -> Iterator[Check]:
    """Check an answer whose text reaches the talker in several segments.

    The tokens of each segment are compared. The trace groups these tokens by unit.
    """
    talker.cache.reset(0)
    stream = SpeechStream(0, SeededUniforms(0), is_greedy=True, temperature=TEMPERATURE)
    held: list[int] = []
    last = len(trace["segments"]) - 1
    for index, segment in enumerate(trace["segments"]):
        name = f"tts streaming {index}"
        condition = _marked(talker, arrays[f"stream_cond{index}"], is_text_end=index == last)
        tokens = _spoken(talker, stream, condition, most=trace["max_new_token"])
        held += tokens
        portions: list[dict[str, Any]] = []
        while len(held) >= TOKENS_PER_UNIT:
            portions.append({"tokens": held[:TOKENS_PER_UNIT], "last": False})
            del held[:TOKENS_PER_UNIT]
        if index == last:
            portions.append({"tokens": held, "last": True})
            held = []
        yield same(f"{name} yields", portions, segment["yields"])
        yield same(f"{name} chunk_audio_tokens", len(tokens), segment["chunk_audio_tokens"])
        yield same(f"{name} condition_len", len(condition), segment["condition_len"])
        yield same(f"{name} buffer_after", len(held), segment["buffer_after"])
        yield same(f"{name} kv", talker.cache.length(0), segment["kv"])


def _oneshot(talker: Talker, trace: dict[str, Any], arrays: Any) -> Iterator[Check]:
    """Check an utterance of one segment. Its recorded condition already contains the end marks."""
    talker.cache.reset(0)
    stream = SpeechStream(0, SeededUniforms(0), is_greedy=True, temperature=TEMPERATURE)
    condition = _on_device(talker, arrays["oneshot_cond"])
    fewest, most = trace["min_new"], trace["max_new"]
    tokens = _spoken(talker, stream, condition, fewest=fewest, most=most)
    has_ended = stream.unfed is None
    # If an utterance has reached its maximum length, its trace lacks the last drawn token.
    yield same("tts oneshot tokens", tokens if has_ended else tokens[:-1], trace["tokens"])
    yield same("tts oneshot finished", has_ended, trace["finished"])


def _spoken(talker: Talker, stream: SpeechStream, condition: Tensor, **bounds: int) -> list[int]:
    """Return all tokens of one segment."""
    stream.begin(condition, **bounds)
    tokens: list[int] = []
    while not stream.is_done:
        tokens += advance(talker, [stream])[0]
    return tokens


def _marked(talker: Talker, condition: Any, *, is_text_end: bool) -> Tensor:
    """Add marks to the end of a recorded condition: text end (if `is_text_end`), then BOS."""
    marks = talker.condition((), torch.empty(0), is_text_end=is_text_end)
    return torch.cat((_on_device(talker, condition), marks))


def _condition(talker: Talker, ids: list[int], hidden: Any) -> Tensor:
    """Compute a condition from recorded ids and hidden states."""
    return talker.condition(ids, _on_device(talker, hidden))


def _on_device(talker: Talker, values: Any) -> Tensor:
    """Copy recorded values to the talker's device, in its dtype."""
    table = talker.emb_text.weight
    return upload(values, table.device, table.dtype)
