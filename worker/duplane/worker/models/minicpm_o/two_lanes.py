"""Compares launches of both lanes at the same time with the same launches one after the other.

Lane L hears a unit, feeds a prompt and some ids; lane S speaks and vocodes. The bits must be equal,
because the kernels and their order are the same. VISION, SETTLE and VOICE are not compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from duplane.worker.models.interface import DeviceLostError
from duplane.worker.models.minicpm_o.audio.mel import FIRST_UNIT_FILL
from duplane.worker.models.minicpm_o.llm.language_model import PREFILL_ROWS
from duplane.worker.models.minicpm_o.llm.sampling import SeededUniforms
from duplane.worker.models.minicpm_o.model import DuplexModel
from duplane.worker.models.minicpm_o.preparer import PreparedConversation
from duplane.worker.models.minicpm_o.proof import Proofs, relative_error
from duplane.worker.models.minicpm_o.transfer import download
from duplane.worker.models.minicpm_o.tts.sampling import TOKENS_PER_UNIT, SpeechRequest
from duplane.worker.models.minicpm_o.vocoder.types import VocoderChunk
from duplane.worker.models.torch_device import EnterLane
from duplane.worker.models.types import ConversationOptions

LIMIT_S = 120.0
"""Longest wait for the launches of one trial, in seconds."""
SLOTS = (1, 3, 8)
REPEATS = 2
"""How often the lanes run at the same time with each number of slots."""
STEPS = 8
SPOKEN_UNITS = 2
TEXT_IDS = 7


def choose_lane_count(
    lanes: Literal["auto", 1, 2], model: DuplexModel, enter: EnterLane
) -> Literal[1, 2]:
    """Return 2 if `lanes` asks for two lanes and the model proves that it can run in them.

    `auto` asks for two on CUDA. All slots must be clean, and are clean afterwards. Raises
    DeviceLostError if the launches of a trial do not end.
    """
    is_cuda = model.llm.cache.keys.device.type == "cuda"
    speaks = model.parts.talker is not None and model.parts.vocoder is not None
    if lanes == 1 or (lanes == "auto" and not is_cuda) or not speaks or model.slot_count == 1:
        return 1
    proofs = Proofs("second lanes")
    agrees = proofs.accepts("speech beside the LLM", partial(_error, model, enter), 0.0)
    with enter("llm"):
        for slot in range(min(SLOTS[-1], model.slot_count)):
            model.close(slot)
    proofs.report()
    return 2 if agrees else 1


def _error(model: DuplexModel, enter: EnterLane) -> float:
    """Return the largest error of any trial, as a share of the largest value."""
    prepared = model.preparer.conversation(ConversationOptions(seed=0))
    errors: list[float] = []
    for count in sorted({min(count, model.slot_count) for count in SLOTS}):
        run = partial(_run, model, enter, prepared, count)
        plain = run(["llm"], ["speech"])
        for _ in range(REPEATS):
            both = run(["llm", "speech"])
            errors.append(relative_error([(both[name], plain[name]) for name in plain]))
    return max(errors)


def _run(
    model: DuplexModel,
    enter: EnterLane,
    prepared: PreparedConversation,
    count: int,
    *groups: Sequence[str],
) -> dict[str, Tensor]:
    """Run the lanes of each group at the same time, the groups one after the other."""
    with enter("llm"):
        for slot in range(count):
            model.close(slot)
            model.begin(slot, prepared)
            if model.parts.vocoder is not None:
                model.parts.vocoder.start_turn(slot)
    calls = {"llm": partial(_think, model, count), "speech": partial(_speak, model, count)}
    found: dict[str, Tensor] = {}
    for names in groups:
        found |= _together({name: calls[name] for name in names}, enter)
    return found


def _together(calls: Mapping[str, Callable[[], Tensor]], enter: EnterLane) -> Mapping[str, Tensor]:
    """Make each call in its lane, in a thread of its own. Raises the first exception of any."""
    results = {name: Future[Tensor]() for name in calls}
    for name, call in calls.items():
        arguments = enter, name, call, results[name]
        threading.Thread(target=_call, args=arguments, name=f"{name} trial", daemon=True).start()
    _, running = wait(results.values(), LIMIT_S)
    if running:
        raise DeviceLostError(
            f"launches of {' beside '.join(calls)} have not ended for {LIMIT_S:.0f} s; "
            "lanes = 1 leaves this trial out"
        )
    return {name: result.result() for name, result in results.items()}


def _call(enter: EnterLane, name: str, call: Callable[[], Tensor], result: Future[Tensor]) -> None:
    try:
        with enter(name), torch.inference_mode():
            found = call()
    except Exception as error:  # noqa: BLE001 - the root of a thread; its caller raises it again
        result.set_exception(error)
    else:
        result.set_result(found)


def _think(model: DuplexModel, count: int) -> Tensor:
    """Hear a unit in each slot, feed a prompt, the unit and some ids; return all results."""
    slots, audio, llm = range(count), model.parts.audio, model.llm
    for slot in slots:
        noise = np.random.default_rng(slot).normal(0, 0.1, FIRST_UNIT_FILL)
        audio.mel.push(slot, noise.astype(np.float32))
        audio.mel.take(slot)
    heard = audio.encode(slots)
    rows = min(PREFILL_ROWS // count, llm.cache.capacity // 2)
    prompt = [row % llm.vocabulary for row in range(count * rows)]
    found = [heard, *llm.feed([(slot, rows) for slot in slots], prompt)]
    hidden, logits = llm.feed([(slot, heard.shape[1]) for slot in slots], heard.flatten(0, 1))
    for _ in range(STEPS):
        found += [hidden, logits]
        ids: list[int] = download(logits.argmax(-1)).tolist()
        hidden, logits = llm.feed([(slot, 1) for slot in slots], ids)
    return _joined([*found, hidden, logits])


def _speak(model: DuplexModel, count: int) -> Tensor:
    """Speak some units in each slot; return the tokens and the samples."""
    talker, vocoder = model.parts.talker, model.parts.vocoder
    assert talker is not None
    assert vocoder is not None
    condition = talker.condition(range(TEXT_IDS), model.llm.embed(range(TEXT_IDS)).unbind())
    uniforms = [SeededUniforms(slot) for slot in range(count)]
    size = TOKENS_PER_UNIT + vocoder.lookahead
    found: list[Tensor] = []
    for _ in range(SPOKEN_UNITS):
        requests = [
            SpeechRequest(slot, condition, draws, is_greedy=False, temperature=1.0)
            for slot, draws in enumerate(uniforms)
        ]
        spoken = talker.speak(requests)
        padded = [(tokens + [vocoder.silence_token_id] * size)[:size] for tokens in spoken]
        chunks = [VocoderChunk(slot, tokens, False) for slot, tokens in enumerate(padded)]
        found += map(torch.as_tensor, (*padded, *vocoder.decode(chunks)))
    return _joined(found)


def _joined(results: Sequence[Tensor]) -> Tensor:
    """Return all values [n] on the host, as float32, which has those of the other types exactly."""
    values = torch.cat([result.float().flatten() for result in results])
    return torch.as_tensor(download(values))
