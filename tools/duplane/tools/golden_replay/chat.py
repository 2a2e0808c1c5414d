"""Replays sessions/chat_* and half_duplex: prompts, answers and speech of turn-based chats."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from numpy.typing import NDArray
from torch import Tensor

from duplane.tools.golden_replay.audio import read_audio, read_clip
from duplane.tools.golden_replay.check import Check, Verdict, compare, same, same_texts, skipped
from duplane.tools.golden_replay.half_duplex import HalfDuplex
from duplane.tools.golden_replay.recording import NO_VOICE, CountingVocoder, Recorder
from duplane.tools.golden_replay.target import CPU_TARGET, ReplayTarget
from duplane.worker.models.chat import (
    ChatAudio,
    ChatImage,
    ChatMessage,
    ChatOptions,
    ChatOutput,
    ChatPart,
    ChatRequest,
    ChatRole,
    Finish,
)
from duplane.worker.models.interface import Part
from duplane.worker.models.minicpm_o.chat.prompt import ChatPrompt
from duplane.worker.models.minicpm_o.chat.prompt_rows import PromptRows
from duplane.worker.models.minicpm_o.chat.state import CHUNK_IDS
from duplane.worker.models.minicpm_o.loader import ModelParts, load_parts
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.vocoder.voice import Voices
from duplane.worker.models.types import DecodeMode

TOLERANCE = 1e-4
SLOT = 0
ROOM = 128
"""Context rows beyond the recorded length, since that length excludes tokens that were never
fed."""

# Channels of `inputs_embeds` that a trace keeps.
_STRIDES = {"inputs_embeds": 1, "inputs_embeds_c16": 16}


def checks(golden: Path, target: ReplayTarget = CPU_TARGET) -> Iterator[Check]:
    """Yield all checks of the chats that the directory has."""
    sessions = golden / "sessions"
    paths = [*sorted(sessions.glob("chat_*.json")), *sessions.glob("half_duplex*.json")]
    traces = [
        (orjson.loads(path.read_bytes()), np.load(path.with_suffix(".npz"))) for path in paths
    ]
    if not traces:
        return
    loaded = load_parts(
        golden / "checkpoint",
        slot_count=1,
        context_capacity=max(_rows(trace) for trace, _ in traces) + ROOM,
        device=target.device_name,
        dtype=target.dtype_name,
    )
    target.capture(loaded)
    for trace, arrays in traces:
        if "steps" in trace:
            yield from _half_duplex(golden, loaded, trace, arrays)
        elif trace["generate_args"].get("do_sample"):
            yield skipped(trace["name"], "its draws are not recorded")
        else:
            yield from _chat(golden, loaded, trace, arrays)


def _rows(trace: dict[str, Any]) -> int:
    if "steps" in trace:
        return max(step["kv"] for step in trace["steps"])
    return trace["kv_after_generate"]


def _chat(
    golden: Path, loaded: ModelParts, trace: dict[str, Any], arrays: Mapping[str, Any]
) -> Iterator[Check]:
    name = trace["name"]
    messages = [
        ChatMessage(ChatRole(entry["role"]), tuple(_parts(golden, entry["content"])))
        for entry in trace["messages"]
    ]
    options = _options(trace["generate_args"], trace["prefill_args"])
    seen = ObservedModel(loaded, trace["token2wav_calls"])
    model = seen.model
    request = ChatRequest(tuple(messages), options)
    prepared = model.preparer.chat(request)
    prompt, length = prepared.prompt, prepared.prompt_rows
    yield same(f"{name} prompt", prompt.text, trace["prompt"])
    yield same(f"{name} input_ids", prompt.ids[:length], trace["input_ids"])
    for kind, bounds in (
        ("image_bound", prompt.image_bounds),
        ("audio_bounds", prompt.audio_bounds),
    ):
        yield same(f"{name} {kind}", [[list(bound) for bound in bounds]], trace[kind])
    yield same(f"{name} kv_after_prefill", length, trace["kv_after_prefill"])
    with torch.inference_mode():
        rows = prompt_embeddings(model.parts, prompt)[:length]
    for key, stride in _STRIDES.items():
        if key in arrays:
            yield compare(f"{name} {key}", rows[:, ::stride], arrays[key], TOLERANCE)
    model.open_chat(SLOT, prepared)
    seen.play()
    yield from seen.answer(name, trace, arrays["chunk_hidden"])
    yield same(f"{name} kv_after_generate", seen.context_length, trace["kv_after_generate"])
    model.close(SLOT)
    yield same(f"{name} slot left clean", model.is_clean(SLOT), True)


def prompt_embeddings(parts: ModelParts, prompt: ChatPrompt) -> Tensor:
    """Return the embeddings [rows, hidden] of a prompt."""
    rows = PromptRows(parts, prompt)
    taken: list[Tensor] = []
    while not rows.is_fed:
        if rows.part is Part.HEAR:
            rows.hear()
        elif rows.part is Part.SEE and parts.vision is not None:
            rows.seen.add(parts.vision.encode_all(rows.seen.next(rows.left)))
        else:
            taken.append(rows.take(rows.left))
    return torch.cat(taken)


def _half_duplex(
    golden: Path, loaded: ModelParts, trace: dict[str, Any], arrays: Mapping[str, Any]
) -> Iterator[Check]:
    steps: list[dict[str, Any]] = trace["steps"]
    generated = [step for step in steps if step["op"] == "generate"]
    calls = [call for step in generated for call in step["token2wav_calls"]]
    seen = ObservedModel(loaded, calls)
    model = seen.model
    options = _options({**_REFERENCE, **generated[0]}, {})
    talk = HalfDuplex(model.chats, model.parts, SLOT, options)
    told = 0
    for index, step in enumerate(steps):
        name = f"{trace['name']} {index}"
        if step["op"] == "generate":
            seen.begin()
            seen.play()
            yield from seen.answer(f"{name} {step['tag']}", step, arrays[f"{step['tag']}_hidden"])
            yield same(f"{name} kv", seen.context_length, step["kv"])
            told = 0
            continue
        parts = list(_parts(golden, step["content"]))
        listen = talk.instruct if step["role"] == "system" else talk.hear
        rows = listen(parts)
        prompt = talk.prompt.text
        yield same(f"{name} prompt", prompt[told:], step["prompt"])
        yield same(f"{name} kv", rows, step["kv"])
        told = len(prompt)
    model.close(SLOT)
    yield same(f"{trace['name']} slot left clean", model.is_clean(SLOT), True)


# Options with which the reference generated, but which a half-duplex trace does not contain.
_REFERENCE = {"generate_audio": True, "use_tts_template": True, "length_penalty": 1.1}


def _options(generate: Mapping[str, Any], prefill: Mapping[str, Any]) -> ChatOptions:
    return ChatOptions(
        max_new_tokens=generate["max_new_tokens"],
        decode_mode=DecodeMode.GREEDY,
        length_penalty=generate.get("length_penalty", 1.0),
        repetition_penalty=generate.get("repetition_penalty", 1.02),
        is_thinking=generate.get("enable_thinking", False),
        generate_audio=generate["generate_audio"],
        use_tts_template=generate["use_tts_template"],
        max_slices=prefill.get("max_slice_nums"),
        use_image_id=prefill.get("use_image_id"),
        is_omni=prefill.get("omni_mode", False),
    )


def _parts(golden: Path, content: str | Sequence[str]) -> Iterator[ChatPart]:
    """Yield the parts of a message: text, a file (`@folder/file`) or its samples (`[from:to]`)."""
    for entry in [content] if isinstance(content, str) else content:
        found = re.fullmatch(r"@([^\[]+)(?:\[(\d+):(\d+)\])?", entry)
        if found is None:
            yield entry
            continue
        path = golden / found[1]
        if path.parent.name == "images":
            yield ChatImage(path.read_bytes())
        elif found[2] is None:
            yield ChatAudio(read_clip(path))
        else:
            start, stop = int(found[2]), int(found[3])
            yield ChatAudio(read_audio(path, stop)[start:stop])


@dataclass
class Yield:
    """One result of the reference: a waveform with its text, or only a piece of text."""

    text: str
    samples: int


@dataclass
class ObservedModel:
    """A model that replays one trace, and a record of the model's outputs since `begin`."""

    loaded: ModelParts
    calls: list[dict[str, Any]]
    recorder: Recorder = field(default_factory=Recorder)
    outputs: list[ChatOutput] = field(default_factory=list[ChatOutput])

    def __post_init__(self) -> None:
        silence = self.calls[0]["tokens"][0] if self.calls else 0
        parts = replace(
            self.loaded, vocoder=CountingVocoder(silence), voices=Voices(None, NO_VOICE)
        )
        self.model = DuplexModel(parts, probe=self.recorder)
        self.begin()

    def begin(self) -> None:
        """Delete the record of the last answer."""
        self.unit = self.recorder.begin_unit(SLOT)
        self.outputs.clear()

    def play(self) -> None:
        """Run the chat's answer to its end."""
        while not self.outputs or self.outputs[-1].finish is None:
            for output in self.model.chat_step([SLOT]):
                if not isinstance(output, ChatOutput):
                    raise TypeError(f"the chat failed: {output}")
                self.outputs.append(output)

    @property
    def context_length(self) -> int:
        """The number of context rows after the answer."""
        return self.outputs[-1].context_length

    def answer(
        self, name: str, trace: dict[str, Any], hidden: NDArray[np.float32]
    ) -> Iterator[Check]:
        """Compare an answer with its trace."""
        yield same(f"{name} llm_chunks", self._chunks(), trace["llm_chunks"])
        got = np.stack(self.unit.hidden) if self.unit.hidden else np.zeros_like(hidden[:0])
        yield compare(f"{name} chunk_hidden", got, hidden, TOLERANCE)
        is_heard = any("samples" in entry for entry in trace["yields"])
        if is_heard:
            waveforms = list(self._waveforms())
            counts = [entry["samples"] for entry in trace["yields"]]
            samples = same(f"{name} yields", [entry.samples for entry in waveforms], counts)
            texts = [entry.text for entry in waveforms]
        else:
            samples = None  # nothing was spoken
            texts = [output.text for output in self.outputs if output.token_ids]
        recorded = [self._plain(entry["text"]) for entry in trace["yields"]]
        if samples is not None and samples.verdict is Verdict.FAIL:
            yield samples
        else:
            yield same_texts(f"{name} yields", texts, recorded)
        calls = [
            {"tokens": tokens, "last": is_last, "first": index == 0, "samples": count}
            for index, (tokens, is_last, count) in enumerate(self.unit.pieces)
        ]
        yield same(f"{name} token2wav_calls", calls, trace["token2wav_calls"])

    def _plain(self, text: str) -> str:
        """Return a text of the reference without the names of special tokens."""
        return self.model.tokens.decode(self.model.tokens.encode(text))

    def _chunks(self) -> list[dict[str, Any]]:
        """Divide the chosen ids into chunks as the reference does: the first has one id more."""
        ids = list(self.unit.decided)
        has_ended = self.outputs[-1].finish is Finish.STOP
        if has_ended:
            ids.pop()
        chunks = [ids[: CHUNK_IDS + 1]]
        fed = [output for output in self.outputs if output.token_ids]
        for start in range(1, len(fed)):
            first = start * CHUNK_IDS + 1
            chunks.append(ids[first : first + CHUNK_IDS])
        last = len(chunks) - 1
        return [
            {"token_ids": chunk, "finished": has_ended and index == last}
            for index, chunk in enumerate(chunks)
        ]

    def _waveforms(self) -> Iterator[Yield]:
        """Yield waveforms like the reference: each with all text since the last waveform."""
        text = ""
        for output in self.outputs:
            text += output.text
            for samples in self._cut(output):
                yield Yield(text, samples)
                text = ""

    def _cut(self, output: ChatOutput) -> list[int]:
        """Return the lengths of an output's waveforms. The last output may have two."""
        if not len(output.audio):
            return []
        counts = [count for _, _, count in self.unit.pieces]
        if output.finish is not None and len(output.audio) != counts[-1]:
            return [len(output.audio) - counts[-1], counts[-1]]
        return [len(output.audio)]
