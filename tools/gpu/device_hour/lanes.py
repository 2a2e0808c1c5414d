"""How much two CUDA streams hinder each other: the LLM beside the talker and the vocoder."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch

from device_hour.costs import write_costs
from device_hour.session import Loaded, Session
from duplane.worker.models.minicpm_o.llm.sampling import SeededUniforms
from duplane.worker.models.minicpm_o.tts.sampling import SpeechRequest
from duplane.worker.models.minicpm_o.vocoder.types import VocoderChunk

MEASURED_S = 3.0
REHEARSED_S = 0.1
SPEAKING = 8
"""The conversations of the second lane."""
TEXT_IDS = 7

Lane = Callable[[], object]


def contention(session: Session) -> dict[str, Any]:
    """Return the rates of two lanes alone and together, in calls per second.

    `contention` is how many times as long a call takes while the other lane runs, as the mean of
    both lanes. The lanes are two threads, each with a CUDA stream of its own. Whether their results
    are those of one lane is what `minicpm_o.two_lanes` shows, not this stage.
    """
    loaded = session.loaded()
    count = min(SPEAKING, loaded.model.slot_count)
    found: dict[str, Any] = {}
    factors: list[float] = []
    llm = _llm(loaded)
    rates = _Rates(session, loaded)
    (llm_alone,) = rates.measure([llm])
    for name, lane in (("talker", _talker(loaded, count)), ("vocoder", _vocoder(loaded, count))):
        if lane is None:
            continue
        (alone,) = rates.measure([lane])
        together = rates.measure([llm, lane])
        slower = [llm_alone / together[0], alone / together[1]]
        found[name] = {"llm_per_s": llm_alone, "per_s": alone, "together_per_s": together}
        found[name]["slower"] = slower
        factors += slower
        found["contention"] = statistics.fmean(factors)
        session.keep(found)
    write_costs(session)
    return found


@torch.inference_mode()
def _llm(loaded: Loaded) -> Lane:
    """Return a lane that feeds one row to each conversation, again and again."""
    llm = loaded.model.llm
    counts = [(slot, 1) for slot in range(loaded.model.slot_count)]
    embeds = llm.embed([0] * len(counts))
    return lambda: llm.feed(counts, embeds)


@torch.inference_mode()
def _talker(loaded: Loaded, count: int) -> Lane | None:
    """Return a lane that draws the speech tokens of units."""
    talker = loaded.model.parts.talker
    if talker is None:
        return None
    hidden = loaded.model.llm.embed([0] * TEXT_IDS).unbind()
    condition = talker.condition(range(TEXT_IDS), hidden)

    def speak() -> object:
        return talker.speak(
            [
                SpeechRequest(
                    slot=slot,
                    condition=condition,
                    is_turn_end=False,
                    is_greedy=True,
                    temperature=1.0,
                    uniforms=SeededUniforms(slot),
                )
                for slot in range(count)
            ]
        )

    return speak


def _vocoder(loaded: Loaded, count: int) -> Lane | None:
    """Return a lane that makes the sound of units."""
    vocoder = loaded.model.parts.vocoder
    if vocoder is None:
        return None
    tokens = [vocoder.silence_token_id] * (25 + vocoder.lookahead)
    chunks = [VocoderChunk(slot, tokens, is_last=False) for slot in range(count)]
    return lambda: vocoder.decode(chunks)


class _Rates:
    """Runs lanes in threads, the first lane on one CUDA stream and the second on another."""

    def __init__(self, session: Session, loaded: Loaded) -> None:
        self._driver, sizes = loaded.driver, session.sizes
        self._rows = sizes.contexts[0]
        self._most = (sizes.context - self._rows) // 2
        self._seconds = REHEARSED_S if session.options.rehearses else MEASURED_S
        is_cuda = session.device.type == "cuda"
        self._streams = [torch.cuda.Stream(session.device) if is_cuda else None for _ in range(2)]

    def measure(self, lanes: Sequence[Lane]) -> list[float]:
        """Return the calls per second of lanes that run at the same time.

        All runs begin with contexts of the same length, and end when a context is half full.
        """
        for slot in range(self._driver.model.constants.slot_count):
            self._driver.open(slot, rows=self._rows)
        barrier, is_over = threading.Barrier(len(lanes)), threading.Event()

        @torch.inference_mode()
        def run(lane: Lane, stream: torch.cuda.Stream | None) -> float:
            wait = stream.synchronize if stream else _nothing
            try:
                with torch.cuda.stream(stream) if stream else nullcontext():
                    lane()
                    wait()
                    barrier.wait()
                    begin, calls = time.perf_counter(), 0
                    while not is_over.is_set() and calls < self._most:
                        lane()
                        wait()
                        calls += 1
                        if time.perf_counter() - begin > self._seconds:
                            is_over.set()
                    return calls / (time.perf_counter() - begin)
            except Exception:
                barrier.abort()
                raise
            finally:
                is_over.set()

        with ThreadPoolExecutor(len(lanes)) as pool:
            rates = list(pool.map(run, lanes, self._streams))
        self._driver.close()
        return rates


def _nothing() -> None:
    """Wait for nothing."""
